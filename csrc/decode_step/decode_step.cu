// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

// scan_chunks streams the logits once: a warp takes a chunk of a row and leaves a Partial.
// finish_row, a block a row, chooses a chunk by the partials, reads that chunk again to choose the
// token, and does the bookkeeping. Sums are taken in an order that entries' indices alone decide,
// so a row's token and logprob are bit-equal alone and among others, wherever the row lies.
//
// Each kernel is launched beside the one ahead and waits for its end before it reads anything.
//
// Choosing a chunk first is exact: sample_token in deepspeed_hybrid/ops/decode_step.py says why.

#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>

#include "decode_step.h"
#include "dependent_launch.cuh"
#include "philox.cuh"
#include "reductions.cuh"
#include "scan.cuh"

namespace ds_hybrid {

namespace {

constexpr int kFinishThreads = 256;
constexpr int kGroup = kChunk / kFinishThreads;  // entries of the chosen chunk a thread looks at
static_assert(kGroup == 4, "a thread's entries share one Philox counter");
constexpr int64_t kChunkNoise = int64_t{1} << 33;  // chunk c draws as this entry + c would

enum Finish : uint8_t { kRunning = 0, kStopped = 1, kLength = 2 };

// Division by a temperature whose reciprocal is finite, rounded as IEEE asks, without the branches
// of an ordinary one, so that several run beside each other: an estimate by the rounded reciprocal,
// and what it leaves.
struct Temperature {
    float value, reciprocal;

    __device__ __forceinline__ explicit Temperature(float value)
        : value(value), reciprocal(1.0f / value)
    {
    }
    __device__ __forceinline__ float divide(float score) const
    {
        const float estimate = score * reciprocal;
        const float exact = fmaf(fmaf(-estimate, value, score), reciprocal, estimate);
        return fabsf(estimate) < INFINITY ? exact : estimate;
    }
};

// A chunk's partials: of what is chosen from, and of what the sum is over.
struct Found {
    Partial chosen, counted;
};

__device__ __forceinline__ Found find(const Arguments& args, int row, int chunk)
{
    // Finite where every entry is -inf: no difference of infinities arises.
    if (chunk >= args.chunks) return {{-INFINITY, 0.0f}, {-FLT_MAX, 0.0f}};
    const Partial* partials = args.partials + static_cast<int64_t>(row) * args.chunks + chunk;
    const bool raw = args.raw_logits.data != nullptr;
    return {partials[0], partials[raw ? static_cast<int64_t>(args.rows) * args.chunks : 0]};
}

// Which chunk is chosen, and the whole row's Partial.
struct Verdict {
    Choice chunk;
    Partial total;
};

// `found` is this thread's first.
template <bool sampled>
__device__ __forceinline__ Verdict judge(const Arguments& args, int row, Found found,
                                         const Temperature& temperature, float scale,
                                         const NoiseKey& key)
{
    constexpr int kWarps = kFinishThreads / kWarp;
    Choice best{-INFINITY, 0};
    Partial total{-FLT_MAX, 0.0f};
    for (int chunk = threadIdx.x; chunk < args.chunks; chunk += kFinishThreads) {
        float score = found.chosen.max;
        if (sampled) {
            const float noise = gumbel(noise_word(key, kChunkNoise + chunk));
            score = temperature.divide(score) + logf(found.chosen.sum) + noise;
        }
        best = better(best, {score, chunk});
        const float highest = fmaxf(total.max, found.counted.max);
        total.sum = total.sum * quick_exp2((total.max - highest) * scale) +
                    found.counted.sum * quick_exp2((found.counted.max - highest) * scale);
        total.max = highest;
        found = find(args, row, chunk + kFinishThreads);
    }

    __shared__ Verdict of_warps[kWarps];
    const float highest = reduce_warp(total.max, Maximum());
    const float sum = reduce_warp(total.sum * quick_exp2((total.max - highest) * scale), Sum());
    best = reduce_warp(best, Better());
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = {best, {highest, sum}};
    __syncthreads();

    Verdict verdict{of_warps[0].chunk, {of_warps[0].total.max, 0.0f}};
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) {
        verdict.chunk = better(verdict.chunk, of_warps[warp].chunk);
        verdict.total.max = fmaxf(verdict.total.max, of_warps[warp].total.max);
    }
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
        const Partial& part = of_warps[warp].total;
        verdict.total.sum += part.sum * quick_exp2((part.max - verdict.total.max) * scale);
    }
    return verdict;
}

// What a thread looks at of the chosen chunk; -inf past the row's end.
struct Entries {
    float values[kGroup];
    int begin;
};

template <typename Element>
__device__ __forceinline__ Entries load_entries(const Element* row, int vocab, int chunk)
{
    Entries entries;
    entries.begin = chunk * kChunk + threadIdx.x * kGroup;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
        const int index = entries.begin + i;
        entries.values[i] = index < vocab ? static_cast<float>(row[index]) : -INFINITY;
    }
    return entries;
}

