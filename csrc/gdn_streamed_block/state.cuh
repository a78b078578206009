// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "tokens.cuh"

// A state in a group's hands, in fp32 on the tensor cores: how it takes tokens in, and its products
// with keys and queries. Keys and queries are of bfloat16 as they are, and what is in fp32 is three
// numbers of bfloat16, the last of which is smaller than its last bit.
//
// A warp has 16 columns of the state, and all rows. Of 16 rows at a time a lane has four, `row_of`,
// and two columns: as the tensor cores want them for products, and as they leave them, the other
// way round, where tokens are taken in.

namespace ds_hybrid {

constexpr int kTiles = 2;  // of eight columns of a warp: every other one is of the same
constexpr int kWarpColumns = kTiles * 8;
static_assert(kStageRows == 16 && kStripColumns % kWarpColumns == 0 &&
              kTeamWarps * kWarpColumns == kDim);

// Which of 16 rows, or tokens, the four of a lane are.
__device__ __forceinline__ int row_of(int i, int quad) { return quad * 2 + i % 2 + i / 2 * 8; }

// Three that sum up to each of two numbers.
__device__ __forceinline__ void split(uint32_t (&parts)[3], float low, float high)
{
#pragma unroll
    for (int part = 0; part < 3; ++part) {
        const uint32_t word = packed<c10::BFloat16>(low, high);
        parts[part] = word;
        low -= __uint_as_float(word << 16);
        high -= __uint_as_float(word & 0xffff0000u);
    }
}

// Up to 16 tokens that a state takes in: what is left by then of what they have written, for a
// lane's columns and tokens. Zeros where there are none.
struct Taken {
    uint4 parts[3];

    __device__ __forceinline__ void load(const Beside& beside, const float* faded, int from,
                                         int end, int column, int quad)
    {
        float2 deltas[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = from + row_of(i, quad);
            const bool there = token < end;
            const float2 two = there
                                   ? *reinterpret_cast<const float2*>(&beside.deltas[token][column])
                                   : make_float2(0.0f, 0.0f);
            const float left = there ? faded[token] : 0.0f;
            deltas[i] = make_float2(two.x * left, two.y * left);
        }
        uint32_t words[4][3];
        split(words[0], deltas[0].x, deltas[1].x);
        split(words[1], deltas[0].y, deltas[1].y);
        split(words[2], deltas[2].x, deltas[3].x);
        split(words[3], deltas[2].y, deltas[3].y);
#pragma unroll
        for (int part = 0; part < 3; ++part) {
            parts[part] =
                make_uint4(words[0][part], words[1][part], words[2][part], words[3][part]);
        }
    }

    // Into 16 rows, of whose keys the tensor cores' second operand is made: by eights of rows.
    __device__ __forceinline__ void into(float (&rows)[4][kTiles], float of_state,
                                         const uint4& keys) const
    {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            auto& upper = rows[half * 2];
            auto& lower = rows[half * 2 + 1];
            float sums[4] = {upper[0] * of_state, lower[0] * of_state, upper[1] * of_state,
                             lower[1] * of_state};
#pragma unroll
            for (int part = 0; part < 3; ++part) {
                multiply_tile<c10::BFloat16>(sums, parts[part], half ? keys.z : keys.x,
                                             half ? keys.w : keys.y);
            }
            upper[0] = sums[0];
            lower[0] = sums[1];
            upper[1] = sums[2];
            lower[1] = sums[3];
        }
    }
};

// Products of 16 rows with the tokens' keys, and queries behind them, onto the sums.
__device__ __forceinline__ void add_products(float (&sums)[kTiles][4],
                                             const float (&rows)[4][kTiles],
                                             const uint4& keys_queries)
{
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t front[3], back[3];
        split(front, rows[0][tile], rows[1][tile]);
        split(back, rows[2][tile], rows[3][tile]);
#pragma unroll
        for (int part = 0; part < 3; ++part) {
            multiply_tile<c10::BFloat16>(sums[tile], keys_queries, front[part], back[part]);
        }
    }
}

// The state's products with keys and queries, into scratch. What the first token finds in the state
// is written, if it is to be.
template <int kTokens>
__device__ __forceinline__ void multiply_state(const BlockPlace& place, Scratch<kTokens>& scratch,
                                               Inbox& inbox, float* state, bool writes, int number,
                                               int thread)
{
    const int warp = thread / kWarp, lane = thread % kWarp;
    const int quad = lane % 4, token = lane / 4, column = warp * kWarpColumns + token * kTiles;
    const bool takes = place.first, changes = place.last > place.first;
    const float taken[] = {scratch.taken[0], scratch.taken[1]};
    Taken first, last;
    if (takes) first.load(inbox.beside, scratch.faded, 0, place.first, column, quad);
    if (changes) last.load(inbox.beside, scratch.faded, place.first, place.last, column, quad);
    give_back(inbox.beside_empty);
    float sums[kTiles][4] = {};
#pragma unroll 1
    for (int part = 0; part < kHeadStages; ++part) {
        const int chunk = part * 2 + lane / 16;
        const uint4 both = load_matrices(scratch.keys_queries + chunk_at(lane % 16, chunk));
        const Stage stage(number + part);
        wait_for_phase(shared_address(&inbox.full[stage.place]), stage.parity);
        float rows[4][kTiles];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = two_of(inbox.stages[stage.place], row_of(i, quad), column);
            rows[i][0] = two.x;
            rows[i][1] = two.y;
        }
        give_back(inbox.empty[stage.place]);
        if (takes) {
            first.into(rows, taken[0],
                       load_transposed(scratch.kept_keys + chunk_at(lane % 16, chunk)));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (!writes) break;
                *reinterpret_cast<float2*>(state + (part * kStageRows + row_of(i, quad)) * kDim +
                                           column) = make_float2(rows[i][0], rows[i][1]);
            }
        }
        if (!changes) {
            add_products(sums, rows, both);
            continue;
        }
        // A lane's of the first operand are all of one token.
        const uint4 none = make_uint4(0, 0, 0, 0);
        add_products(sums, rows, token < place.change ? both : none);
        last.into(rows, taken[1],
                  load_transposed(scratch.kept_keys + chunk_at(place.first + lane % 16, chunk)));
        add_products(sums, rows, token < place.change ? none : both);
    }
    if (token >= kTokens) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float4*>(&scratch.sums[half][token][warp * kWarpColumns + quad * 4]) =
            make_float4(sums[0][half * 2], sums[1][half * 2], sums[0][half * 2 + 1],
                        sums[1][half * 2 + 1]);
    }
}

}  // namespace ds_hybrid
