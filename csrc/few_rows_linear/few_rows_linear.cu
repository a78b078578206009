// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

// [rows, inner] x [columns, inner]^T for up to 64 rows, on the tensor cores, at the speed of
// reading the weight once. The weight is the mma's A operand: 16 of its rows a block, the inner
// dimension dealt out to the warps 64 elements at a time. Both operands go from memory straight to
// registers: a sum does not depend on the order of the inner dimension, so each lane takes 8
// elements that lie side by side, of A and B alike, where the mma's layout would have it take 4
// pairs. A lane keeps several loads of the weight in flight, the first of them from before the wait
// for the kernel ahead.
//
// With glu rows 0-7 of the tile are the gate's and rows 8-15 the up projection's of the same
// columns.

#include <c10/cuda/CUDAException.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <type_traits>

#include "activations.cuh"
#include "dependent_launch.cuh"
#include "few_rows_linear.h"

namespace ds_hybrid {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarp * kWarps;
constexpr int kTileRows = 8;  // rows of x in one mma

// One lane's part of 16 weight rows and 64 elements: two 16-byte loads for each of its two rows.
struct Fragment {
    uint4 upper[2], lower[2];
};

// The weight is read once: it shall not displace x from the L1 cache. Not .nc, although nobody
// writes it meanwhile: such loads the assembler moves behind the wait for the kernel ahead.
__device__ __forceinline__ uint4 load_once(const uint4* from)
{
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

template <typename Element>
__device__ __forceinline__ void multiply_add(float (&sums)[4], unsigned a0, unsigned a1,
                                             unsigned a2, unsigned a3, unsigned b0, unsigned b1)
{
    if constexpr (std::is_same_v<Element, c10::BFloat16>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

// 1 / rms of every row of x, by the partial sums of squares in their order.
template <int kRows>
__device__ __forceinline__ void find_factors(const FewRowsArguments& args, float* factors)
{
    constexpr int kLanes = kThreads / kRows;
    const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    float total = 0.0f;
    if (row < args.rows) {
        for (int part = lane; part < args.parts; part += kLanes) {
            total += args.squares[static_cast<int64_t>(part) * args.rows + row];
        }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
        total += __shfl_xor_sync(0xffffffffu, total, step);
    }
    if (lane == 0) factors[row] = rsqrtf(total / args.inner + args.eps);
}

template <typename Element, int kTiles, bool glu>
__global__ void __launch_bounds__(kThreads, 2) few_rows(const FewRowsArguments args)
{
    constexpr int kRows = kTiles * kTileRows;
    constexpr int kColumns = glu ? kTileColumns / 2 : kTileColumns;
    constexpr int kAhead = kTiles <= 2 ? 5 : kTiles == 4 ? 4 : 3;  // as registers allow
    __shared__ float sums_of_warps[kWarps][kTileColumns][kRows + 1];
    __shared__ float factors[kRows];

    announce_dependents();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int group = lane / 4, quarter = lane % 4;
    const int64_t inner = args.inner;
    const int first_column = blockIdx.x * kColumns;
    const auto row_of_weight = [&](int64_t row) {
        const Element* start = static_cast<const Element*>(args.weight) + row * inner;
        return reinterpret_cast<const uint4*>(start) + quarter;
    };
    const int last = args.columns - 1;
    const uint4* upper = row_of_weight(min(first_column + group, last));
    const uint4* lower = row_of_weight(glu ? args.columns + min(first_column + group, last)
                                           : min(first_column + group + 8, last));

    constexpr int kPacks = 8;  // 16-byte packs in 64 elements
    const int blocks = args.inner / kInnerStep;
    const int count = (blocks - warp + kWarps - 1) / kWarps;
    Fragment ring[kAhead];
    const auto fetch = [&](Fragment& fragment, int block) {
        const int pack = (warp + block * kWarps) * kPacks;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            fragment.upper[half] = load_once(upper + pack + 4 * half);
            fragment.lower[half] = load_once(lower + pack + 4 * half);
        }
    };
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
        if (ahead < count) fetch(ring[ahead], ahead);
    }
    wait_for_predecessor();
    if (args.squares != nullptr) find_factors<kRows>(args, factors);

    float sums[kTiles][4] = {};
    const uint4* x = reinterpret_cast<const uint4*>(args.x) + quarter;
    const int packs_a_row = args.inner / 8;
    for (int base = 0; base < count; base += kAhead) {
#pragma unroll
        for (int ahead = 0; ahead < kAhead; ++ahead) {
            const int block = base + ahead;
            if (block >= count) break;
            const int pack = (warp + block * kWarps) * kPacks;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 a = ring[ahead].upper[half], b = ring[ahead].lower[half];
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) {
                    const int row = tile * kTileRows + group;
                    uint4 values = make_uint4(0, 0, 0, 0);
                    if (row < args.rows) {
                        values = x[static_cast<int64_t>(row) * packs_a_row + pack + 4 * half];
                    }
                    multiply_add<Element>(sums[tile], a.x, b.x, a.y, b.y, values.x, values.y);
                    multiply_add<Element>(sums[tile], a.z, b.z, a.w, b.w, values.z, values.w);
                }
            }
            if (block + kAhead < count) fetch(ring[ahead], block + kAhead);
        }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        const int row = tile * kTileRows + 2 * quarter;
        sums_of_warps[warp][group][row] = sums[tile][0];
        sums_of_warps[warp][group][row + 1] = sums[tile][1];
        sums_of_warps[warp][group + 8][row] = sums[tile][2];
        sums_of_warps[warp][group + 8][row + 1] = sums[tile][3];
    }
    __syncthreads();

