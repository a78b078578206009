// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cmath>
#include <type_traits>

#include "decode_step.h"
#include "dependent_launch.cuh"
#include "reductions.cuh"

namespace ds_hybrid {

constexpr int kScanThreads = 256;
constexpr int kScanWarps = kScanThreads / kWarp;

// Of one scan: chunks [rows, chunks] of the logits, and their partials.
struct ScanArguments {
    Matrix logits;
    const float* temperature;  // null for 1
    const bool* parked;
    Partial* partials;
    int rows, vocab, chunks;
};

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

// A chunk of a row as a warp holds it, each lane its part.
template <typename Element>
struct Chunk {
    static constexpr int kPacks = kChunk / kWarp / Pack<Element>::kSize;
    Pack<Element> packs[kPacks];
    float temperature;
    bool active;
};

// Asks for all that the scan of a chunk needs, and waits for none of it.
template <typename Element>
__device__ __forceinline__ void load_chunk(Chunk<Element>& loaded, const ScanArguments& args,
                                           int index)
{
    using Packed = Pack<Element>;
    constexpr int kStep = kWarp * Packed::kSize;
    const int row = index / args.chunks, chunk = index % args.chunks;
    const Element* entries = row_of<Element>(args.logits, row);
    const int begin = chunk * kChunk + threadIdx.x % kWarp * Packed::kSize;
    const bool aligned = reinterpret_cast<uintptr_t>(entries) % sizeof(uint4) == 0;
    if (aligned && (chunk + 1) * kChunk <= args.vocab) {
#pragma unroll
        for (int i = 0; i < Chunk<Element>::kPacks; ++i) {
            loaded.packs[i] = load_pack(entries + begin + i * kStep);
        }
    } else {
#pragma unroll
        for (int i = 0; i < Chunk<Element>::kPacks; ++i) {
            loaded.packs[i] = gather_pack(entries, begin + i * kStep, args.vocab);
        }
    }
    loaded.temperature = args.temperature != nullptr ? args.temperature[row] : 1.0f;
    loaded.active = !args.parked[row];
}

template <typename Element>
__device__ __forceinline__ Partial scan_chunk(const Chunk<Element>& chunk)
{
    using Packed = Pack<Element>;
    const float scale = scale_of(chunk.temperature);
    const float highest = reduce_warp(highest_of(chunk.packs), Maximum());
    // Finite even where every entry is -inf: no difference of infinities arises.
    const float origin = fmaxf(highest, -FLT_MAX);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunk / kWarp; ++i) {
        const float value = chunk.packs[i / Packed::kSize].value(i % Packed::kSize);
        sum += quick_exp2((value - origin) * scale);
    }
    return {highest, reduce_warp(sum, Sum())};
}

template <typename Element>
__global__ void __launch_bounds__(kScanThreads) scan_chunks(const ScanArguments args)
{
    announce_dependents();
    wait_for_predecessor();
    const int index = blockIdx.x * kScanWarps + threadIdx.x / kWarp;
    if (index >= args.rows * args.chunks) return;
    Chunk<Element> chunk;
    load_chunk(chunk, args, index);
    if (!chunk.active) return;
    const Partial found = scan_chunk(chunk);
    if (threadIdx.x % kWarp == 0) args.partials[index] = found;
}

}  // namespace ds_hybrid
