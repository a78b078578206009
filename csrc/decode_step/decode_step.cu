// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

// Two launches. scan_chunk streams the logits once: every block takes one chunk of one row and
// leaves a Partial. finish_row combines a row's partials and does the bookkeeping, a warp a row.
// Chunks have a fixed length, so sums are taken in the same order whatever the batch, and a row's
// token and logprob are bit-equal alone and among others.

#include <c10/cuda/CUDAException.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <type_traits>

#include "decode_step.h"
#include "philox.cuh"
#include "reductions.cuh"

namespace ds_hybrid {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;  // at most 64 registers a thread
constexpr int kFinishThreads = 128;
constexpr int kGroup = 4;  // vocabulary entries that share one Philox counter

enum Finish : uint8_t { kRunning = 0, kStopped = 1, kLength = 2 };

template <typename Element>
__device__ __forceinline__ const Element* row_of(const Matrix& matrix, int row)
{
    return static_cast<const Element*>(matrix.data) + row * matrix.stride;
}

// Division by a row's temperature, rounded as IEEE division is: an estimate by the reciprocal and
// two corrections by the exact remainder, which spares every entry a reciprocal of its own.
class Divisor {
public:
    __device__ __forceinline__ explicit Divisor(float value)
        : value_(value), reciprocal_(1.0f / value)
    {
    }
    __device__ __forceinline__ bool is_one() const { return value_ == 1.0f; }
    __device__ __forceinline__ float divide(float x) const
    {
        const float estimate = x * reciprocal_;
        if (!isfinite(estimate)) return estimate;
        const float closer = fmaf(fmaf(-value_, estimate, x), reciprocal_, estimate);
        return fmaf(fmaf(-value_, closer, x), reciprocal_, closer);
    }

private:
    float value_, reciprocal_;
};

template <bool sampled>
__device__ __forceinline__ Divisor divisor_of(const Arguments& args, int row)
{
    return Divisor(sampled && args.temperature != nullptr ? args.temperature[row] : 1.0f);
}

// Sixteen bytes of a row, kept as they came until they are needed.
template <typename Element>
struct Pack {
    static constexpr int kSize = 16 / sizeof(Element);
    static constexpr int kPerWord = 4 / sizeof(Element);
    uint32_t words[4];

    __device__ __forceinline__ float value(int i) const
    {
        const auto bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
        return static_cast<float>(Element(bits, Element::from_bits()));
    }
};

template <>
__device__ __forceinline__ float Pack<float>::value(int i) const
{
    return __uint_as_float(words[i]);
}

// Entries past the end of the row read as -inf, which no sum and no choice notices.
template <typename Element>
__device__ __forceinline__ Pack<Element> load_pack(const Element* row, int begin, int vocab,
                                                   bool aligned)
{
    using Bits = std::conditional_t<sizeof(Element) == 4, uint32_t, uint16_t>;
    constexpr uint32_t kLowest =
        std::is_same_v<Element, c10::Half> ? 0xfc00u : 0xff80u << (sizeof(Element) * 8 - 16);
    if (aligned && begin + Pack<Element>::kSize <= vocab) {
        const uint4 loaded = __ldcs(reinterpret_cast<const uint4*>(row + begin));
        return {{loaded.x, loaded.y, loaded.z, loaded.w}};
    }
    Pack<Element> pack;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        pack.words[word] = 0;
#pragma unroll
        for (int i = 0; i < Pack<Element>::kPerWord; ++i) {
            const int index = begin + word * Pack<Element>::kPerWord + i;
            const uint32_t bits =
                index < vocab ? reinterpret_cast<const Bits*>(row)[index] : kLowest;
            pack.words[word] |= bits << (i * 16);
        }
    }
    return pack;
}

