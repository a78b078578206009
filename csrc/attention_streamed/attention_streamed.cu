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

#include "cluster.cuh"
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
        struct {  // when the slots are done with
            float sums[kWarps][kMostGroup][kSumsPadded], merged[kMostGroup][kDim];
        };
    };
    uint4 newest[2][kDim / kChunk];  // key and value
    alignas(16) Element query[kMostGroup][kPadded];
    alignas(16) Element gates[kMostGroup][kDim];
    float scratch[kWarps][kDim];
    float2 marks[kWarps][kMostGroup];  // peaks and totals
    float2 split_marks[kMostGroup];
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

// Queries and their gates into shared memory, and where the block has the last tile the new key and
// value as well, there and in the cache.
template <typename Element, int kDim, int kSlots>
__device__ __forceinline__ void prepare(const AttentionArguments& args,
                                        Shared<Element, kDim, kSlots>& shared, const Place& place,
                                        int64_t newest, bool last, int warp, int lane)
{
    const Columns<kDim> columns(args);
    const Element* const token =
        static_cast<const Element*>(args.projected) + place.row * args.stride;
    const Element* const queries = token + place.kv_head * args.group * columns.of_query;
    const Values<Element, kDim> of_query(args.q_norm, 0, args.q_norm.data ? kDim : 0, lane);
    const Values<Element, kDim> of_key(args.k_norm, 0, args.k_norm.data ? kDim : 0, lane);
    const bool gated = args.gated && args.direct();
    wait_for_predecessor();
    for (int head = warp; head < args.group; head += kWarps) {
        const Element* const from = queries + head * columns.of_query;
        const Values<Element, kDim> gates({from + kDim, false}, 0, gated ? kDim : 0, lane);
        turn_head<Element, kDim>(args, place.row, from, args.q_norm.data, of_query,
                                 shared.scratch[warp], shared.query[head], lane);
#pragma unroll
        for (int i = 0; i < kDim / kWarp; ++i) {
            shared.gates[head][i * kWarp + lane] =
                Element(static_cast<uint16_t>(gates.bits[i]), Element::from_bits());
        }
    }
    if (!last) return;
    auto* const key = reinterpret_cast<Element*>(shared.newest[0]);
    auto* const value = reinterpret_cast<Element*>(shared.newest[1]);
    if (warp == kWarps - 1) {
        turn_head<Element, kDim>(args, place.row, token + columns.keys + place.kv_head * kDim,
                                 args.k_norm.data, of_key, shared.scratch[warp], key, lane);
#pragma unroll
        for (int dim = lane; dim < kDim; dim += kWarp) {
            static_cast<Element*>(args.keys)[newest + dim] = key[dim];
        }
    } else if (warp == 0) {
        const Values<Element, kDim> raw({token + columns.values + place.kv_head * kDim, false}, 0,
                                        kDim, lane);
#pragma unroll
        for (int i = 0; i < kDim / kWarp; ++i) {
            const int dim = i * kWarp + lane;
            value[dim] = Element(static_cast<uint16_t>(raw.bits[i]), Element::from_bits());
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

// What warps have seen of the split, in shared memory.
template <typename Element, int kDim, int kSlots>
__device__ __forceinline__ void merge_warps(Shared<Element, kDim, kSlots>& shared, int group,
                                            Mixture<Element, kDim>& seen, int warp, int lane)
{
    seen.close();
    const int first = lane % 4 * 2;
    if (lane < 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            shared.marks[warp][first + i] = make_float2(seen.peak[i], seen.total[i]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int head = first + i;
        float peak = shared.marks[0][head].x, total = 0.0f;
#pragma unroll
        for (int other = 1; other < kWarps; ++other) {
            peak = fmaxf(peak, shared.marks[other][head].x);
        }
        if (head >= group || peak == -INFINITY) continue;
#pragma unroll
        for (int other = 0; other < kWarps; ++other) {
            const float2 marks = shared.marks[other][head];
            total = fmaf(marks.y, exp2f(marks.x - peak), total);
        }
        if (warp == 0 && lane < 4) shared.split_marks[head] = make_float2(peak, total);
        const float left = exp2f(seen.peak[i] - peak);
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
            float* const to = &shared.sums[warp][head][step * 16 + lane / 4];
            to[0] = seen.mixed[step][i] * left;
            to[8] = seen.mixed[step][i + 2] * left;
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void add(float4& sum, const float4& part, float weight)
{
    sum.x = fmaf(part.x, weight, sum.x);
    sum.y = fmaf(part.y, weight, sum.y);
    sum.z = fmaf(part.z, weight, sum.z);
    sum.w = fmaf(part.w, weight, sum.w);
}

// Four dimensions of a head, of all warps.
template <typename Element, int kDim, int kSlots>
__device__ __forceinline__ float4 sum_of_warps(const Shared<Element, kDim, kSlots>& shared,
                                               int head, int dim)
{
    float4 sum = {};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
        add(sum, *reinterpret_cast<const float4*>(&shared.sums[warp][head][dim]), 1.0f);
    }
    return sum;
}

// The split's part of what attention_merge() puts together.
template <typename Element, int kDim, int kSlots>
__device__ __forceinline__ void leave(const AttentionArguments& args,
                                      const Shared<Element, kDim, kSlots>& shared,
                                      const Place& place)
{
    constexpr int kRuns = kDim / 4;
    const int64_t first = (place.head(args) * args.splits + place.split) * args.group;
    float4* const to = reinterpret_cast<float4*>(args.partial + first * kDim);
    for (int index = threadIdx.x; index < args.group * kRuns; index += kThreads) {
        to[index] = sum_of_warps(shared, index / kRuns, index % kRuns * 4);
    }
    if (threadIdx.x < args.group) args.marks[first + threadIdx.x] = shared.split_marks[threadIdx.x];
}

// The row's output, of which each split of the cluster has its share.
template <typename Element, int kDim, int kSlots>
__device__ __forceinline__ void answer_together(const AttentionArguments& args,
                                                Shared<Element, kDim, kSlots>& shared,
                                                const Place& place)
{
    constexpr int kRuns = kDim / 4;
    const int splits = args.splits;
    if (splits > 1) {
        for (int index = threadIdx.x; index < args.group * kRuns; index += kThreads) {
            const int head = index / kRuns, dim = index % kRuns * 4;
            *reinterpret_cast<float4*>(&shared.merged[head][dim]) = sum_of_warps(shared, head, dim);
        }
        synchronise(splits);
    }
    for (int index = threadIdx.x * splits + place.split; index < args.group * kRuns;
         index += kThreads * splits) {
        const int head = index / kRuns, dim = index % kRuns * 4;
        float peak = -INFINITY, total = 0.0f;
        float4 mixed = {};
        if (splits == 1) {
            total = shared.split_marks[head].y;
            mixed = sum_of_warps(shared, head, dim);
        } else {
            float2 marks[kMostBlocks];
            float4 parts[kMostBlocks];
#pragma unroll
            for (int rank = 0; rank < kMostBlocks; ++rank) {
                if (rank >= splits) break;
                marks[rank] = *of_block(&shared.split_marks[head], splits, rank);
                parts[rank] =
                    *of_block(reinterpret_cast<float4*>(&shared.merged[head][dim]), splits, rank);
                peak = fmaxf(peak, marks[rank].x);
            }
#pragma unroll
            for (int rank = 0; rank < kMostBlocks; ++rank) {
                if (rank >= splits || marks[rank].x == -INFINITY) break;  // it and those behind
                const float weight = exp2f(marks[rank].x - peak);
                total = fmaf(marks[rank].y, weight, total);
                add(mixed, parts[rank], weight);
            }
        }
        const Element* const gates = &shared.gates[head][dim];
        alignas(8) const Element answers[] = {answer(mixed.x / total, args.gated, gates[0]),
                                              answer(mixed.y / total, args.gated, gates[1]),
                                              answer(mixed.z / total, args.gated, gates[2]),
                                              answer(mixed.w / total, args.gated, gates[3])};
        *reinterpret_cast<uint2*>(static_cast<Element*>(args.out) +
                                  place.head(args) * args.group * kDim + index * 4) =
            *reinterpret_cast<const uint2*>(answers);
    }
    if (splits > 1) synchronise(splits);  // others have read this block's
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
    const bool parked = args.parked[place.row];
    const int position = static_cast<int>(args.position[place.row]);
    if (parked) {
        wait_for_predecessor();
        if (!args.direct() || place.split) return;
        Element* const out = static_cast<Element*>(args.out) + place.head(args) * args.group * kDim;
        for (int index = threadIdx.x; index < args.group * kDim; index += kThreads) {
            out[index] = Element(0.0f);
        }
        return;
    }
    const Split split(place.split, position);
    const bool active = place.split < split.active(args.splits);
    if (!active && !args.direct()) return;

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
    const int most = min(kSlots, 2 * count);
    if (lane == 0) {
        for (uint64_t& full : shared.full[warp]) init_barrier(shared_address(&full), 1);
        show_barriers();
        for (; sent < most; ++sent) {
            if ((ring.tile(sent / 2) + 1) * kTile > position - kLatest) break;
            ring.send(sent, sent);
        }
    }
    const int64_t newest = (place.head(args) * args.capacity + position) * kDim;
    prepare<Element, kDim, kSlots>(args, shared, place, newest, split.has_last(args.splits), warp,
                                   lane);
    if (threadIdx.x < kMostGroup) shared.split_marks[threadIdx.x] = make_float2(-INFINITY, 0.0f);
    if (lane == 0) {
        for (; sent < most; ++sent) ring.send(sent, sent);
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
    Turn<kSlots> turn;
#pragma unroll 1
    for (int number = 0; number < count; ++number) {
        const int tile = ring.tile(number);
        const bool last = tile == split.tiles - 1;
        float scores[4];
        uint32_t weights[2];
        uint4* const keys = ring.wait(turn);
        if (last) complete<kDim>(keys, shared.newest[0], position % kTile, lane);
        seen.score(keys, query, scores, lane);
        ring.give_back(2 * number, turn);
        seen.weigh(scores, args.scale, position + 1 - tile * kTile, weights, lane);
        uint4* const values = ring.wait(turn);
        if (last) complete<kDim>(values, shared.newest[1], position % kTile, lane);
        seen.mix(values, weights, lane);
        ring.give_back(2 * number + 1, turn);
    }
    merge_warps<Element, kDim, kSlots>(shared, args.group, seen, warp, lane);
    if (args.direct()) {
        answer_together<Element, kDim, kSlots>(args, shared, place);
    } else {
        leave<Element, kDim, kSlots>(args, shared, place);
    }
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
                     kThreads, args.direct() ? part(args.splits) : 1, kBytes, stream, args);
    if (args.direct()) return;
    // A multiprocessor that has to share out its memory anew lets nothing start ahead.
    auto* const merge = attention_merge<Element, kDim>;
    C10_CUDA_CHECK(cudaFuncSetAttribute(merge, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    launch_dependent(
        merge, dim3(kDim / (kMergeColumns * 4), part(args.kv_heads * args.group), part(args.rows)),
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
