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

// Of a warp's ring, where a block has few warps, and where it has many. One block of either has
// about as much under way as the memory takes: with 192 KB on each multiprocessor it was slower.
constexpr int kFewRingBytes = 24 * 1024, kManyRingBytes = 16 * 1024;
constexpr int kLatest = 64;  // positions that a row of kernels may have written

template <typename Element_, int kDim_, int kWarps_, int kSlots_>
struct Shape {
    using Element = Element_;
    static constexpr int kDim = kDim_, kWarps = kWarps_, kThreads = kWarps * kWarp;
    static constexpr int kSlots = kSlots_;  // of a warp's ring
};

template <typename S>
struct Shared {
    using Element = typename S::Element;
    static constexpr int kPadded = S::kDim + kChunk, kSumsPadded = S::kDim + 4;

    union {
        uint4 slots[S::kWarps][S::kSlots][kTile * S::kDim / kChunk];
        float sums[S::kWarps][kMostGroup][kSumsPadded];  // when the slots are done with
    };
    uint4 newest[2][S::kDim / kChunk];  // key and value
    alignas(16) Element query[kMostGroup][kPadded];
    alignas(16) Element gates[kMostGroup][S::kDim];
    float scratch[S::kWarps][S::kDim];
    float2 marks[S::kWarps][kMostGroup];  // peaks and totals
    uint64_t full[S::kWarps][S::kSlots];
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
template <typename S>
__device__ __forceinline__ void prepare(const AttentionArguments& args, Shared<S>& shared,
                                        const Place& place, int64_t newest, bool last, int warp,
                                        int lane)
{
    using Element = typename S::Element;
    using Row = Values<Element, S::kDim>;
    constexpr int kValues = S::kDim / kWarp;
    const Columns<S::kDim> columns(args);
    const Element* const token =
        static_cast<const Element*>(args.projected) + place.row * args.stride;
    const Element* const queries = token + place.kv_head * args.group * columns.of_query;
    const bool q_normed = args.q_norm.data, k_normed = args.k_norm.data;
    const bool gated = args.gated && args.splits == 1;
    const bool has_key = last && warp == S::kWarps - 1, has_value = last && warp == S::kWarps - 2;
    const Row of_query(args.q_norm, 0, q_normed ? S::kDim : 0, lane);
    const Row of_key(args.k_norm, 0, has_key && k_normed ? S::kDim : 0, lane);
    wait_for_predecessor();
    const Turner<Element, S::kDim> turner(args, place.row, shared.scratch[warp], lane);
    const int from = (has_key ? columns.keys : columns.values) + place.kv_head * S::kDim;
    const Row added({token + from, false}, 0, has_key || has_value ? S::kDim : 0, lane);
    for (int head = warp; head < args.group; head += S::kWarps) {
        const Element* const query = queries + head * columns.of_query;
        const Row raw({query, false}, 0, S::kDim, lane);
        const Row gates({query + S::kDim, false}, 0, gated ? S::kDim : 0, lane);
        turner.turn(raw, q_normed, of_query, shared.query[head]);
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            shared.gates[head][i * kWarp + lane] = gates.element(i);
        }
    }
    auto* const to = reinterpret_cast<Element*>(shared.newest[has_key ? 0 : 1]);
    auto* const cache = static_cast<Element*>(has_key ? args.keys : args.values) + newest;
    if (has_key) {
        turner.turn(added, k_normed, of_key, to);
    } else if (has_value) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) to[i * kWarp + lane] = added.element(i);
    }
    if (has_key || has_value) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) cache[i * kWarp + lane] = to[i * kWarp + lane];
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
template <typename S>
__device__ __forceinline__ void finish(const AttentionArguments& args, Shared<S>& shared,
                                       const Place& place,
                                       Mixture<typename S::Element, S::kDim>& seen, int warp,
                                       int lane)
{
    using Element = typename S::Element;
    constexpr int kDim = S::kDim, kWarps = S::kWarps;
    seen.close();
    const int first = lane % 4 * 2;
    if (lane < 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            shared.marks[warp][first + i] = make_float2(seen.peak[i], seen.total[i]);
        }
    }
    __syncthreads();
    const bool direct = args.splits == 1;
    const int64_t entries =
        (place.head(args) * args.splits + place.split) * args.group;  // of partial sums
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int head = first + i;
        float peak = shared.marks[0][head].x, total = 0.0f;
#pragma unroll
        for (int other = 1; other < kWarps; ++other) {
            peak = fmaxf(peak, shared.marks[other][head].x);
        }
