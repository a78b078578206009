// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

// scan_chunk streams the logits once: a warp takes one chunk of one row and leaves a Partial.
// finish_row, a block a row, chooses a chunk by the partials, reads that chunk again to choose the
// token, and does the bookkeeping. Sums are taken in an order that entries' indices alone decide,
// so a row's token and logprob are bit-equal alone and among others, wherever the row lies.
//
// Choosing a chunk first is exact: choose_token in deepspeed_hybrid/ops/decode_step.py says why.

#include <c10/cuda/CUDAException.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <type_traits>

#include "decode_step.h"
#include "philox.cuh"
#include "reductions.cuh"

namespace ds_hybrid {
namespace {

constexpr int kScanThreads = 256;
constexpr int kScanWarps = kScanThreads / kWarp;
constexpr int kFinishThreads = 256;
constexpr int kGroup = kChunk / kFinishThreads;  // entries of the chosen chunk a thread looks at
static_assert(kGroup == 4, "a thread's entries share one Philox counter");
constexpr int64_t kChunkNoise = int64_t{1} << 33;  // chunk c draws as this entry + c would

enum Finish : uint8_t { kRunning = 0, kStopped = 1, kLength = 2 };

template <typename Element>
__device__ __forceinline__ const Element* row_of(const Matrix& matrix, int row)
{
    return static_cast<const Element*>(matrix.data) + row * matrix.stride;
}

// Two 16-bit entries as the hardware compares them.
template <typename Element>
using Pair = std::conditional_t<std::is_same_v<Element, c10::Half>, __half2, __nv_bfloat162>;

// Sixteen bytes of a row, kept as they came until they are needed.
template <typename Element>
struct Pack {
    static constexpr int kSize = 16 / sizeof(Element);
    uint32_t words[4];

