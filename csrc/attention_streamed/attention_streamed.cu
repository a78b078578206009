// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

// Attention of one new token of every row, at the rate at which keys and values can be read.
//
// A block has a split of a row's positions, for one head of keys and values and all query heads
// that share it. Each of its warps has a ring of its own, through which the copy engine brings the
// tiles of 16 tokens that are the warp's turn; no warp waits for another before all are through.
// Products are the tensor cores', with tokens or dimensions as rows and query heads as columns, so
// that a tile costs a warp some hundred instructions. The new token takes its place in the last
// tile, where the copy engine cannot have put it yet.
//
// What kernels of the same step may have written is the row's latest positions. Tiles ahead of
// these are asked for before the kernel ahead has ended.

#include "merge.cuh"

namespace ds_hybrid {
namespace {

#ifndef ATTENTION_SLOTS
#define ATTENTION_SLOTS 3
#endif
constexpr int kThreads = kWarps * kWarp;
constexpr int kLatest = 64;  // positions that a row of kernels may have written

template <typename Element, int kDim, int kSlots>
struct Shared {
    static constexpr int kPadded = kDim + kChunk, kSumsPadded = kDim + 4;

    union {
        uint4 slots[kWarps][kSlots][kTile * kDim / kChunk];
        float sums[kWarps][kMostGroup][kSumsPadded];  // when the slots are done with
    };
    uint4 newest[2][kDim / kChunk];  // key and value
    alignas(16) Element query[kMostGroup][kPadded];
    float scratch[kWarps][kDim];
    float2 marks[kWarps][kMostGroup];  // peaks and totals
    uint64_t full[kWarps][kSlots];
};

// Where a block is.
struct Place {
    int row, kv_head, split;

    __device__ __forceinline__ Place() : row(blockIdx.z), kv_head(blockIdx.y), split(blockIdx.x) {}

    __device__ __forceinline__ int64_t head(const AttentionArguments& args) const
    {
        return static_cast<int64_t>(row) * args.kv_heads + kv_head;
    }
};

// Queries into shared memory, and where the block has the last tile the new key and value as well,
// there and in the cache.
template <typename Element, int kDim, int kSlots>
__device__ __forceinline__ void prepare(const AttentionArguments& args,
                                        Shared<Element, kDim, kSlots>& shared, const Place& place,
                                        int64_t newest, bool last, int warp, int lane)
{
    const Columns<kDim> columns(args);
    const Element* const token =
        static_cast<const Element*>(args.projected) + place.row * args.stride;
    const Gains<Element, kDim> of_query(args.q_norm, lane);
    wait_for_predecessor();
    const Element* const queries = token + place.kv_head * args.group * columns.of_query;
    for (int head = warp; head < args.group; head += kWarps) {
        turn_head<Element, kDim>(args, place.row, queries + head * columns.of_query, args.q_norm,
                                 of_query, shared.scratch[warp], shared.query[head], lane);
    }
    if (!last) return;
    auto* const key = reinterpret_cast<Element*>(shared.newest[0]);
    auto* const value = reinterpret_cast<Element*>(shared.newest[1]);
    if (warp == kWarps - 1) {
        const Gains<Element, kDim> of_key(args.k_norm, lane);
        turn_head<Element, kDim>(args, place.row, token + columns.keys + place.kv_head * kDim,
                                 args.k_norm, of_key, shared.scratch[warp], key, lane);
#pragma unroll
        for (int dim = lane; dim < kDim; dim += kWarp) {
            static_cast<Element*>(args.keys)[newest + dim] = key[dim];
        }
    } else if (warp == 0) {
#pragma unroll
        for (int dim = lane; dim < kDim; dim += kWarp) {
            value[dim] = token[columns.values + place.kv_head * kDim + dim];
            static_cast<Element*>(args.values)[newest + dim] = value[dim];
        }
    }
}

// The new token's row of a tile; behind it zeros, for a weight of zero would not hide a NaN.
template <int kDim>
__device__ __forceinline__ void complete(uint4* tile, const uint4 (&newest)[kDim / kChunk], int row,
                                         int lane)
{
    for (int chunk = lane; chunk < kDim / kChunk; chunk += kWarp) {
        tile[place_of(row, chunk)] = newest[chunk];
        for (int beyond = row + 1; beyond < kTile; ++beyond) {
            tile[place_of(beyond, chunk)] = make_uint4(0, 0, 0, 0);
        }
    }
    __syncwarp();
}

// What warps have seen of the split becomes the row's output, or its split's part of that.
template <typename Element, int kDim, int kSlots>
__device__ __forceinline__ void finish(const AttentionArguments& args,
                                       Shared<Element, kDim, kSlots>& shared, const Place& place,
                                       Mixture<Element, kDim>& seen, int warp, int lane)
{
    seen.close();
    const int head = lane % 4 * 2;
    if (lane < 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            shared.marks[warp][head + i] = make_float2(seen.peak[i], seen.total[i]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float peak = shared.marks[0][head + i].x;
#pragma unroll
        for (int other = 1; other < kWarps; ++other) {
            peak = fmaxf(peak, shared.marks[other][head + i].x);
        }
        const float left = exp2f(seen.peak[i] - peak);
        if (head + i >= args.group) continue;
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
            float* const to = &shared.sums[warp][head + i][step * 16 + lane / 4];
            to[0] = seen.mixed[step][i] * left;
            to[8] = seen.mixed[step][i + 2] * left;
        }
    }
    __syncthreads();
    const bool direct = args.splits == 1;
    const int64_t of_heads = place.head(args) * args.group;
    const int64_t entries =
        (place.head(args) * args.splits + place.split) * args.group;  // of partial sums
    const Element* const gates =
        static_cast<const Element*>(args.projected) + place.row * args.stride + kDim;
    for (int index = threadIdx.x; index < args.group * kDim; index += kThreads) {
        const int head = index / kDim, dim = index % kDim;
        Element gate(0.0f);
        if (direct && args.gated) {
            gate = gates[(place.kv_head * args.group + head) * 2 * kDim + dim];
        }
        float mixed = 0.0f, total = 0.0f, peak = shared.marks[0][head].x;
#pragma unroll
        for (int other = 1; other < kWarps; ++other) {
            peak = fmaxf(peak, shared.marks[other][head].x);
        }
#pragma unroll
        for (int other = 0; other < kWarps; ++other) {
            const float2 marks = shared.marks[other][head];
            total = fmaf(marks.y, exp2f(marks.x - peak), total);
            mixed += shared.sums[other][head][dim];
        }
        if (direct) {
            static_cast<Element*>(args.out)[of_heads * kDim + index] =
                answer<Element>(mixed / total, args.gated, gate);
        } else {
            args.partial[entries * kDim + index] = mixed;
            if (dim == 0) args.marks[entries + head] = make_float2(peak, total);
        }
    }
}

template <typename Element, int kDim, int kSlots>
__global__ void __launch_bounds__(kThreads)
    attention_streamed(const __grid_constant__ AttentionArguments args)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    announce_dependents();
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& shared = *reinterpret_cast<Shared<Element, kDim, kSlots>*>(bytes);
    const Place place;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (args.parked[place.row]) {
        wait_for_predecessor();
        if (args.splits > 1) return;
        Element* const out = static_cast<Element*>(args.out) + place.head(args) * args.group * kDim;
        for (int index = threadIdx.x; index < args.group * kDim; index += kThreads) {
            out[index] = Element(0.0f);
        }
        return;
    }
    const int position = static_cast<int>(args.position[place.row]);
    const Split split(place.split, position);
    if (place.split >= split.active(args.splits)) return;

