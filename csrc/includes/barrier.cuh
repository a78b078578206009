// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

// Barriers in shared memory, at which the copy engine counts bytes in. Hopper and later.
// Waits acquire within the block alone: at the cluster's scope each would flush the first-level
// cache.

namespace ds_hybrid {

__device__ __forceinline__ uint32_t shared_address(const void* shared)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

// Barriers that this thread has made are the copy engine's, too, from here on.
__device__ __forceinline__ void show_barriers()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Until the phase of that parity is over.
__device__ __forceinline__ void wait_for_phase(uint32_t barrier, int parity)
{
    asm volatile(
        "{\n"
        ".reg .pred there;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
        "@!there bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void arrive_here(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// What this thread has written to shared memory, or read there, comes before what the copy engine
// writes next.
__device__ __forceinline__ void hand_over()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Bytes that lie in a row, a multiple of 16 from a boundary of 16 on, counted in at `barrier`.
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, int bytes,
                                           uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// The same of what is read once: the L2 cache need not hold it.
__device__ __forceinline__ void copy_bytes_once(uint32_t to, const void* from, int bytes,
                                                uint32_t barrier)
{
    asm volatile(
        "{\n"
        ".reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], policy;\n"
        "}" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

}  // namespace ds_hybrid
