// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/util/BFloat16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

// Products of a warpgroup: sums[64, columns] (+)= a[64, 16] * b[columns, 16]^T, both in shared
// memory, in rows of 128 bytes whose 16-byte chunks the copy engine has swizzled. Thread t has of
// rows t / 32 * 16 + t % 32 / 4 and eight further columns j * 8 + t % 4 * 2 and the next one: the
// first row's in sums[4 * j] and [4 * j + 1], the other's behind them.

namespace ds_hybrid {

// Of a tile that starts at a multiple of 1,024 bytes, or 32 bytes further for every product before.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t shared)
{
    constexpr uint64_t kSwizzled = 1ull << 62, kEightRows = 1024 >> 4;
    return kSwizzled | kEightRows << 32 | 1ull << 16 | (shared & 0x3ffff) >> 4;
}

__device__ __forceinline__ void begin_products()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait_for_products()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define DS_HYBRID_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DS_HYBRID_8(d, i) DS_HYBRID_4(d, i), DS_HYBRID_4(d, i + 4)
#define DS_HYBRID_24(d) DS_HYBRID_8(d, 0), DS_HYBRID_8(d, 8), DS_HYBRID_8(d, 16)
#define DS_HYBRID_32(d) DS_HYBRID_24(d), DS_HYBRID_8(d, 24)
#define DS_HYBRID_40(d) DS_HYBRID_32(d), DS_HYBRID_8(d, 32)
#define DS_HYBRID_NAMES_24                                                                         \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "        \
    "%19, %20, %21, %22, %23"
#define DS_HYBRID_NAMES_32 DS_HYBRID_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define DS_HYBRID_NAMES_40 DS_HYBRID_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define DS_HYBRID_WGMMA(columns, types, names, sums, a, b, accumulate, ia, ib, ip)                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ip                                            \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." types " {" names "}, " ia  \
                 ", " ib ", p, 1, 1, 0, 0;\n}"                                                     \
                 : sums                                                                            \
                 : "l"(a), "l"(b), "r"(accumulate))

// One product on the tensor cores of kColumns columns.
template <typename Element, int kColumns>
__device__ __forceinline__ void multiply(float (&sums)[kColumns / 2], uint64_t a, uint64_t b,
                                         int accumulate)
{
    static_assert(kColumns == 48 || kColumns == 64 || kColumns == 80);
    if constexpr (std::is_same_v<Element, c10::BFloat16>) {
        if constexpr (kColumns == 48) {
            DS_HYBRID_WGMMA("48", "bf16.bf16", DS_HYBRID_NAMES_24, DS_HYBRID_24(sums), a, b,
                            accumulate, "%24", "%25", "%26");
        } else if constexpr (kColumns == 64) {
            DS_HYBRID_WGMMA("64", "bf16.bf16", DS_HYBRID_NAMES_32, DS_HYBRID_32(sums), a, b,
                            accumulate, "%32", "%33", "%34");
        } else {
            DS_HYBRID_WGMMA("80", "bf16.bf16", DS_HYBRID_NAMES_40, DS_HYBRID_40(sums), a, b,
                            accumulate, "%40", "%41", "%42");
        }
    } else {
        if constexpr (kColumns == 48) {
            DS_HYBRID_WGMMA("48", "f16.f16", DS_HYBRID_NAMES_24, DS_HYBRID_24(sums), a, b,
                            accumulate, "%24", "%25", "%26");
        } else if constexpr (kColumns == 64) {
            DS_HYBRID_WGMMA("64", "f16.f16", DS_HYBRID_NAMES_32, DS_HYBRID_32(sums), a, b,
                            accumulate, "%32", "%33", "%34");
        } else {
            DS_HYBRID_WGMMA("80", "f16.f16", DS_HYBRID_NAMES_40, DS_HYBRID_40(sums), a, b,
                            accumulate, "%40", "%41", "%42");
        }
    }
}

#undef DS_HYBRID_WGMMA
#undef DS_HYBRID_NAMES_40
#undef DS_HYBRID_NAMES_32
#undef DS_HYBRID_NAMES_24
#undef DS_HYBRID_40
#undef DS_HYBRID_32
#undef DS_HYBRID_24
#undef DS_HYBRID_8
#undef DS_HYBRID_4

}  // namespace ds_hybrid