    __device__ __forceinline__ float value(int i) const
    {
        if constexpr (std::is_same_v<Element, float>) {
            return __uint_as_float(words[i]);
        } else if constexpr (std::is_same_v<Element, c10::BFloat16>) {
            return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
        } else {
            const float2 two = __half22float2(pair(i / 2));
            return i % 2 ? two.y : two.x;
        }
    }
    __device__ __forceinline__ Pair<Element> pair(int word) const
    {
        return *reinterpret_cast<const Pair<Element>*>(&words[word]);
    }
};

template <int N>
__device__ __forceinline__ float highest_of(const Pack<float> (&packs)[N])
{
    float highest = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) highest = fmaxf(highest, packs[i / 4].value(i % 4));
    return highest;
}

template <typename Element, int N>
__device__ __forceinline__ float highest_of(const Pack<Element> (&packs)[N])
{
    Pair<Element> highest = packs[0].pair(0);
#pragma unroll
    for (int i = 1; i < 4 * N; ++i) highest = __hmax2(highest, packs[i / 4].pair(i % 4));
    return fmaxf(fmaxf(-INFINITY, __low2float(highest)), __high2float(highest));
}

template <typename Element>
__device__ __forceinline__ Pack<Element> load_pack(const Element* begin)
{
    const uint4 loaded = __ldcs(reinterpret_cast<const uint4*>(begin));
    return {{loaded.x, loaded.y, loaded.z, loaded.w}};
}

// Element by element, from wherever the row starts. Entries past its end read as -inf, which no sum
// and no choice notices.
template <typename Element>
__device__ __forceinline__ Pack<Element> gather_pack(const Element* row, int begin, int vocab)
{
    using Bits = std::conditional_t<sizeof(Element) == 4, uint32_t, uint16_t>;
    constexpr uint32_t kLowest =
        std::is_same_v<Element, c10::Half> ? 0xfc00u : 0xff80u << (sizeof(Element) * 8 - 16);
    constexpr int kPerWord = 4 / sizeof(Element);
    Pack<Element> pack{};
#pragma unroll
    for (int i = 0; i < Pack<Element>::kSize; ++i) {
        const int index = begin + i;
        const uint32_t bits = index < vocab ? reinterpret_cast<const Bits*>(row)[index] : kLowest;
        pack.words[i / kPerWord] |= bits << (i % kPerWord * 16);
    }
    return pack;
}

// 2**x to a few units in the last place; tiny results become 0.
__device__ __forceinline__ float quick_exp2(float x)
{
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// x * scale_of(temperature) is the binary exponent of exp(x / temperature).
__device__ __forceinline__ float scale_of(float temperature)
{
    return 1.4426950408889634f / temperature;
}

template <typename Element>
__global__ void __launch_bounds__(kScanThreads)
    scan_chunk(const Matrix logits, const float* temperature, const bool* active, Partial* partials,
               int vocab, int chunks)
{
    const int row = blockIdx.y, lane = threadIdx.x % kWarp;
    const int chunk = blockIdx.x * kScanWarps + threadIdx.x / kWarp;
    if (chunk >= chunks || !active[row]) return;

    using Packed = Pack<Element>;
    constexpr int kPacks = kChunk / kWarp / Packed::kSize, kStep = kWarp * Packed::kSize;
    const Element* entries = row_of<Element>(logits, row);
    const int begin = chunk * kChunk + lane * Packed::kSize;
    const bool aligned = reinterpret_cast<uintptr_t>(entries) % sizeof(uint4) == 0;
    Packed packs[kPacks];
    if (aligned && (chunk + 1) * kChunk <= vocab) {
#pragma unroll
        for (int i = 0; i < kPacks; ++i) packs[i] = load_pack(entries + begin + i * kStep);
    } else {
#pragma unroll
        for (int i = 0; i < kPacks; ++i) packs[i] = gather_pack(entries, begin + i * kStep, vocab);
    }
    const float scale = scale_of(temperature != nullptr ? temperature[row] : 1.0f);

    const float highest = reduce_warp<Maximum>(highest_of(packs));
    // Finite even where every entry is -inf: no difference of infinities arises.
    const float origin = fmaxf(highest, -FLT_MAX);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunk / kWarp; ++i) {
        const float value = packs[i / Packed::kSize].value(i % Packed::kSize);
        sum += quick_exp2((value - origin) * scale);
    }
    sum = reduce_warp<Sum>(sum);
    if (lane == 0) partials[static_cast<int64_t>(row) * chunks + chunk] = {highest, sum};
}

// The whole row's Partial, of the chunks' ones.
__device__ __forceinline__ Partial total_of(const Partial* partials, int chunks, float temperature)
{
    constexpr int kWarps = kFinishThreads / kWarp;
    float highest = -FLT_MAX, sum = 0.0f;
    for (int chunk = threadIdx.x; chunk < chunks; chunk += kFinishThreads) {
        highest = fmaxf(highest, partials[chunk].max);
    }
    highest = reduce_block<Maximum, kWarps>(highest);
    const float scale = scale_of(temperature);
    for (int chunk = threadIdx.x; chunk < chunks; chunk += kFinishThreads) {
        sum += partials[chunk].sum * quick_exp2((partials[chunk].max - highest) * scale);
    }
    return {highest, reduce_block<Sum, kWarps>(sum)};
}

template <bool sampled>
__device__ __forceinline__ int choose_chunk(const Partial* partials, int chunks, float temperature,
                                            const NoiseKey& key)
{
    Choice best{-INFINITY, 0};
    for (int chunk = threadIdx.x; chunk < chunks; chunk += kFinishThreads) {
        const Partial found = partials[chunk];
        float score = found.max;
        if (sampled) {
            score = found.max / temperature + logf(found.sum) +
                    gumbel(noise_word(key, kChunkNoise + chunk));
        }
        best = better(best, {score, chunk});
    }
    return reduce_block<Better, kFinishThreads / kWarp>(best).index;
}

template <typename Element, bool sampled>
__device__ __forceinline__ int choose_entry(const Element* entries, int vocab, int chunk,
                                            float temperature, const NoiseKey& key)
{
    const int begin = chunk * kChunk + threadIdx.x * kGroup;
    float scores[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
        scores[i] = begin + i < vocab ? static_cast<float>(entries[begin + i]) : -INFINITY;
    }
    if (sampled) {
        const uint4 drawn = noise_words(key, static_cast<uint32_t>(begin) / kGroup);
        const uint32_t words[kGroup] = {drawn.x, drawn.y, drawn.z, drawn.w};
#pragma unroll
        for (int i = 0; i < kGroup; ++i) scores[i] = scores[i] / temperature + gumbel(words[i]);
    }
    // Where no entry is finite, the first of the chunk is the choice.
    Choice best{-INFINITY, begin};
#pragma unroll
    for (int i = 0; i < kGroup; ++i) best = better(best, {scores[i], begin + i});
    return reduce_block<Better, kFinishThreads / kWarp>(best).index;
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

// finish_row is launched while the last scan still runs; here it waits for that to end.
__device__ __forceinline__ void wait_for_scans()
{
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

template <typename Element, bool sampled>
__global__ void __launch_bounds__(kFinishThreads) finish_row(const Arguments args)
{
    wait_for_scans();
    const int row = blockIdx.x;
    if (!args.active[row]) return;

    // The noise belongs to the position of the token being chosen, one past the last one.
    const int64_t position = args.position[row] + 1, length = args.length[row];
    const float temperature = sampled && args.temperature != nullptr ? args.temperature[row] : 1.0f;
    const NoiseKey key{static_cast<uint64_t>(args.seed[row]), static_cast<uint32_t>(position),
                       static_cast<uint32_t>(args.sample[row]),
                       static_cast<uint32_t>(args.request[row])};

    const Partial* partials = args.partials + static_cast<int64_t>(row) * args.chunks;
    const int chunk = choose_chunk<sampled>(partials, args.chunks, temperature, key);
    const int token = choose_entry<Element, sampled>(row_of<Element>(args.scores, row), args.vocab,
                                                     chunk, temperature, key);

    const bool raw = args.raw_logits.data != nullptr;
    const Matrix& source = raw ? args.raw_logits : args.scores;
    const float source_temperature = raw ? 1.0f : temperature;
    if (raw) partials += static_cast<int64_t>(args.rows) * args.chunks;
    const Partial total = total_of(partials, args.chunks, source_temperature);

    bool stops_here = false;
    for (int i = threadIdx.x; i < args.stops; i += kFinishThreads) {
        stops_here |= args.stop_ids[i] == token;
    }
    const bool stopped = __syncthreads_or(stops_here);
    if (threadIdx.x != 0) return;

    const int64_t column = min(length, args.columns - 1);
    args.token[row] = token;
    args.tokens[row * args.tokens_stride + column] = token;
    args.logprobs[row * args.logprobs_stride + column] =
        (element(source, row, token) - total.max) / source_temperature - logf(total.sum);
    args.position[row] = position;
    args.length[row] = length + 1;
    if (stopped || length + 1 >= args.limit[row]) {
        args.finish[row] = stopped ? kStopped : kLength;
        args.active[row] = false;
    }
}

// Calls visit with a value of the C++ type that `type` names.
template <typename Visit>
void with_type(c10::ScalarType type, Visit visit)
{
    switch (type) {
        case c10::ScalarType::Float:
            return visit(float{});
        case c10::ScalarType::BFloat16:
            return visit(c10::BFloat16{});
        default:
            return visit(c10::Half{});
    }
}

void launch_scan(const Arguments& args, const Matrix& logits, const float* temperature,
                 Partial* partials, cudaStream_t stream)
{
    const dim3 grid((args.chunks + kScanWarps - 1) / kScanWarps, args.rows);
    with_type(logits.type, [&](auto element) {
        scan_chunk<decltype(element)><<<grid, kScanThreads, 0, stream>>>(
            logits, temperature, args.active, partials, args.vocab, args.chunks);
    });
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

bool launches_ahead()
{
    int device = 0, major = 0;
    C10_CUDA_CHECK(cudaGetDevice(&device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major >= 9;
}

void launch_finish(const Arguments& args, bool sampled, cudaStream_t stream)
{
    cudaLaunchAttribute ahead;
    ahead.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    ahead.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = args.rows;
    config.blockDim = kFinishThreads;
    config.stream = stream;
    config.attrs = &ahead;
    config.numAttrs = launches_ahead() ? 1 : 0;
    with_type(args.scores.type, [&](auto element) {
        using Element = decltype(element);
        C10_CUDA_CHECK(cudaLaunchKernelEx(
            &config, sampled ? finish_row<Element, true> : finish_row<Element, false>, args));
    });
}

}  // namespace

void launch_decode_step(const Arguments& args, bool sampled, cudaStream_t stream)
{
    launch_scan(args, args.scores, sampled ? args.temperature : nullptr, args.partials, stream);
    if (args.raw_logits.data != nullptr) {
        Partial* partials = args.partials + static_cast<int64_t>(args.rows) * args.chunks;
        launch_scan(args, args.raw_logits, nullptr, partials, stream);
    }
    launch_finish(args, sampled, stream);
}

}  // namespace ds_hybrid
