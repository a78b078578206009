// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "cluster.cuh"
#include "row.cuh"

namespace ds_hybrid {

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;
constexpr int kBinsOfThread = kBins / kThreads;
static_assert(kBinsOfThread == 4, "a thread's bins are one 16-byte load");
constexpr int kCapacity = 3584;  // what the 48 KB of a block leave

// The bin in which a sum over bins, from the first on, reaches what is needed.
struct Found {
    uint64_t need;    // of the bin's own weight
    uint64_t inside;  // the bin's own weight
    uint32_t bin;     // kBins where all bins together do not reach it
};

// Where the last entry to be kept is looked for: from `low` to `high`, where the weights from the
// top reach `need`. Entries above are kept, entries below are dropped.
struct Span {
    Place low, high;
    uint64_t need;  // 0 where it goes by the total, which is not known yet
    bool few;       // do its entries fit `places`?
};

struct Shared {
    // 64-bit sums of two words each, since shared memory adds no more at a time.
    alignas(16) uint32_t low[kBins];
    alignas(16) uint32_t high[kBins];
    Place places[kCapacity];  // entries of a span, in any order
    uint64_t of_warps[kWarps];
    Found found;
    Span span;
    uint32_t edges[2];
    uint32_t collected;  // how many there were for `places`
    uint32_t highest;    // key of the row's largest entry
    uint32_t bound;      // a key that at least top_k entries reach
};

// The blocks that share a row. The first one's memory is where they meet.
struct Team {
    int split, rank;
    Shared *mine, *lead;

    __device__ __forceinline__ bool leads() const { return rank == 0; }
    __device__ __forceinline__ void meet() const { synchronise(split); }
};

__device__ __forceinline__ void add_one(Shared& shared, uint32_t bin)
{
    atomicAdd(&shared.low[bin], 1u);
}

__device__ __forceinline__ void add(Shared& shared, uint32_t bin, uint64_t weight)
{
    const uint32_t low = static_cast<uint32_t>(weight);
    const uint32_t before = atomicAdd(&shared.low[bin], low);
    const uint32_t carry = before + low < low;
    const uint32_t high = static_cast<uint32_t>(weight >> 32) + carry;
    if (high != 0) atomicAdd(&shared.high[bin], high);
}

// The weights of a thread's bins, which are empty afterwards.
__device__ __forceinline__ void take_bins(Shared& shared, uint64_t (&weights)[kBinsOfThread])
{
    uint4* low = reinterpret_cast<uint4*>(shared.low) + threadIdx.x;
    uint4* high = reinterpret_cast<uint4*>(shared.high) + threadIdx.x;
    const uint4 lows = *low, highs = *high;
    weights[0] = static_cast<uint64_t>(highs.x) << 32 | lows.x;
    weights[1] = static_cast<uint64_t>(highs.y) << 32 | lows.y;
    weights[2] = static_cast<uint64_t>(highs.z) << 32 | lows.z;
    weights[3] = static_cast<uint64_t>(highs.w) << 32 | lows.w;
    *low = *high = make_uint4(0, 0, 0, 0);
}

// Brings the histograms of a row's blocks together in the first one's. All threads of all blocks.
__device__ __forceinline__ void merge_histograms(const Team& team)
{
    __syncthreads();
    if (!team.leads()) {
        uint64_t weights[kBinsOfThread];
        take_bins(*team.mine, weights);
#pragma unroll
        for (int i = 0; i < kBinsOfThread; ++i) {
            if (weights[i] != 0) add(*team.lead, threadIdx.x * kBinsOfThread + i, weights[i]);
        }
    }
    team.meet();
}

// All threads of a block; needed(total) is asked for what is needed. Leaves the histogram empty.
template <typename Needed>
__device__ Found find_bin(Shared& shared, Needed needed)
{
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    uint64_t weights[kBinsOfThread], sum = 0;
    take_bins(shared, weights);
#pragma unroll
    for (int i = 0; i < kBinsOfThread; ++i) sum += weights[i];
    uint64_t upto = sum;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const uint64_t other = __shfl_up_sync(kAllLanes, upto, offset);
        if (lane >= offset) upto += other;
    }
    if (lane == kWarp - 1) shared.of_warps[warp] = upto;
    if (threadIdx.x == 0) shared.found = {0, 0, kBins};
    __syncthreads();

    uint64_t above = upto - sum, total = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
        const uint64_t of_warp = shared.of_warps[i];
        if (i < warp) above += of_warp;
        total += of_warp;
    }
    const uint64_t need = needed(total);
#pragma unroll
    for (int i = 0; i < kBinsOfThread; ++i) {
        if (above < need && need <= above + weights[i]) {
            shared.found = {need - above, weights[i], threadIdx.x * kBinsOfThread + i};
        }
        above += weights[i];
    }
    __syncthreads();
    return shared.found;
}

}  // namespace ds_hybrid