// Calls visit(values, begin) for every pack of this thread, in ascending order of `begin`, with the
// next loads under way. Unroll is how many copies of `visit` are laid out.
template <int Ahead, int Unroll, typename Element, typename Visit>
__device__ __forceinline__ void for_each_pack(const Element* row, int vocab, int chunk, Visit visit)
{
    constexpr int kSize = Pack<Element>::kSize;
    constexpr int kTile = kThreads * kSize;
    constexpr int kTiles = kChunk / kTile;
    static_assert(kChunk % kTile == 0 && Ahead <= kTiles, "a chunk is whole tiles");
    const bool aligned = reinterpret_cast<uintptr_t>(row) % sizeof(uint4) == 0;
    const int begin = chunk * kChunk + threadIdx.x * kSize;

    Pack<Element> ahead[Ahead];
#pragma unroll
    for (int i = 0; i < Ahead; ++i) ahead[i] = load_pack(row, begin + i * kTile, vocab, aligned);
#pragma unroll Unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        float values[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) values[i] = ahead[0].value(i);
#pragma unroll
        for (int i = 1; i < Ahead; ++i) ahead[i - 1] = ahead[i];
        if (tile + Ahead < kTiles) {
            ahead[Ahead - 1] = load_pack(row, begin + (tile + Ahead) * kTile, vocab, aligned);
        }
        visit(values, begin + tile * kTile);
    }
}

// Adds noise to the entries that could still win the block, and only to those.
template <int N>
__device__ __forceinline__ void consider_noisy(const float (&scores)[N], int begin,
                                               const NoiseKey& key, SharedMaximum best_of_block,
                                               Choice& choice)
{
#pragma unroll
    for (int first = 0; first < N; first += kGroup) {
        const float group[kGroup] = {scores[first], scores[first + 1], scores[first + 2],
                                     scores[first + 3]};
        const float reach = largest_word_reaching(highest_of(group), best_of_block.read());
        if (!(reach >= half_above(0))) continue;
        const uint4 drawn = noise_words(key, static_cast<uint32_t>(begin + first) / kGroup);
        if (half_above(min(min(drawn.x, drawn.y), min(drawn.z, drawn.w))) > reach) continue;
        const uint32_t words[kGroup] = {drawn.x, drawn.y, drawn.z, drawn.w};
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
            if (half_above(words[i]) > largest_word_reaching(group[i], best_of_block.read()))
                continue;
            const float noisy = group[i] + gumbel(words[i]);
            if (noisy > choice.value) {
                choice = {noisy, begin + first + i};
                best_of_block.raise(noisy);
            }
        }
    }
}

template <int N>
__device__ __forceinline__ void consider(const float (&scores)[N], int begin, float highest,
                                         Choice& choice)
{
    if (!(highest > choice.value)) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (scores[i] > choice.value) choice = {scores[i], begin + i};
    }
}

template <typename Element>
__device__ __forceinline__ void sum_raw(const Arguments& args, int row, int chunk, SumExp& total)
{
    for_each_pack<4, 4>(row_of<Element>(args.raw_logits, row), args.vocab, chunk,
                        [&](const auto& values, int) { total.add(values, highest_of(values)); });
}

template <typename Element, bool sampled>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    scan_chunk(const Arguments args)
{
    const int chunk = blockIdx.x, row = blockIdx.y;
    if (!args.active[row]) return;

    __shared__ int best_storage;
    SharedMaximum best_of_block(&best_storage);
    NoiseKey key;
    if (sampled) {
        // The noise belongs to the position of the token being chosen, one past the last one.
        key = {static_cast<uint64_t>(args.seed[row]), static_cast<uint32_t>(args.position[row] + 1),
               static_cast<uint32_t>(args.sample[row]), static_cast<uint32_t>(args.request[row])};
        if (threadIdx.x == 0) best_of_block.set(-FLT_MAX);
        __syncthreads();
    }

    const Divisor temperature = divisor_of<sampled>(args, row);
    const bool processed = args.raw_logits.data == nullptr;
    Choice choice;
    SumExp total;
    // Noise is much code and much work: one copy of it, behind which other warps' loads hide.
    constexpr int kAhead = sampled ? 2 : 4, kUnroll = sampled ? 1 : 4;
    for_each_pack<kAhead, kUnroll>(
        row_of<Element>(args.scores, row), args.vocab, chunk, [&](auto& values, int begin) {
            if (sampled && !temperature.is_one()) {
#pragma unroll
                for (float& value : values) value = temperature.divide(value);
            }
            const float highest = highest_of(values);
            if (processed) total.add(values, highest);
            if (sampled) {
                consider_noisy(values, begin, key, best_of_block, choice);
            } else {
                consider(values, begin, highest, choice);
            }
        });
    if (!processed) {
        switch (args.raw_logits.type) {
            case c10::ScalarType::Float:
                sum_raw<float>(args, row, chunk, total);
                break;
            case c10::ScalarType::BFloat16:
                sum_raw<c10::BFloat16>(args, row, chunk, total);
                break;
            default:
                sum_raw<c10::Half>(args, row, chunk, total);
                break;
        }
    }

    const Partial found = reduce_block<kThreads / kWarp>(choice, total);
    if (threadIdx.x == 0) args.partials[static_cast<int64_t>(row) * args.chunks + chunk] = found;
}

