// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

// scan_chunks streams the logits once: a warp takes a chunk of a row and leaves a Partial.
// finish_row, a block a row, chooses a chunk by the partials, reads that chunk again to choose the
// token, and does the bookkeeping. Sums are taken in an order that entries' indices alone decide,
// so a row's token and logprob are bit-equal alone and among others, wherever the row lies.
//
// Each kernel is launched beside the one ahead and waits for its end before it reads anything.
//
// Choosing a chunk first is exact: choose_token in deepspeed_hybrid/ops/decode_step.py says why.

#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>

#include "decode_step.h"
#include "dependent_launch.cuh"
#include "philox.cuh"
#include "reductions.cuh"
#include "scan.cuh"

namespace ds_hybrid {

// Which chunk is chosen, and the whole row's Partial, of the chunks' ones.
struct Verdict {
    Choice chunk;
    Partial total;
};

struct Judge {
    float scale;
    __device__ __forceinline__ Verdict operator()(const Verdict& a, const Verdict& b) const
    {
        const float highest = fmaxf(a.total.max, b.total.max);
        const float of_a = a.total.sum * quick_exp2((a.total.max - highest) * scale);
        const float of_b = b.total.sum * quick_exp2((b.total.max - highest) * scale);
        return {better(a.chunk, b.chunk), {highest, of_a + of_b}};
    }
};

__device__ __forceinline__ Verdict exchange(const Verdict& verdict, int mask)
{
    return {exchange(verdict.chunk, mask),
            {exchange(verdict.total.max, mask), exchange(verdict.total.sum, mask)}};
}

namespace {

constexpr int kFinishThreads = 256;
constexpr int kGroup = kChunk / kFinishThreads;  // entries of the chosen chunk a thread looks at
static_assert(kGroup == 4, "a thread's entries share one Philox counter");
constexpr int64_t kChunkNoise = int64_t{1} << 33;  // chunk c draws as this entry + c would

enum Finish : uint8_t { kRunning = 0, kStopped = 1, kLength = 2 };

// `chosen` and `counted` are the partials of what is chosen from and of what the sum is over.
template <bool sampled>
__device__ __forceinline__ Verdict judge(const Partial* chosen, const Partial* counted, int chunks,
                                         float temperature, float counted_temperature,
                                         const NoiseKey& key)
{
    const Judge combine{scale_of(counted_temperature)};
    // Finite where every entry is -inf: no difference of infinities arises.
    Verdict verdict{{-INFINITY, 0}, {-FLT_MAX, 0.0f}};
    for (int chunk = threadIdx.x; chunk < chunks; chunk += kFinishThreads) {
        const Partial found = chosen[chunk];
        float score = found.max;
        if (sampled) {
            score = found.max / temperature + logf(found.sum) +
                    gumbel(noise_word(key, kChunkNoise + chunk));
        }
        verdict = combine(verdict, {{score, chunk}, counted[chunk]});
    }
    return reduce_block<kFinishThreads / kWarp>(verdict, combine);
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
__device__ __forceinline__ int choose_entry(const Entries& entries, float temperature,
                                            const NoiseKey& key)
{
    float scores[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) scores[i] = entries.values[i];
    if (sampled) {
        const uint4 drawn = noise_words(key, static_cast<uint32_t>(entries.begin) / kGroup);
        const uint32_t words[kGroup] = {drawn.x, drawn.y, drawn.z, drawn.w};
#pragma unroll
        for (int i = 0; i < kGroup; ++i) scores[i] = scores[i] / temperature + gumbel(words[i]);
    }
    // Where no entry is finite, the first of the chunk is the choice.
    Choice best{-INFINITY, entries.begin};
#pragma unroll
    for (int i = 0; i < kGroup; ++i) best = better(best, {scores[i], entries.begin + i});
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
    // All that depends on nothing is asked for together, and none of it waits for `parked`.
    const int row = blockIdx.x;
    const bool active = !args.parked[row];
    // The noise belongs to the position of the token being chosen, one past the last one.
    const int64_t position = args.position[row] + 1, length = args.length[row];
    const int64_t limit = args.limit[row];
    const int64_t stop = threadIdx.x < args.stops ? args.stop_ids[threadIdx.x] : -1;
    const float temperature = sampled && args.temperature != nullptr ? args.temperature[row] : 1.0f;
    const NoiseKey key{static_cast<uint64_t>(args.seed[row]), static_cast<uint32_t>(position),
                       static_cast<uint32_t>(args.sample[row]),
                       static_cast<uint32_t>(args.request[row])};
    if (!active) return;

    const bool raw = args.raw_logits.data != nullptr;
    const Matrix& source = raw ? args.raw_logits : args.scores;
    const float source_temperature = raw ? 1.0f : temperature;
    const Partial* chosen = args.partials + static_cast<int64_t>(row) * args.chunks;
    const Partial* counted = chosen + (raw ? static_cast<int64_t>(args.rows) * args.chunks : 0);
    const Verdict verdict =
        judge<sampled>(chosen, counted, args.chunks, temperature, source_temperature, key);
    const Entries entries =
        load_entries(row_of<Element>(args.scores, row), args.vocab, verdict.chunk.index);
    const int token = choose_entry<sampled>(entries, temperature, key);
    bool stops_here = stop == token;
    for (int i = threadIdx.x + kFinishThreads; i < args.stops; i += kFinishThreads) {
        stops_here |= args.stop_ids[i] == token;
    }
    const bool stopped = __syncthreads_or(stops_here);
    if (threadIdx.x != 0) return;

    const int64_t column = min(length, args.columns - 1);
    args.token[row] = token;
    args.tokens[row * args.tokens_stride + column] = token;
    args.logprobs[row * args.logprobs_stride + column] =
        (element(source, row, token) - verdict.total.max) / source_temperature -
        logf(verdict.total.sum);
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
