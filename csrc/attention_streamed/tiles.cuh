// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "barrier.cuh"
#include "heads.cuh"
#include "tensor_core.cuh"

// Tiles of keys and values: on their way into a warp's ring, and in the hands of the tensor cores.

namespace ds_hybrid {

// Of a tile, in chunks: blocks of 64 dimensions, one behind the other.
constexpr int kBlockPlaces = kTile * kBlockChunks;

__device__ __forceinline__ int place_of(int token, int chunk)
{
    return chunk / kBlockChunks * kBlockPlaces + swizzled(token, chunk % kBlockChunks);
}

__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap& map, int token,
                                          uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3, %4, %3}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(0), "r"(token)
        : "memory");
}

// A matrix of 8 rows by 8, a pair of a row in each lane.
__device__ __forceinline__ uint32_t transposed(uint32_t pair)
{
    uint32_t turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

template <typename Element>
__device__ __forceinline__ uint32_t pair_of(float low, float high)
{
    uint32_t pair;
    if constexpr (std::is_same_v<Element, c10::BFloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
    return pair;
}

// Where in its ring a warp is.
template <int kSlots>
struct Turn {
    int slot = 0, parity = 0;

    __device__ __forceinline__ void pass()
    {
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
};

// Of one warp. Pieces are keys and values of its tiles in turn.
template <int kDim, int kSlots>
struct Ring {
    static constexpr int kPlaces = kTile * kDim / kChunk, kBytes = kPlaces * sizeof(uint4);

    uint4 (&slots)[kSlots][kPlaces];
    uint64_t (&full)[kSlots];
    const AttentionArguments& args;
    int64_t start;           // of the head's tokens
    int first, step, count;  // its tiles

    __device__ __forceinline__ int tile(int number) const { return first + number * step; }

    // By one lane.
    __device__ __forceinline__ void send(int piece, int slot) const
    {
        const uint32_t barrier = shared_address(&full[slot]);
        expect_bytes(barrier, kBytes);
        copy_tile(shared_address(slots[slot]), piece % 2 ? args.values_map : args.keys_map,
                  static_cast<int>(start + tile(piece / 2) * kTile), barrier);
    }

    __device__ __forceinline__ uint4* wait(const Turn<kSlots>& turn) const
    {
        wait_for_phase(shared_address(&full[turn.slot]), turn.parity);
        return slots[turn.slot];
    }

    // All lanes have read a piece: its slot is for a later one.
    __device__ __forceinline__ void give_back(int piece, Turn<kSlots>& turn) const
    {
        __syncwarp();
        if (threadIdx.x % kWarp == 0 && piece + kSlots < 2 * count) send(piece + kSlots, turn.slot);
        turn.pass();
    }
};

// What a warp has seen of its tiles: of heads lane % 4 * 2 and the one behind, the peak, and of
// this lane's tokens the total; and, in rows of dimensions and columns of heads, the mixture.
template <typename Element, int kDim>
struct Mixture {
    static constexpr int kSteps = kDim / 16;

    float peak[2] = {-INFINITY, -INFINITY}, total[2] = {}, mixed[kSteps][4] = {};

    // `query` are the chunks of its heads, as columns. Scores are of tokens lane / 4 and the eighth
    // behind it, of two heads each.
    __device__ __forceinline__ static void score(const uint4* keys,
                                                 const uint32_t (&query)[kSteps][2],
                                                 float (&scores)[4], int lane)
    {
        const int token = lane % 16, side = lane / 16;
        float sums[4][4] = {};
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const uint4 a = load_matrices(keys + place_of(token, 2 * i + side));
            multiply_tile<Element>(sums[i % 4], a, query[i][0], query[i][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            scores[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    }

    // Scores become weights, as rows of tokens for the next product; `valid` are of this tile.
    __device__ __forceinline__ void weigh(float (&scores)[4], float scale, int valid,
                                          uint32_t (&weights)[2], int lane)
    {
        float highest[2], faded[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool seen = lane / 4 + i / 2 * 8 < valid;
            scores[i] = seen ? scores[i] * scale : -INFINITY;
        }
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            highest[head] = fmaxf(scores[head], scores[head + 2]);
#pragma unroll
            for (int offset = 4; offset < kWarp; offset *= 2) {
                highest[head] =
                    fmaxf(highest[head], __shfl_xor_sync(kAllLanes, highest[head], offset));
            }
            highest[head] = fmaxf(highest[head], peak[head]);
            faded[head] = exp2f(peak[head] - highest[head]);
            peak[head] = highest[head];
            scores[head] = exp2f(scores[head] - highest[head]);
            scores[head + 2] = exp2f(scores[head + 2] - highest[head]);
            total[head] = fmaf(total[head], faded[head], scores[head] + scores[head + 2]);
        }
        if (!__all_sync(kAllLanes, faded[0] == 1.0f && faded[1] == 1.0f)) {
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) mixed[i][j] *= faded[j % 2];
            }
        }
        weights[0] = transposed(pair_of<Element>(scores[0], scores[1]));
        weights[1] = transposed(pair_of<Element>(scores[2], scores[3]));
    }

    __device__ __forceinline__ void mix(const uint4* values, const uint32_t (&weights)[2], int lane)
    {
        const int token = lane % 8 + lane / 16 * 8, side = lane / 8 % 2;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const uint4 a = load_transposed(values + place_of(token, 2 * i + side));
            multiply_tile<Element>(mixed[i], a, weights[0], weights[1]);
        }
    }

    // Totals of all tokens, in every lane.
    __device__ __forceinline__ void close()
    {
#pragma unroll
        for (int head = 0; head < 2; ++head) {
#pragma unroll
            for (int offset = 4; offset < kWarp; offset *= 2) {
                total[head] += __shfl_xor_sync(kAllLanes, total[head], offset);
            }
        }
    }
};

}  // namespace ds_hybrid
