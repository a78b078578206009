// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <cstdint>

#include "stream.cuh"

namespace ds_hybrid {

// A warp's sums as the tensor cores leave them: a thread has rows lane % 4 * 2 + i % 2 of x and
// columns lane / 4 + i / 2 * 8 of the tile's sixteen.
template <typename S>
using Sums = float[S::kTiles][S::kGroups][4];

// Where the sums of a tile meet. Rows of x are dealt out to the blocks of a cluster, and every warp
// that multiplies has a place for each of them in the memory of its owner: sums go to where they
// are added up, and count themselves in there, so that no block waits for more than what it needs,
// nor reads in another's memory. Columns eight apart lie together, as a thread has them.
template <typename S>
class Exchange {
public:
    __device__ __forceinline__ Exchange(const FewRowsArguments& args, int rank, float* shared,
                                        uint64_t* arrived)
        : rows_(args.rows),
          split_(args.split),
          shift_(args.shift),
          rank_(rank),
          own_(S::kRows >> args.shift),
          shared_(shared),
          arrived_(address(arrived))
    {
        if (split_ == 1) return;
        if (threadIdx.x == kWarps * kWarp) {
            asm volatile(
                "mbarrier.init.shared::cta.b64 [%0], 1;\n"
                "fence.mbarrier_init.release.cluster;" ::"r"(arrived_)
                : "memory");
        }
        __syncwarp();
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }

    // By the fifth warp, when it has written what `meet` shall let others read.
    __device__ __forceinline__ void expect() const
    {
        if (split_ == 1) return;
        __syncwarp();
        if (threadIdx.x % kWarp) return;
        const int numbers = (rows_ - rank_ + split_ - 1) >> shift_;
        const int bytes = (numbers << shift_) * kWarps * S::kTiles * kGroup * 2 * sizeof(float);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived_),
                     "r"(bytes)
                     : "memory");
    }

    // The rows of x that this block finishes are those congruent to its rank, and there are at most
    // so many.
    __device__ __forceinline__ int numbers() const { return own_; }
    __device__ __forceinline__ int row(int number) const { return rank_ + (number << shift_); }

    // Whether a warp whose first row would be this one has nothing to wait for.
    __device__ __forceinline__ bool is_done(int number) const
    {
        return split_ > 1 && row(number) >= rows_;
    }

    // By a warp that multiplies: its sums, to where they are wanted.
    __device__ __forceinline__ void put(const Sums<S>& sums) const
    {
        const int lane = threadIdx.x % kWarp, warp = rank_ * kWarps + threadIdx.x / kWarp;
        const int row = lane % 4 * 2, pair = lane / 4;
        if (split_ == 1) {
            float* const at = shared_ + ((warp * own_ + row) * S::kPitch + pair) * 2;
            for_each([&](int i, int tile, int group) {
                const int place = ((group * kGroup + i) * S::kPitch + tile * kGroup) * 2;
                const auto& of = sums[tile][group];
                *reinterpret_cast<float2*>(at + place) = {of[i], of[i + 2]};
            });
            return;
        }
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        uint32_t to[2], count[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int owner = (row + i) & (split_ - 1), number = (row + i) >> shift_;
            to[i] =
                of_block(address(shared_ + ((warp * own_ + number) * S::kPitch + pair) * 2), owner);
            count[i] = of_block(arrived_, owner);
        }
        for_each([&](int i, int tile, int group) {
            if (group * kGroup + row + i >= rows_) return;
            const int place = group * (own_ / S::kGroups) * S::kPitch + tile * kGroup;
            const auto& of = sums[tile][group];
            send(to[i] + place * sizeof(float2), of[i], of[i + 2], count[i]);
        });
    }

    // By all threads, but for those with nothing to wait for: until the sums of this block's rows
    // are there.
    __device__ __forceinline__ void meet() const
    {
        if (split_ == 1) return __syncthreads();
        static_assert(S::kRows / 2 <= kWarps * 2, "the fifth warp, which puts nothing, is done");
        uint32_t there = 0;
        while (!there) {
            asm volatile(
                "{\n"
                ".reg .pred p;\n"
                "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
                "selp.u32 %0, 1, 0, p;\n"
                "}"
                : "=r"(there)
                : "r"(arrived_)
                : "memory");
        }
    }

    // Adds what the warps of one block of the cluster found for a row of this block: four sums that
    // lie together, of two columns next to each other and those eight further.
    __device__ __forceinline__ void add_to(float4& sum, int rank, int number, int quad) const
    {
        const float4* const found = reinterpret_cast<const float4*>(shared_) +
                                    (rank * kWarps * own_ + number) * S::kPitch / 2 + quad;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            const float4 of_warp = found[warp * own_ * S::kPitch / 2];
            sum.x += of_warp.x;
            sum.y += of_warp.y;
            sum.z += of_warp.z;
            sum.w += of_warp.w;
        }
    }

private:
    template <typename Visit>
    static __device__ __forceinline__ void for_each(Visit visit)
    {
#pragma unroll
        for (int group = 0; group < S::kGroups; ++group) {
#pragma unroll
            for (int tile = 0; tile < S::kTiles; ++tile) {
#pragma unroll
                for (int i = 0; i < 2; ++i) visit(i, tile, group);
            }
        }
    }
    static __device__ __forceinline__ uint32_t address(const void* shared)
    {
        return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    }
    static __device__ __forceinline__ uint32_t of_block(uint32_t shared, uint32_t rank)
    {
        uint32_t place;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(shared), "r"(rank));
        return place;
    }
    static __device__ __forceinline__ void send(uint32_t to, float low, float high, uint32_t count)
    {
        asm volatile(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
            "[%3];" ::"r"(to),
            "f"(low), "f"(high), "r"(count)
            : "memory");
    }

    const int rows_, split_, shift_, rank_, own_;
    float* const shared_;
    const uint32_t arrived_;
};

}  // namespace ds_hybrid