    const auto total_of = [&](int column, int row) {
        float total = 0.0f;
#pragma unroll
        for (int other = 0; other < kWarps; ++other) total += sums_of_warps[other][column][row];
        return args.squares != nullptr ? total * factors[row] : total;
    };
    for (int index = threadIdx.x; index < kColumns * kRows; index += kThreads) {
        const int column = index % kColumns, row = index / kColumns;
        const int64_t at = static_cast<int64_t>(row) * args.columns + first_column + column;
        const bool inside = row < args.rows && first_column + column < args.columns;
        float result = total_of(column, row);
        if constexpr (glu) result = silu(result) * total_of(column + 8, row);
        if (inside && args.bias != nullptr) {
            result +=
                static_cast<float>(static_cast<const Element*>(args.bias)[first_column + column]);
        }
        if (inside && args.residual != nullptr) {
            result += static_cast<float>(static_cast<const Element*>(args.residual)[at]);
        }
        const Element rounded = static_cast<Element>(result);
        if (inside) static_cast<Element*>(args.out)[at] = rounded;
        if constexpr (!glu) {
            if (args.residual == nullptr) continue;
            // The next norm sees what its layer sees.
            const float hidden = inside ? static_cast<float>(rounded) : 0.0f;
            if (inside) {
                const Element norm =
                    static_cast<const Element*>(args.next_norm)[first_column + column];
                static_cast<Element*>(args.scaled)[at] =
                    static_cast<Element>(hidden * (static_cast<float>(norm) + args.next_offset));
            }
            float square = hidden * hidden;
#pragma unroll
            for (int step = kColumns / 2; step > 0; step /= 2) {
                square += __shfl_xor_sync(0xffffffffu, square, step);
            }
            if (column == 0 && row < args.rows) {
                args.next_squares[static_cast<int64_t>(blockIdx.x) * args.rows + row] = square;
            }
        }
    }
}

template <typename Element, int kTiles, bool glu>
void launch(const FewRowsArguments& args, cudaStream_t stream)
{
    constexpr int kColumns = glu ? kTileColumns / 2 : kTileColumns;
    const dim3 grid((args.columns + kColumns - 1) / kColumns);
    launch_dependent(few_rows<Element, kTiles, glu>, grid, kThreads, args, args.dependent, stream);
}

template <typename Element, bool glu>
void launch(const FewRowsArguments& args, cudaStream_t stream)
{
    if (args.rows <= 8) {
        launch<Element, 1, glu>(args, stream);
    } else if (args.rows <= 16) {
        launch<Element, 2, glu>(args, stream);
    } else if (args.rows <= 32) {
        launch<Element, 4, glu>(args, stream);
    } else {
        launch<Element, 8, glu>(args, stream);
    }
}

template <typename Element>
void launch(const FewRowsArguments& args, cudaStream_t stream)
{
    if (args.glu) {
        launch<Element, true>(args, stream);
    } else {
        launch<Element, false>(args, stream);
    }
}

}  // namespace

void launch_few_rows_linear(const FewRowsArguments& args, cudaStream_t stream)
{
    if (args.type == c10::ScalarType::BFloat16) {
        launch<c10::BFloat16>(args, stream);
    } else {
        launch<c10::Half>(args, stream);
    }
}

}  // namespace ds_hybrid
