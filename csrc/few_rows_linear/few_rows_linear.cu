// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

// The product of a few rows with a large weight, whose time is that of reading the weight once.
//
// Every warp streams its own share of the weight through a ring of its own in shared memory: warps
// deal the blocks of the inner dimension out among themselves, and their sums meet at the end of a
// tile, across the blocks of a cluster where the tiles are too few for the card. A block works
// through its tiles without the ring ever running dry. With its last request it announces the
// kernel behind, which fills its own ring before it waits: the memory stays busy where one kernel
// ends and the next begins.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "finish.cuh"
#include "stream.cuh"

namespace ds_hybrid {
namespace {

template <typename S>
using Sums = float[S::kTiles][S::kGroups][4];

// A block of the ring as the tensor cores take it. Rows of x that are not there, and of the weight
// beyond the tile, are whatever lies in the ring: their sums go nowhere.
template <typename S>
struct Block {
    uint4 x[2][S::kGroups];
    uint4 weight[2][S::kTiles][2];

    __device__ __forceinline__ explicit Block(const uint4* stage)
    {
        const int lane = threadIdx.x % kWarp, row = lane % 8, matrix = lane / 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int group = 0; group < S::kGroups; ++group) {
                x[half][group] =
                    load_matrices(stage + (S::kColumns + group * kGroup) * kBlockChunks +
                                  swizzled(row, half * 4 + matrix));
            }
#pragma unroll
            for (int tile = 0; tile < S::kTiles; ++tile) {
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    const uint4* rows = stage + (tile * kTile + matrix % 2 * 8) * kBlockChunks;
                    weight[half][tile][step] =
                        load_matrices(rows + swizzled(row, half * 4 + step * 2 + matrix / 2));
                }
            }
        }
    }

    template <typename Element>
    __device__ __forceinline__ void multiply(Sums<S>& sums) const
    {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int step = 0; step < 2; ++step) {
#pragma unroll
                for (int tile = 0; tile < S::kTiles; ++tile) {
#pragma unroll
                    for (int group = 0; group < S::kGroups; ++group) {
                        const uint4& of = x[half][group];
                        multiply_tile<Element>(sums[tile][group], weight[half][tile][step],
                                               step ? of.z : of.x, step ? of.w : of.y);
                    }
                }
            }
        }
    }
};

template <typename S>
__device__ __forceinline__ void store_sums(const Sums<S>& sums, float* shared)
{
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
#pragma unroll
        for (int group = 0; group < S::kGroups; ++group) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = warp * S::kRows + group * kGroup + lane % 4 * 2 + i % 2;
                const int column = tile * kTile + i / 2 * 8;
                if (column < S::kColumns) {
                    shared[row * S::kPitch + column + lane / 4] = sums[tile][group][i];
                }
            }
        }
    }
}

// Barriers beside that of all threads, between the warps that multiply and the one more.
constexpr int kSummed = 1, kFinished = 2;

template <int kBarrier>
__device__ __forceinline__ void meet()
{
    asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// Those who arrive do not wait for those who meet them.
template <int kBarrier>
__device__ __forceinline__ void arrive()
{
    asm volatile("bar.arrive %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// What follows the sums of a tile, by one warp.
template <typename Element, typename S, bool glu>
__device__ __forceinline__ void finish_alone(const FewRowsArguments& args, int tile, float* shared,
                                             const float* factors)
{
#pragma unroll 1
    for (int part = 0; part <= kWarps; ++part) {
        Finish<Element, S, glu> finish(args, part, kWarps + 1);
        finish.load(tile);
        finish.store(tile, shared, factors);
    }
}

template <typename Element, typename S, bool glu>
__global__ void __launch_bounds__(kThreads, 2) few_rows_linear(const FewRowsArguments args)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900  // on older cards it is never launched
    extern __shared__ uint4 memory[];
    float* const shared = reinterpret_cast<float*>(memory + S::kRing);
    float* const factors = shared + S::kSums;
    const int warp = threadIdx.x / kWarp, rank = blockIdx.x % args.split;
    const int first = rank * kWarps + warp, step = kWarps * args.split;
    const int blocks = warp < kWarps ? args.blocks : 0;

    Stream<Element, S, glu> stream(args, memory, first, step);
    if (first < blocks) stream.fill_weight();
    wait_for_predecessor();
    if (first < blocks) stream.fill_x();
    if (warp == kWarps) find_factors<S>(args, factors);
    __syncwarp();

    const int stride = gridDim.x / args.split;
    int tile = blockIdx.x / args.split;
    const auto add_up_tile = [&](Sums<S>& sums) {
        for (int block = first; block < blocks; block += step) {
            const Block<S> there(stream.next());
            stream.done();  // asks for more before this is multiplied
            there.template multiply<Element>(sums);
        }
    };
    // Blocks of several tiles share none of them with another block: the last warp does what
    // follows the sums of all but the last tile, while the others are at the next one.
    for (; tile + stride < args.tiles; tile += stride) {
        if (warp == kWarps) {
            meet<kSummed>();
            finish_alone<Element, S, glu>(args, tile, shared, factors);
            arrive<kFinished>();
        } else {
            Sums<S> sums = {};
            add_up_tile(sums);
            if (tile >= stride) meet<kFinished>();
            store_sums<S>(sums, shared);
            arrive<kSummed>();
        }
    }
    Finish<Element, S, glu> finish(args, rank * (kWarps + 1) + warp, args.split * (kWarps + 1));
    finish.load(tile);
    Sums<S> sums = {};
    add_up_tile(sums);
    if (warp < kWarps) {
        if (tile >= stride) meet<kFinished>();
        store_sums<S>(sums, shared);
    }
    synchronise(args.split);
    finish.store(tile, shared, factors);
    if (args.split > 1) synchronise(args.split);  // the others may still be reading here
    wait_for_copies<0>();  // of x, where a share has fewer blocks than the ring
#endif
}

template <typename Element, typename S, bool glu>
void launch(const FewRowsArguments& args, cudaStream_t stream)
{
    auto* const kernel = few_rows_linear<Element, S, glu>;
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(S::kBytes)));
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    const int clusters = std::min(args.tiles, args.processors / args.split);
    launch_dependent(kernel, dim3(clusters * args.split), kThreads, args.split, S::kBytes, stream,
                     args);
}

// The rings of two launches in a row fit a multiprocessor together, but for two wide ones: the
// blocks of the one behind then spread evenly, one beside each of those still running.
template <typename Element, int kRows, int kWideStages, int kNarrowStages>
void launch(const FewRowsArguments& args, cudaStream_t stream)
{
    using Wide = Shape<kRows, kWideColumns, kWideStages>;
    using Narrow = Shape<kRows, kNarrowColumns, kNarrowStages>;
    if (args.narrow && args.glu) {
        launch<Element, Narrow, true>(args, stream);
    } else if (args.narrow) {
        launch<Element, Narrow, false>(args, stream);
    } else if (args.glu) {
        launch<Element, Wide, true>(args, stream);
    } else {
        launch<Element, Wide, false>(args, stream);
    }
}

template <typename Element>
void launch(const FewRowsArguments& args, cudaStream_t stream)
{
    if (args.rows <= 8) {
        launch<Element, 8, 5, 3>(args, stream);
    } else {
        launch<Element, 16, 4, 2>(args, stream);
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
