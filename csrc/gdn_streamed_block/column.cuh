// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "tokens.cuh"

// What a block's tokens do in one column of a state: what they know of their value there, what they
// are answered, and what they write.

namespace ds_hybrid {

// How many tokens a thread has of a column: two threads share a block's.
template <int kTokens>
constexpr int kShare = kTokens > 1 ? kTokens / (kTeamThreads / kDim) : 1;

// One thread's part of a column. Sums are in one order, whichever tokens are its own.
template <typename Element, int kTokens>
struct Column {
    static constexpr int kMine = kShare<kTokens>;

    Scratch<kTokens>& scratch;
    const float2 (&gates)[kTokens];
    const int column, from;  // its first token; none may be left for it
    float known[kMine] = {}, read[kMine] = {}, of_key[kMine], of_query[kMine], deltas[kMine];

    __device__ __forceinline__ Column(Scratch<kTokens>& scratch, const float2 (&gates)[kTokens],
                                      int thread)
        : scratch(scratch), gates(gates), column(thread % kDim), from(thread / kDim * kMine)
    {
    }

    __device__ __forceinline__ bool has_none() const { return from >= kTokens; }

    __device__ __forceinline__ void add(int mine, const float2& pair, float delta)
    {
        known[mine] = fmaf(pair.x, delta, known[mine]);
        read[mine] = fmaf(pair.y, delta, read[mine]);
    }

    // Of the tokens that are kept beside the state of the first one.
    __device__ __forceinline__ void add_kept(const BlockPlace& place, const Beside& beside)
    {
        if (has_none()) return;
#pragma unroll 2
        for (int token = place.first; token < place.kept; ++token) {
            const float delta = beside.deltas[token][column];
            if constexpr (kMine == 1) {
                add(0, scratch.kept[token][from], delta);
            } else {
                const auto* const pairs =
                    reinterpret_cast<const float4*>(&scratch.kept[token][from]);
#pragma unroll
                for (int i = 0; i < kMine; i += 2) {
                    const float4 both = pairs[i / 2];
                    add(i, make_float2(both.x, both.y), delta);
                    add(i + 1, make_float2(both.z, both.w), delta);
                }
            }
        }
    }

    // The state's products, of which the place of the queries' is free from here on.
    __device__ __forceinline__ void load_products()
    {
        if (has_none()) return;
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            of_key[i] = scratch.sums[0][from + i][column];
            of_query[i] = scratch.sums[1][from + i][column];
        }
    }

    // By the thread of the column's first tokens, which leaves there what they write, ...
    __device__ __forceinline__ void answer()
    {
        if (has_none()) return;
        const Element* const values = reinterpret_cast<const Element*>(scratch.values);
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const int token = from + i;
#pragma unroll
            for (int before = 0; before < i; ++before) {
                add(i, scratch.own[from + before][token], deltas[before]);
            }
            known[i] = fmaf(of_key[i], scratch.of_state[token], known[i]);
            read[i] = fmaf(of_query[i], scratch.of_state[token], read[i]);
            const float value = static_cast<float>(values[token * kDim + column]);
            const float beta = gates[token].y;
            deltas[i] = fmaf(-known[i], beta, rounded<Element>(value * beta));
            read[i] = fmaf(scratch.own[token][token].y, deltas[i], read[i]);
            scratch.core[token][column] = rounded<Element>(read[i] * kScale);
            if (from == 0) scratch.sums[1][token][column] = deltas[i];
        }
    }

    // ... and by that of the others.
    __device__ __forceinline__ void answer_behind()
    {
        if (has_none()) return;
#pragma unroll
        for (int before = 0; before < kMine; ++before) {
            const float delta = scratch.sums[1][before][column];
#pragma unroll
            for (int i = 0; i < kMine; ++i) add(i, scratch.own[before][from + i], delta);
        }
        answer();
    }

    // Beside the state.
    __device__ __forceinline__ void keep(const GdnStreamedBlockArguments& args, const Head& head,
                                         const BlockPlace& place) const
    {
        if (has_none()) return;
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            if (from + i >= place.count) break;
            const int64_t in_rings =
                head.of_values(args) * args.places + place.in_ring(args, from + i);
            args.deltas[in_rings * kDim + column] = deltas[i];
        }
    }
};

}  // namespace ds_hybrid
