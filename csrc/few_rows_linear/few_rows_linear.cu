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

// A block of the ring as the tensor cores take it. Rows of x that are not there, and of the weight
// beyond the tile, are whatever lies in the ring: their sums go nowhere.
template <typename S, bool glu>
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
                    const uint4* rows = stage + tile * kTile * kBlockChunks;
                    const int beyond = row + matrix % 2 * Tiling<S, glu>::gap(tile);
                    weight[half][tile][step] =
                        load_matrices(rows + swizzled(beyond, half * 4 + step * 2 + matrix / 2));
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

template <typename Element, typename S, bool glu>
__global__ void __launch_bounds__(kThreads, 2) few_rows_linear(const FewRowsArguments args)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900  // on older cards it is never launched
    extern __shared__ uint4 memory[];
    float* const shared = reinterpret_cast<float*>(memory + S::kRing);
    float* const factors = shared + S::kSums;
    const int warp = threadIdx.x / kWarp, rank = blockIdx.x & (args.split - 1);
    const int first = rank * kWarps + warp, step = kWarps * args.split;
    const int blocks = warp < kWarps ? args.blocks : 0;
    auto* const arrived = reinterpret_cast<uint64_t*>(factors + S::kRows);
    const Exchange<S> exchange(args, rank, shared, arrived);

    Stream<Element, S, glu> stream(args, memory, first, step);
    if (first < blocks) stream.fill_weight();
    wait_for_predecessor();
    if (first < blocks) stream.fill_x();
    if (warp == kWarps) {
        find_factors<S>(args, factors);
        exchange.expect();
    }
    __syncwarp();

    const int stride = gridDim.x >> args.shift;
    int tile = blockIdx.x >> args.shift;
    // Blocks of several tiles share none of them with another block: the last warp does what
    // follows the sums of all but the last tile, while the others are at the next one.
    for (;; tile += stride) {
        const bool last = tile + stride >= args.tiles, alone = !last && warp == kWarps;
        Finish<Element, S, glu> finish(args, exchange, tile, alone ? 0 : warp);
        if (last) finish.load();
        if (warp < kWarps) {
            Sums<S> sums = {};
#pragma unroll 1
            for (int block = first; block < blocks; block += step) {
                const Block<S, glu> there(stream.next());
                stream.done();  // asks for more before this is multiplied
                there.template multiply<Element>(sums);
            }
            if (tile >= stride) meet<kFinished>();
            exchange.put(sums);
            if (!last) {
                arrive<kSummed>();
                continue;
            }
        }
        if (last) {
            if (exchange.is_done(warp * 2)) break;
            exchange.meet();
        } else {
            meet<kSummed>();
            finish.load();
        }
        const int pairs = alone ? 1 : kWarps + 1;
        for (int pair = alone ? 0 : warp;;) {
            finish.store(factors);
            pair += pairs;
            if (exchange.row(pair * 2) >= args.rows) break;
            finish.advance(pairs);
            finish.load();
        }
        if (last) break;
        arrive<kFinished>();
    }
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