__device__ __forceinline__ float element(const Matrix& matrix, int row, int column)
{
    switch (matrix.type) {
        case c10::ScalarType::Float:
            return row_of<float>(matrix, row)[column];
        case c10::ScalarType::BFloat16:
            return static_cast<float>(row_of<c10::BFloat16>(matrix, row)[column]);
        default:
            return static_cast<float>(row_of<c10::Half>(matrix, row)[column]);
    }
}

template <bool sampled>
__global__ void __launch_bounds__(kFinishThreads) finish_row(const Arguments args)
{
    const int row = (blockIdx.x * kFinishThreads + threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
    if (row >= args.rows || !args.active[row]) return;

    Choice choice;
    SumExp total;
    for (int chunk = lane; chunk < args.chunks; chunk += kWarp) {
        const Partial found = args.partials[static_cast<int64_t>(row) * args.chunks + chunk];
        choice.merge(found.value, found.index);
        total.merge(found.max, found.sum);
    }
    reduce_warp(choice, total);
    const int token = __shfl_sync(kAllLanes, choice.index, 0);

    bool stops_here = false;
    for (int i = lane; i < args.stops; i += kWarp) stops_here |= args.stop_ids[i] == token;
    const bool stopped = __any_sync(kAllLanes, stops_here);
    if (lane != 0) return;

    const float chosen =
        args.raw_logits.data != nullptr
            ? element(args.raw_logits, row, token)
            : divisor_of<sampled>(args, row).divide(element(args.scores, row, token));
    const int64_t length = args.length[row];
    const int64_t column = min(length, args.columns - 1);
    args.token[row] = token;
    args.tokens[row * args.tokens_stride + column] = token;
    args.logprobs[row * args.logprobs_stride + column] = (chosen - total.max) - logf(total.sum);
    args.position[row] += 1;
    args.length[row] = length + 1;
    if (stopped || length + 1 >= args.limit[row]) {
        args.finish[row] = stopped ? kStopped : kLength;
        args.active[row] = false;
    }
}

template <typename Element, bool sampled>
void launch(const Arguments& args, cudaStream_t stream)
{
    const dim3 scan_grid(args.chunks, args.rows);
    scan_chunk<Element, sampled><<<scan_grid, kThreads, 0, stream>>>(args);
    C10_CUDA_KERNEL_LAUNCH_CHECK();

    constexpr int kRowsPerBlock = kFinishThreads / kWarp;
    const int finish_grid = (args.rows + kRowsPerBlock - 1) / kRowsPerBlock;
    finish_row<sampled><<<finish_grid, kFinishThreads, 0, stream>>>(args);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename Element>
void launch(const Arguments& args, bool sampled, cudaStream_t stream)
{
    sampled ? launch<Element, true>(args, stream) : launch<Element, false>(args, stream);
}

}  // namespace

void launch_decode_step(const Arguments& args, bool sampled, cudaStream_t stream)
{
    switch (args.scores.type) {
        case c10::ScalarType::Float:
            launch<float>(args, sampled, stream);
            break;
        case c10::ScalarType::BFloat16:
            launch<c10::BFloat16>(args, sampled, stream);
            break;
        default:
            launch<c10::Half>(args, sampled, stream);
            break;
    }
}

}  // namespace ds_hybrid