#pragma unroll
        for (int other = 0; other < kWarps; ++other) {
            const float2 marks = shared.marks[other][head];
            total = fmaf(marks.y, exp2f(marks.x - peak), total);
        }
        if (head >= args.group) continue;
        const float left = exp2f(seen.peak[i] - peak);
        const float share = direct ? left / total : left;
        if (!direct && warp == 0 && lane < 4) args.marks[entries + head] = make_float2(peak, total);
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
            float* const to = &shared.sums[warp][head][step * 16 + lane / 4];
            to[0] = seen.mixed[step][i] * share;
            to[8] = seen.mixed[step][i + 2] * share;
        }
    }
    __syncthreads();
    constexpr int kRuns = kDim / 4;
    for (int index = threadIdx.x; index < args.group * kRuns; index += S::kThreads) {
        const int head = index / kRuns, dim = index % kRuns * 4;
        float4 mixed = {};
#pragma unroll
        for (int other = 0; other < kWarps; ++other) {
            const float4 part = *reinterpret_cast<const float4*>(&shared.sums[other][head][dim]);
            mixed.x += part.x;
            mixed.y += part.y;
            mixed.z += part.z;
            mixed.w += part.w;
        }
        if (direct) {
            const Element* const gates = &shared.gates[head][dim];
            Element* const out = static_cast<Element*>(args.out) +
                                 (place.head(args) * args.group + head) * kDim + dim;
            alignas(8) const Element answers[] = {
                answer(mixed.x, args.gated, gates[0]), answer(mixed.y, args.gated, gates[1]),
                answer(mixed.z, args.gated, gates[2]), answer(mixed.w, args.gated, gates[3])};
            *reinterpret_cast<uint2*>(out) = *reinterpret_cast<const uint2*>(answers);
        } else {
            reinterpret_cast<float4*>(args.partial + entries * kDim)[index] = mixed;
        }
    }
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads)
    attention_streamed(const __grid_constant__ AttentionArguments args)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    using Element = typename S::Element;
    constexpr int kDim = S::kDim, kSlots = S::kSlots;
    announce_dependents();
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& shared = *reinterpret_cast<Shared<S>*>(bytes);
    const Place place;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const bool parked = args.parked[place.row];
    const int position = static_cast<int>(args.position[place.row]);
    if (parked) {
        wait_for_predecessor();
        if (args.splits > 1) return;
        Element* const out = static_cast<Element*>(args.out) + place.head(args) * args.group * kDim;
        for (int index = threadIdx.x; index < args.group * kDim; index += S::kThreads) {
            out[index] = Element(0.0f);
        }
        return;
    }
    const Split split(place.split, position, S::kWarps);
    if (place.split >= split.active(args.splits)) return;

    const int first = place.split * S::kWarps + warp, step = args.splits * S::kWarps;
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
    prepare<S>(args, shared, place, newest, split.has_last(args.splits), warp, lane);
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
    finish<S>(args, shared, place, seen, warp, lane);
#endif
}

template <typename S>
void launch(const AttentionArguments& args, cudaStream_t stream)
{
    auto* const kernel = attention_streamed<S>;
    constexpr int kBytes = sizeof(Shared<S>);
    C10_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    const auto part = [](int value) { return static_cast<unsigned>(value); };
    launch_dependent(kernel, dim3(part(args.splits), part(args.kv_heads), part(args.rows)),
                     S::kThreads, 1, kBytes, stream, args);
    if (args.splits == 1) return;
    // A multiprocessor that has to share out its memory anew lets nothing start ahead.
    auto* const merge = attention_merge<typename S::Element, S::kDim>;
    C10_CUDA_CHECK(cudaFuncSetAttribute(merge, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    launch_dependent(
        merge,
        dim3(S::kDim / (kMergeColumns * 4), part(args.kv_heads * args.group), part(args.rows)),
        kMergeThreads, 1, 0, stream, args);
}

template <typename Element, int kDim>
void launch_warps(const AttentionArguments& args, cudaStream_t stream)
{
    constexpr int kTileBytes = kTile * kDim * 2;
    if (args.warps == kMostWarps) {
        launch<Shape<Element, kDim, kMostWarps, kManyRingBytes / kTileBytes>>(args, stream);
    } else {
        launch<Shape<Element, kDim, kMostWarps / 2, kFewRingBytes / kTileBytes>>(args, stream);
    }
}

template <typename Element>
void launch_dims(const AttentionArguments& args, cudaStream_t stream)
{
    if (args.dim == 256) {
        launch_warps<Element, 256>(args, stream);
    } else {
        launch_warps<Element, 128>(args, stream);
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