    const int first = place.split * kWarps + warp, step = args.splits * kWarps;
    const int count = first < split.tiles ? (split.tiles - first + step - 1) / step : 0;
    const Ring<kDim, kSlots> ring = {shared.slots[warp],
                                     shared.full[warp],
                                     args,
                                     place.head(args) * args.capacity,
                                     first,
                                     step,
                                     count};
    int sent = 0;
    if (lane == 0) {
        for (uint64_t& full : shared.full[warp]) init_barrier(shared_address(&full), 1);
        show_barriers();
        for (; sent < min(kSlots, 2 * count); ++sent) {
            if ((ring.tile(sent / 2) + 1) * kTile > position - kLatest) break;
            ring.send(sent);
        }
    }
    const int64_t newest = (place.head(args) * args.capacity + position) * kDim;
    prepare<Element, kDim, kSlots>(args, shared, place, newest, split.has_last(args.splits), warp,
                                   lane);
    if (lane == 0) {
        for (; sent < min(kSlots, 2 * count); ++sent) ring.send(sent);
    }
    __syncthreads();
    constexpr int kSteps = kDim / 16;
    uint32_t query[kSteps][2];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const auto* const pairs = reinterpret_cast<const uint32_t*>(shared.query[lane / 4]);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            query[i][side] = lane / 4 < args.group ? pairs[i * 8 + side * 4 + lane % 4] : 0;
        }
    }

    Mixture<Element, kDim> seen;
#pragma unroll 1
    for (int number = 0; number < count; ++number) {
        const int tile = ring.tile(number);
        const bool last = tile == split.tiles - 1;
        float scores[4];
        uint32_t weights[2];
        uint4* const keys = ring.wait(2 * number);
        if (last) complete<kDim>(keys, shared.newest[0], position % kTile, lane);
        seen.score(keys, query, scores, lane);
        ring.give_back(2 * number);
        seen.weigh(scores, args.scale, position + 1 - tile * kTile, weights, lane);
        uint4* const values = ring.wait(2 * number + 1);
        if (last) complete<kDim>(values, shared.newest[1], position % kTile, lane);
        seen.mix(values, weights, lane);
        ring.give_back(2 * number + 1);
    }
    finish<Element, kDim, kSlots>(args, shared, place, seen, warp, lane);
#endif
}

template <typename Element, int kDim>
void launch(const AttentionArguments& args, cudaStream_t stream)
{
    constexpr int kSlots = ATTENTION_SLOTS * 256 / kDim;
    auto* const kernel = attention_streamed<Element, kDim, kSlots>;
    constexpr int kBytes = sizeof(Shared<Element, kDim, kSlots>);
    C10_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    const auto part = [](int value) { return static_cast<unsigned>(value); };
    launch_dependent(kernel, dim3(part(args.splits), part(args.kv_heads), part(args.rows)),
                     kThreads, 1, kBytes, stream, args);
    if (args.splits == 1) return;
    launch_dependent(
        attention_merge<Element, kDim>,
        dim3(kDim / (kMergeColumns * 4), part(args.kv_heads * args.group), part(args.rows)),
        kMergeThreads, 1, 0, stream, args);
}

template <typename Element>
void launch_dims(const AttentionArguments& args, cudaStream_t stream)
{
    if (args.dim == 256) {
        launch<Element, 256>(args, stream);
    } else {
        launch<Element, 128>(args, stream);
    }
}

}  // namespace

void launch_attention_streamed(const AttentionArguments& args, cudaStream_t stream)
{
    if (args.type == c10::ScalarType::BFloat16) {
        launch_dims<c10::BFloat16>(args, stream);
    } else {
        launch_dims<c10::Half>(args, stream);
    }
}

}  // namespace ds_hybrid
