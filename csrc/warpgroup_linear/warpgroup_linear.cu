// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

// The product of 17 to 64 rows with a large weight, whose time should be that of reading the
// weight once.
//
// A warp feeds a ring in shared memory through the copy engine, and a warpgroup multiplies what
// lies there on the tensor cores. The ring is half of a multiprocessor's memory: the kernel behind
// fills its own while this one is still at work. x is read by the blocks of a cluster together, or
// these share the inner dimension of a tile, where tiles are few.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "copies.cuh"
#include "dependent_launch.cuh"
#include "finish.cuh"
#include "wgmma.cuh"

namespace ds_hybrid {
namespace {

constexpr int kThreads = kWarpgroup + 2 * kWarp;  // a warp that copies, and one for factors
constexpr int kKnown = 1;                         // the barrier at which factors are known
constexpr int kRowBytes = kInnerStep * 2;
constexpr int kSharedBytes = 113 * 1024;  // of a block: two find room

// kCluster blocks, of which kRead read the same x and the others share a tile.
template <typename Element_, int kRows_, int kTile_, bool kGlu_, bool kShared_>
struct Shape {
    using Element = Element_;
    static constexpr int kRows = kRows_;  // of x that a stage has room for
    static constexpr int kTile = kTile_;
    static constexpr bool kGlu = kGlu_, kShared = kShared_;
    static constexpr int kOut = kGlu ? kTile / 2 : kTile;
    static constexpr int kCluster = kShared ? kSplit : kSharing;
    static constexpr int kInnerShares = kShared ? kSplit : 1;
    static constexpr int kReaders = kShared ? 1 : kSharing;
    static constexpr int kAtom = kTile % 48 == 0 ? 48 : kTile % 80 == 0 ? 80 : 64;
    static constexpr int kWeightBytes = kTile * kRowBytes;
    static constexpr int kStage = kWeightBytes + kRows * kRowBytes;
    static constexpr int kSums = kShared ? Shares<Element, kTile>::kFloats * sizeof(float) : 0;
    static constexpr int kBarriers = 512;  // and factors, 64 of them
    static constexpr int kStages = (kSharedBytes - kSums - kBarriers) / kStage;
    static_assert(kTile % kAtom == 0 && kOut % kGroup == 0 && kStages >= 2);
};

// Where a stage is, and which time round the ring.
template <int kStages>
struct Place {
    int stage = 0, parity = 0;

