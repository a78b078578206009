// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "feed.cuh"
#include "tensor_core.cuh"

// What a block's tokens bring, and what they and the kept ones have to do with one another.

namespace ds_hybrid {

constexpr int kChunks = kDim / 8;  // of 16 bytes, of a key
constexpr int kKeyRows = 3 * 16;   // of kept keys for the tensor cores, in tiles of 16
static_assert(kMostBeside <= kKeyRows);

// Of one group. A pair is a coefficient of something with a token's key, and with its query.
template <int kTokens>
struct alignas(128) Scratch {
    uint4 kept_keys[kKeyRows * kChunks];            // swizzled, and so are ...
    uint4 keys_queries[2 * kMostTokens * kChunks];  // ... keys, and behind them queries
    union {
        float sums[2][kTokens][kDim];  // of the state's products with keys and with queries
        float core[kTokens][kDim];     // what comes of them
    };
    alignas(16) float2 kept[kMostBeside][kTokens];
    float2 own[kTokens][kTokens];
    float left[kMostBeside + kMostTokens + 1][kTokens], of_state[kTokens];
    float2 gates[2][kTokens];   // decay and beta of a turn's tokens, and of the next one's
    float decays[kMostBeside];  // of kept tokens
    // What decays leave of a state, and of the tokens that it takes in, when it does so.
    float taken[2], faded[kMostBeside];
    uint2 values[kTokens][kDim / 4];
};

__device__ __forceinline__ int chunk_at(int row, int chunk)
{
    return row * kChunks + (chunk ^ row % kSwizzledRows);
}

// Four channels of a lane.
template <typename Element>
__device__ __forceinline__ void unpack(float (&to)[4], const uint2& words)
{
    const float2 low = values_of<Element>(words.x), high = values_of<Element>(words.y);
    to[0] = low.x;
    to[1] = low.y;
    to[2] = high.x;
    to[3] = high.y;
}

// Two at a time, which is twice as fast as one by one.
template <typename Element>
__device__ __forceinline__ uint32_t packed(float low, float high)
{
    uint32_t word;
    if constexpr (std::is_same_v<Element, c10::BFloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    }
    return word;
}

template <typename Element>
__device__ __forceinline__ uint2 packed(const float (&from)[4])
{
    return {packed<Element>(from[0], from[1]), packed<Element>(from[2], from[3])};
}

template <typename Element>
__device__ __forceinline__ void round_all(float (&values)[4])
{
    unpack<Element>(values, packed<Element>(values));
}

// Conv with SiLU of a lane's four channels of one part, each rounded, as heads.cuh's activated().
template <typename Element>
__device__ __forceinline__ void activate(float (&to)[4], const Beside& beside, int part, int token,
                                         int position, bool ahead, int lane)
{
    float sums[4] = {}, raw[4], taps[4][4];
    const uint4* const of_lane = reinterpret_cast<const uint4*>(&beside.taps[part][lane * 4]);
    const uint4* const older = reinterpret_cast<const uint4*>(&beside.window[part][lane * 4]);
    uint4 both[2] = {of_lane[0], of_lane[1]};
    uint2 words[4] = {{both[0].x, both[0].y},
                      {both[0].z, both[0].w},
                      {both[1].x, both[1].y},
                      {both[1].z, both[1].w}};
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack<Element>(taps[i], words[i]);
#pragma unroll
    for (int age = 1; age < kTaps; ++age) {
        float before[4];
        if (token >= age || ahead) {
            const uint16_t* const there =
                token >= age ? beside.raw[token - age][part] : beside.earlier(part, age - token);
            unpack<Element>(before, reinterpret_cast<const uint2*>(there)[lane]);
        } else {
            const int place = (position + token - age + kTaps) % kTaps;
            both[0] = older[0];
            both[1] = older[1];
            const uint32_t pairs[] = {
                place < 2 ? both[0].x : both[0].y, place < 2 ? both[0].z : both[0].w,
                place < 2 ? both[1].x : both[1].y, place < 2 ? both[1].z : both[1].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                before[i] = value_of<Element>(pairs[i] >> place % 2 * 16 & 0xffffu);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = fmaf(before[i], taps[i][kTaps - 1 - age], sums[i]);
    }
    unpack<Element>(raw, reinterpret_cast<const uint2*>(beside.raw[token][part])[lane]);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = fmaf(raw[i], taps[i][kTaps - 1], sums[i]);
    round_all<Element>(to);
#pragma unroll
    for (float& value : to) value = silu(value);
    round_all<Element>(to);
}

template <typename Element>
__device__ __forceinline__ void normalise(float (&head)[4])
{
    const float squares = sum_of_lanes<kWarp>(head[0] * head[0] + head[1] * head[1] +
                                              head[2] * head[2] + head[3] * head[3]);
    const float factor = rsqrtf(squares + kNormEps);
#pragma unroll
    for (float& value : head) value *= factor;
    round_all<Element>(head);
}

// What a warp has of the tokens, and what is kept, into scratch; keys into their ring, which no one
// reads there before these tokens are some.
template <typename Element, int kTokens>
__device__ __forceinline__ void bring(const GdnStreamedBlockArguments& args, const Head& head,
                                      const BlockPlace& place, const Beside& beside,
                                      Scratch<kTokens>& scratch, int thread)
{
    const int warp = thread / kWarp, lane = thread % kWarp;
#pragma unroll
    for (int first = 0; first < 3 * kTokens; first += kTeamWarps) {
        // Queries of all tokens, then keys, then values.
        const int part = first / kTokens + warp / kTokens, token = warp % kTokens;
        if (part >= 3) break;
        float four[4];
        activate<Element>(four, beside, part, token, place.position, args.ahead, lane);
        if (part < 2) normalise<Element>(four);
        const uint2 words = packed<Element>(four);
        if (part == 2) {
            scratch.values[token][lane] = words;
            continue;
        }
        uint2* const rows = reinterpret_cast<uint2*>(scratch.keys_queries);
        const int row = part == 1 ? token : kMostTokens + token;
        rows[chunk_at(row, lane / 2) * 2 + lane % 2] = words;
        if (part == 1 && head.first && token < place.count) {
            const int64_t in_rings = head.of_keys(args) * args.places + place.in_ring(args, token);
            static_cast<uint2*>(args.keys)[in_rings * (kDim / 4) + lane] = words;
        }
    }
    // Zeros where there are none: the state takes in none of them, sixteen at a time.
    for (int i = thread; i < max(place.kept, 2 * kTaken) * kChunks; i += kTeamThreads) {
        const int row = i / kChunks, chunk = i % kChunks;
        scratch.kept_keys[chunk_at(row, chunk)] =
            row < place.kept ? beside.keys[row][chunk] : make_uint4(0, 0, 0, 0);
    }
    if (thread < place.kept) {
        scratch.decays[thread] = beside.decays[place.in_ring(args, thread - place.kept)];
    }
}

// What decays leave, by the time of each token and when a state takes tokens in, of the token
// before `number` and of those before it: of the state that has these in it, too. A product's bits
// go by which decays are in it alone.
template <int kTokens>
__device__ __forceinline__ void fade(const BlockPlace& place, Scratch<kTokens>& scratch,
                                     const float2 (&gates)[kTokens], int number)
{
    if (number > place.kept + kTokens) return;
    float left = 1.0f;
    const auto pass = [&](int from, int end) {
#pragma unroll 4
        for (int token = from; token < end; ++token) {
            const float decay = scratch.decays[token];
            if (token >= number) left *= decay;
        }
        return left;
    };
    const float by_first = pass(0, place.first), by_last = pass(place.first, place.last);
    pass(place.last, place.kept);
    if (number == 0) scratch.taken[0] = by_first;
    if (number == place.first) scratch.taken[1] = by_last;
    if (number > 0 && number <= place.first) scratch.faded[number - 1] = by_first;
    if (number > place.first && number <= place.last) scratch.faded[number - 1] = by_last;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
        if (place.kept + i >= number) left *= gates[i].x;
        scratch.left[number][i] = left;
    }
}

// Products of 16 keys, from `rows` on, with keys and queries of all tokens.
template <typename Element>
__device__ __forceinline__ void multiply_keys(float (&with_keys)[4], float (&with_queries)[4],
                                              const uint4* rows, const uint4* keys_queries)
{
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
        const uint4 a = load_matrices(rows + chunk_at(lane % 16, step * 2 + lane / 16));
        // Rows 0-7 of it are keys, rows 8-15 queries, and here the second operand.
        const uint4 b = load_matrices(keys_queries + chunk_at(lane % 16, step * 2 + lane / 16));
        multiply_tile<Element>(with_keys, a, b.x, b.z);
        multiply_tile<Element>(with_queries, a, b.y, b.w);
    }
}

// Of kept tokens, those of one tile, and of the block's own: coefficients into scratch.
template <typename Element, int kTokens>
__device__ __forceinline__ void weigh(const BlockPlace& place, Scratch<kTokens>& scratch, int tile,
                                      const float (&with_keys)[4], const float (&with_queries)[4])
{
    const int lane = threadIdx.x % kWarp;
    const bool own = tile < 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, token = lane % 4 * 2 + i % 2;
        if (token >= kTokens) continue;
        if (own) {
            if (row >= kTokens) continue;
            const float left = scratch.left[place.kept + row + 1][token];
            float2 pair =
                make_float2(with_keys[i] * left, rounded<Element>(with_queries[i] * left));
            if (row == token) pair.y = rounded<Element>(with_queries[i]);
            scratch.own[row][token] = pair;
            continue;
        }
        const int kept = tile * 16 + row;
        if (kept >= place.kept) continue;
        const bool beside = kept >= (token < place.change ? place.first : place.last);
        const float left = scratch.left[kept + 1][token];
        scratch.kept[kept][token] =
            beside ? make_float2(with_keys[i] * left, rounded<Element>(with_queries[i] * left))
                   : make_float2(0.0f, 0.0f);
    }
}

}  // namespace ds_hybrid