template <bool sampled>
__device__ __forceinline__ int choose_entry(const Entries& entries, const Temperature& temperature,
                                            const NoiseKey& key)
{
    float noise[kGroup] = {};
    if (sampled) {
        const uint4 drawn = noise_words(key, static_cast<uint32_t>(entries.begin) / kGroup);
        const uint32_t words[kGroup] = {drawn.x, drawn.y, drawn.z, drawn.w};
#pragma unroll
        for (int i = 0; i < kGroup; ++i) noise[i] = gumbel(words[i]);
    }
    // Where no entry is finite, the first of the chunk is the choice.
    Choice best{-INFINITY, entries.begin};
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
        const float score = entries.values[i];
        const float shaken = sampled ? temperature.divide(score) + noise[i] : score;
        best = better(best, {shaken, entries.begin + i});
    }
    return reduce_block<kFinishThreads / kWarp>(best, Better()).index;
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

template <typename Element, bool sampled>
__global__ void __launch_bounds__(kFinishThreads) finish_row(const Arguments args)
{
    announce_dependents();
    wait_for_predecessor();
    // All that depends on nothing is asked for together.
    const int row = blockIdx.x;
    const bool parked = args.parked[row];
    const Found found = find(args, row, threadIdx.x);
    // The noise belongs to the position of the token being chosen, one past the last one.
    const int64_t position = args.position[row] + 1, length = args.length[row];
    const int64_t limit = args.limit[row];
    const int64_t stop = threadIdx.x < args.stops ? args.stop_ids[threadIdx.x] : -1;
    const float degree = sampled && args.temperature != nullptr ? args.temperature[row] : 1.0f;
    const NoiseKey key{static_cast<uint64_t>(args.seed[row]), static_cast<uint32_t>(position),
                       static_cast<uint32_t>(args.sample[row]),
                       static_cast<uint32_t>(args.request[row])};

    const Temperature temperature(degree);
    const bool raw = args.raw_logits.data != nullptr;
    const float counted_temperature = raw ? 1.0f : degree;
    const Verdict verdict =
        judge<sampled>(args, row, found, temperature, scale_of(counted_temperature), key);
    const Entries entries =
        load_entries(row_of<Element>(args.scores, row), args.vocab, verdict.chunk.index);
    const int token = choose_entry<sampled>(entries, temperature, key);
    bool stops_here = stop == token;
    for (int i = threadIdx.x + kFinishThreads; i < args.stops; i += kFinishThreads) {
        stops_here |= args.stop_ids[i] == token;
    }
    const bool stopped = __syncthreads_or(stops_here);

    // The thread that has the token goes on. A parked row comes this far, with what lies there, so
    // that its loads need not wait for `parked`.
    if (parked || token < entries.begin || token >= entries.begin + kGroup) return;
    float score = -INFINITY;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
        if (token == entries.begin + i) score = entries.values[i];
    }
    if (raw) score = element(args.raw_logits, row, token);
    const int64_t column = min(length, args.columns - 1);
    args.token[row] = token;
    args.tokens[row * args.tokens_stride + column] = token;
    args.logprobs[row * args.logprobs_stride + column] =
        (score - verdict.total.max) / counted_temperature - logf(verdict.total.sum);
    args.position[row] = position;
    args.length[row] = length + 1;
    if (stopped || length + 1 >= limit) {
        args.finish[row] = stopped ? kStopped : kLength;
        args.parked[row] = true;
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

void launch_scan(const ScanArguments& args, cudaStream_t stream)
{
    const int blocks = (args.rows * args.chunks + kScanWarps - 1) / kScanWarps;
    with_type(args.logits.type, [&](auto element) {
        launch_dependent(scan_chunks<decltype(element)>, blocks, kScanThreads, 1, 0, stream, args);
    });
}

void launch_finish(const Arguments& args, bool sampled, cudaStream_t stream)
{
    with_type(args.scores.type, [&](auto element) {
        using Element = decltype(element);
        launch_dependent(sampled ? finish_row<Element, true> : finish_row<Element, false>,
                         args.rows, kFinishThreads, 1, 0, stream, args);
    });
}

}  // namespace

void launch_decode_step(const Arguments& args, bool sampled, cudaStream_t stream)
{
    ScanArguments scan{args.scores, sampled ? args.temperature : nullptr,
                       args.parked, args.partials,
                       args.rows,   args.vocab,
                       args.chunks};
    launch_scan(scan, stream);
    if (args.raw_logits.data != nullptr) {
        scan.logits = args.raw_logits;
        scan.temperature = nullptr;
        scan.partials += static_cast<int64_t>(args.rows) * args.chunks;
        launch_scan(scan, stream);
    }
    launch_finish(args, sampled, stream);
}

}  // namespace ds_hybrid