    __device__ __forceinline__ void advance()
    {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

template <typename S>
struct Ring {
    const uint32_t first, full, empty, sums;

    __device__ __forceinline__ Ring(uint8_t* memory)
        : first(shared_address(memory)),
          full(first + S::kStages * S::kStage + S::kSums),
          empty(full + S::kStages * 8),
          sums(empty + S::kStages * 8)
    {
    }
    // Rows of x beyond those of a stage, which a product takes in, are then whatever lies there.
    __device__ __forceinline__ uint32_t x(int stage) const { return first + stage * S::kStage; }
    __device__ __forceinline__ uint32_t weight(int stage) const
    {
        return x(stage) + S::kRows * kRowBytes;
    }
};

// What a block streams: its share of the inner dimension, tile after tile.
template <typename S>
struct Walk {
    int share, blocks, step, tiles;
    int tile, block = 0;

    __device__ __forceinline__ Walk(const WarpgroupArguments& args, int rank)
        : share(rank % S::kInnerShares),
          blocks((args.blocks - share + S::kInnerShares - 1) / S::kInnerShares),
          step(gridDim.x / S::kInnerShares),
          tiles((args.tiles + S::kReaders - 1) / S::kReaders * S::kReaders),
          tile(blockIdx.x / S::kInnerShares)
    {
    }
    __device__ __forceinline__ bool is_done() const { return tile >= tiles; }
    __device__ __forceinline__ int inner() const
    {
        return (share + block * S::kInnerShares) * kInnerStep;
    }
    __device__ __forceinline__ void advance()
    {
        if (++block < blocks) return;
        block = 0;
        tile += step;
    }
};

// The last tile overlaps the one before rather than end outside.
template <typename S>
__device__ __forceinline__ int first_column(const WarpgroupArguments& args, int tile)
{
    return min(tile * S::kOut, args.columns - S::kOut);
}

template <typename S>
__device__ __forceinline__ void copy_weight(const WarpgroupArguments& args, const Ring<S>& ring,
                                            const Walk<S>& walk, int stage)
{
    const uint32_t full = ring.full + stage * 8;
    expect_bytes(full, S::kWeightBytes + args.box * S::kReaders * kRowBytes);
    const int column = first_column<S>(args, walk.tile);
    if constexpr (S::kGlu) {
        copy_halves(ring.weight(stage), args.weight, full, walk.inner(), column / kGroup);
    } else {
        copy_rows(ring.weight(stage), args.weight, full, walk.inner(), column);
    }
}

template <typename S>
__device__ __forceinline__ void copy_x(const WarpgroupArguments& args, const Ring<S>& ring,
                                       const Walk<S>& walk, int stage, int rank)
{
    const uint32_t full = ring.full + stage * 8;
    if constexpr (S::kReaders > 1) {
        const int row = rank * args.box;
        copy_rows(ring.x(stage) + row * kRowBytes, args.x, full, walk.inner(), row,
                  (1 << S::kReaders) - 1);
    } else {
        copy_rows(ring.x(stage), args.x, full, walk.inner(), 0);
    }
}

// By one thread.
template <typename S>
__device__ __forceinline__ void feed(const WarpgroupArguments& args, const Ring<S>& ring,
                                     Walk<S> walk, int rank, Walk<S> x_walk, int filled)
{
    for (int stage = 0; stage < filled; ++stage, x_walk.advance()) {
        copy_x<S>(args, ring, x_walk, stage, rank);
    }
    Place<S::kStages> place;
#pragma unroll 1
    for (; !walk.is_done(); walk.advance(), place.advance()) {
        wait_for_phase(ring.empty + place.stage * 8, place.parity);
        copy_weight<S>(args, ring, walk, place.stage);
        copy_x<S>(args, ring, walk, place.stage, rank);
    }
    // Nobody arrives here any more once every stage has been given back: a block may then end.
#pragma unroll 1
    for (int stage = 0; stage < filled; ++stage, place.advance()) {
        wait_for_phase(ring.empty + place.stage * 8, place.parity);
    }
}

template <typename S>
__device__ __forceinline__ void multiply_stage(const Ring<S>& ring, int stage, int accumulate,
                                               float (&sums)[S::kTile / S::kAtom][S::kAtom / 2])
{
    const uint64_t x = matrix_descriptor(ring.x(stage));
    const uint64_t weight = matrix_descriptor(ring.weight(stage));
    begin_products();
#pragma unroll
    for (int step = 0; step < kRowBytes / 32; ++step) {
#pragma unroll
        for (int atom = 0; atom < S::kTile / S::kAtom; ++atom) {
            multiply<typename S::Element, S::kAtom>(
                sums[atom], x + step * 2, weight + step * 2 + atom * S::kAtom * kRowBytes / 16,
                step ? 1 : accumulate);
        }
    }
    commit_products();
}

template <typename S>
__global__ void __launch_bounds__(kThreads)
    warpgroup_linear(const __grid_constant__ WarpgroupArguments args)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) uint8_t memory[];
    const Ring<S> ring(memory);
    const int rank = blockIdx.x % S::kCluster;
    Walk<S> walk(args, rank);
    float* const shared = reinterpret_cast<float*>(memory + S::kStages * S::kStage);
    float* const factors = reinterpret_cast<float*>(memory + kSharedBytes) - kMostRows;
    Shares<typename S::Element, S::kShared ? S::kTile : 32> shares(
        args, shared, ring.sums, rank, first_column<S>(args, walk.tile));
    if (threadIdx.x == kWarpgroup) {
        for (int stage = 0; stage < S::kStages; ++stage) {
            init_barrier(ring.full + stage * 8, 1);
            init_barrier(ring.empty + stage * 8, S::kReaders);
        }
        init_barrier(ring.sums, 1);
        show_barriers();
        if (S::kShared) shares.expect();
    }
    __syncwarp();
    arrive_at_cluster();
    announce_dependents();

