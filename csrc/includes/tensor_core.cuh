// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/util/BFloat16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

// Blocks of rows in shared memory, copied there asynchronously and read by the tensor cores: 64
// elements of 2 bytes of every row, in chunks of 16 bytes.

namespace ds_hybrid {

constexpr int kBlock = 64;                     // elements of a row of a block
constexpr int kChunk = 8;                      // elements of a chunk
constexpr int kBlockChunks = kBlock / kChunk;  // chunks of a row
constexpr int kSwizzledRows = 8;

// Where a chunk lies, in chunks: the same chunk of eight rows meets eight different banks.
__device__ __forceinline__ int swizzled(int row, int chunk)
{
    return row * kBlockChunks + (chunk ^ row % kSwizzledRows);
}

__device__ __forceinline__ void copy_chunk(uint4* to, const void* from)
{
    const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
}

__device__ __forceinline__ void commit_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until all but the latest groups of this thread's copies are there, for this thread.
template <int kPending>
__device__ __forceinline__ void wait_for_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four matrices of 8 rows by a chunk. Lane i gives the place of row i % 8 of matrix i / 8, and gets
// of each matrix the pair lane % 4 of row lane / 4.
__device__ __forceinline__ uint4 load_matrices(const uint4* row)
{
    const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    uint4 pairs;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs.x), "=r"(pairs.y), "=r"(pairs.z), "=r"(pairs.w)
                 : "r"(place)
                 : "memory");
    return pairs;
}

// The same, but each turned over: of each matrix a lane gets the pair of rows lane % 4 of column
// lane / 4.
__device__ __forceinline__ uint4 load_transposed(const uint4* row)
{
    const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    uint4 pairs;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs.x), "=r"(pairs.y), "=r"(pairs.z), "=r"(pairs.w)
                 : "r"(place)
                 : "memory");
    return pairs;
}

// sums[16, 8] += a[16, 16] * b[8, 16]^T. `a` is the matrices of rows 0-7 and 8-15 of its first
// chunk, then of its second; b0 and b1 are the chunks of b. sums[0] and [1] are of row lane / 4,
// columns lane % 4 * 2 and the one behind; sums[2] and [3] of the row 8 further down.
template <typename Element>
__device__ __forceinline__ void multiply_tile(float (&sums)[4], const uint4& a, uint32_t b0,
                                              uint32_t b1)
{
    if constexpr (std::is_same_v<Element, c10::BFloat16>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    }
}

}  // namespace ds_hybrid
