// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "barrier.cuh"

// The copy engine for matrices, and other blocks of a cluster.

namespace ds_hybrid {

__device__ __forceinline__ uint32_t of_block(uint32_t shared, int rank)
{
    uint32_t place;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(shared), "r"(rank));
    return place;
}

// `barrier` is of any block of the cluster.
__device__ __forceinline__ void arrive_at(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_at_cluster()
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_cluster()
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A box of a matrix, in blocks of the inner dimension and rows, counted in at `barrier`.
__device__ __forceinline__ void copy_rows(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                          int inner, int row)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3, %4}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(inner), "r"(row)
        : "memory");
}

// The same for all blocks whose bit is set: at that place, and counted in at that barrier, of each.
__device__ __forceinline__ void copy_rows(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                          int inner, int row, uint16_t blocks)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(inner), "r"(row), "h"(blocks)
        : "memory");
}

// A box of groups of rows, of both halves of a matrix in turn.
__device__ __forceinline__ void copy_halves(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                            int inner, int group)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3, %5, %5, %4}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(inner), "r"(group), "r"(0)
        : "memory");
}

// Two sums into another block's memory, where they are counted in, or nothing; without a branch.
__device__ __forceinline__ void send(bool wanted, uint32_t to, float left, float right,
                                     uint32_t barrier)
{
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.b32 wanted, %4, 0;\n"
        "@wanted st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
        "[%3];\n"
        "}" ::"r"(to),
        "f"(left), "f"(right), "r"(barrier), "r"(static_cast<int>(wanted))
        : "memory");
}

}  // namespace ds_hybrid