    const int warp = threadIdx.x / kWarp;
    if (warp == kWarpgroup / kWarp) {
        Walk<S> ahead = walk;
        int filled = 0;
        const bool first = threadIdx.x == kWarpgroup;
        if (first) {
            for (; filled < S::kStages && !ahead.is_done(); ++filled, ahead.advance()) {
                copy_weight<S>(args, ring, ahead, filled);
            }
        }
        __syncwarp();
        wait_for_predecessor();
        wait_for_cluster();
        if (first) feed<S>(args, ring, ahead, rank, walk, filled);
    } else if (warp > kWarpgroup / kWarp) {
        wait_for_predecessor();
        wait_for_cluster();
        if constexpr (!S::kShared) {
            find_factors(args, factors);
            asm volatile("bar.arrive %0, %1;" ::"n"(kKnown), "n"(kWarpgroup + kWarp) : "memory");
        }
    } else {
        wait_for_cluster();
        Place<S::kStages> place;
        // The first round multiplies nothing and stores nothing: it fetches the code, which every
        // launch has to, before there is anything to wait for.
        int blocks = 0, rows = 0;
        bool known = false;  // the factors
#pragma unroll 1
        for (;;) {
            float sums[S::kTile / S::kAtom][S::kAtom / 2] = {};
#pragma unroll 1
            for (int block = 0; block < blocks; ++block, place.advance()) {
                wait_for_phase(ring.full + place.stage * 8, place.parity);
                multiply_stage<S>(ring, place.stage, block > 0, sums);
                // What there is to wait for is the memory: the sooner it is asked the better.
                wait_for_products<0>();
                if (threadIdx.x < S::kReaders) {
                    arrive_at(of_block(ring.empty + place.stage * 8,
                                       S::kReaders > 1 ? threadIdx.x : rank));
                }
            }
            float flat[S::kTile / 2];
#pragma unroll
            for (int i = 0; i < S::kTile / 2; ++i) {
                flat[i] = sums[i / (S::kAtom / 2)][i % (S::kAtom / 2)];
            }
            const int column = first_column<S>(args, walk.tile);
            if constexpr (S::kShared) {
                shares.give(rows, flat);
                if (rows && shares.has_rows()) wait_for_phase(ring.sums, 0);
                shares.finish(rows, walk.tile, walk.tile * S::kOut);
            } else {
                if (rows && !known) {
                    asm volatile("bar.sync %0, %1;" ::"n"(kKnown), "n"(kWarpgroup + kWarp)
                                 : "memory");
                    known = true;
                }
                store_tile<typename S::Element, S::kTile, S::kGlu>(args, rows, column, factors,
                                                                   flat);
            }
            if (rows) {
                walk.tile += walk.step;
                if (walk.is_done()) break;
            } else {
                wait_for_predecessor();
                if constexpr (S::kShared) shares.load();
                __syncwarp();
                rows = args.rows;
                blocks = walk.blocks;
            }
        }
    }
    __syncwarp();
    arrive_at_cluster();
    wait_for_cluster();  // sums may still be on their way from here
#endif
}

template <typename S>
void launch_shape(const WarpgroupArguments& args, cudaStream_t stream)
{
    auto* const kernel = warpgroup_linear<S>;
    C10_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    const int tiles = (args.tiles + S::kReaders - 1) / S::kReaders;
    const int clusters = S::kShared ? tiles : std::min(tiles, args.processors / S::kCluster);
    launch_dependent(kernel, dim3(clusters * S::kCluster), kThreads, S::kCluster, kSharedBytes,
                     stream, args);
}

template <typename Element, int kRows, int kTile>
void launch_tile(const WarpgroupArguments& args, cudaStream_t stream)
{
    if (args.residual) {
        launch_shape<Shape<Element, kRows, kTile, false, true>>(args, stream);
    } else if (args.glu) {
        launch_shape<Shape<Element, kRows, kTile, true, false>>(args, stream);
    } else {
        launch_shape<Shape<Element, kRows, kTile, false, false>>(args, stream);
    }
}

template <typename Element, int kRows>
void launch_rows(const WarpgroupArguments& args, cudaStream_t stream)
{
    switch (args.tile) {
        case 64:
            return launch_tile<Element, kRows, 64>(args, stream);
        case 80:
            return launch_tile<Element, kRows, 80>(args, stream);
        case 96:
            return launch_tile<Element, kRows, 96>(args, stream);
        case 128:
            return launch_tile<Element, kRows, 128>(args, stream);
        case 144:
            return launch_tile<Element, kRows, 144>(args, stream);
        default:
            return launch_tile<Element, kRows, 160>(args, stream);
    }
}

template <typename Element>
void launch(const WarpgroupArguments& args, cudaStream_t stream)
{
    if (args.rows <= kMostRows / 2) {
        launch_rows<Element, kMostRows / 2>(args, stream);
    } else {
        launch_rows<Element, kMostRows>(args, stream);
    }
}

}  // namespace

void launch_warpgroup_linear(const WarpgroupArguments& args, cudaStream_t stream)
{
    if (args.type == c10::ScalarType::BFloat16) {
        launch<c10::BFloat16>(args, stream);
    } else {
        launch<c10::Half>(args, stream);
    }
}

}  // namespace ds_hybrid
