// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "dependent_launch.cuh"
#include "few_rows_linear.h"
#include "tensor_core.cuh"

namespace ds_hybrid {

constexpr int kWarp = 32;
constexpr int kWarps = 4;                       // that multiply
constexpr int kThreads = kWarp * (kWarps + 1);  // and one more, for norms and ends of tiles
constexpr int kGroup = 8;                       // rows of x of one product on the tensor cores
constexpr int kTile = 16;                       // rows of the weight of one such product

template <int kRows_, int kColumns_, int kStages_>
struct Shape {
    static constexpr int kRows = kRows_;        // of x, at most
    static constexpr int kColumns = kColumns_;  // rows of the weight in a tile
    static constexpr int kStages = kStages_;
    static constexpr int kGroups = kRows / kGroup;
    static constexpr int kTiles = (kColumns + kTile - 1) / kTile;
    static constexpr int kStage = (kColumns + kRows) * kBlockChunks;  // 16-byte chunks
    static constexpr int kPitch = kTiles * kGroup + 2;  // pairs of sums: no bank conflicts
    static constexpr int kRing = kWarps * kStages * kStage;
    static constexpr int kSums = kWarps * kRows * kPitch * 2;
    static constexpr size_t kBytes =
        sizeof(uint4) * kRing + sizeof(float) * (kSums + kRows) + sizeof(uint64_t);
    static_assert(kRows % kGroup == 0 && kColumns % kGroup == 0 && kWarp % kRows == 0);
};

// Tiles of `args.columns`. The last one overlaps the one before rather than end outside. Gates and
// ups take turns, eight of each or what is left, so that the two of a column are eight apart where
// the tensor cores take them.
template <typename S, bool glu>
struct Tiling {
    static constexpr int kOut = glu ? S::kColumns / 2 : S::kColumns;

    static __device__ __forceinline__ int first_column(const FewRowsArguments& args, int tile)
    {
        return min(tile * kOut, args.columns - kOut);
    }
    // Rows between the two halves of what one product on the tensor cores takes.
    static __device__ __forceinline__ constexpr int gap(int tile)
    {
        return glu && kOut - tile * kGroup < kGroup ? kOut - tile * kGroup : kGroup;
    }
    // Whether a row of the tile is of ups, and which of the tile's columns it is.
    static __device__ __forceinline__ constexpr bool is_up(int row)
    {
        return glu && row % kTile >= gap(row / kTile);
    }
    static __device__ __forceinline__ constexpr int column(int row)
    {
        if (!glu) return row;
        return row / kTile * kGroup + row % kTile - (is_up(row) ? gap(row / kTile) : 0);
    }
};

// One warp's share, tile after tile: the blocks of the inner dimension congruent to the warp. A
// stage of the ring holds such a block of the tile's rows of the weight, and behind them of x,
// which may be asked for only after the wait.
template <typename Element, typename S, bool glu>
class Stream {
public:
    __device__ __forceinline__ Stream(const FewRowsArguments& args, uint4* ring, int warp, int step)
        : args_(args),
          ring_(ring + warp % kWarps * S::kStages * S::kStage),
          warp_(warp),
          step_(step),
          tile_step_(gridDim.x >> args.shift),
          tile_(blockIdx.x >> args.shift),
          block_(warp)
    {
        const int lane = threadIdx.x % kWarp;
        row_ = lane / kBlockChunks;
        chunk_ = lane % kBlockChunks;
        start_tile();
    }

    // Fills the ring but for x. Then, after the wait, `fill_x` does the rest.
    __device__ __forceinline__ void fill_weight()
    {
#pragma unroll 1
        for (int stage = 0; stage < S::kStages; ++stage) {
            if (tile_ < args_.tiles) {
                fetch_weight(stage);
                advance();
            }
            commit_copies();
        }
    }
    __device__ __forceinline__ void fill_x()
    {
        int block = warp_;
#pragma unroll 1
        for (int stage = 0; stage < S::kStages; ++stage) {
            fetch_x(stage, block);
            commit_copies();
            block = block + step_ < args_.blocks ? block + step_ : warp_;
        }
    }

    // The oldest stage asked for, when it is there. Call `done` when it has been used.
    __device__ __forceinline__ const uint4* next()
    {
        wait_for_copies<S::kStages - 1>();
        __syncwarp();
        return ring_ + stage_ * S::kStage;
    }
    __device__ __forceinline__ void done()
    {
        __syncwarp();
        if (tile_ < args_.tiles) {
            fetch_weight(stage_);
            fetch_x(stage_, block_);
            advance();
        }
        commit_copies();
        stage_ = stage_ + 1 == S::kStages ? 0 : stage_ + 1;
    }

private:
    static constexpr int kRowsAtOnce = kWarp / kBlockChunks;

    __device__ __forceinline__ void start_tile()
    {
        const int column = Tiling<S, glu>::first_column(args_, tile_) + row_;
        weight_ = static_cast<const Element*>(args_.weight) +
                  static_cast<int64_t>(column) * args_.inner + chunk_ * kChunk;
    }

    __device__ __forceinline__ void advance()
    {
        block_ += step_;
        if (block_ < args_.blocks) return;
        block_ = warp_;
        tile_ += tile_step_;
        start_tile();
        if (tile_ >= args_.tiles) announce_dependents();
    }

    __device__ __forceinline__ void fetch_weight(int stage)
    {
        using Tiles = Tiling<S, glu>;
        const Element* const from = weight_ + block_ * kBlock;
        const Element* const up = from + static_cast<int64_t>(args_.columns) * args_.inner;
#pragma unroll
        for (int row = 0; row < S::kColumns; row += kRowsAtOnce) {
            copy_chunk(place(stage, row),
                       (Tiles::is_up(row) ? up : from) +
                           static_cast<int64_t>(Tiles::column(row)) * args_.inner);
        }
    }
    __device__ __forceinline__ void fetch_x(int stage, int block)
    {
        const Element* from = static_cast<const Element*>(args_.x) +
                              static_cast<int64_t>(row_) * args_.inner + chunk_ * kChunk +
                              block * kBlock;
#pragma unroll
        for (int row = 0; row < S::kRows; row += kRowsAtOnce) {
            if (row + row_ < args_.rows) {
                copy_chunk(place(stage, S::kColumns + row),
                           from + static_cast<int64_t>(row) * args_.inner);
            }
        }
    }
    // This lane's chunk of four rows that start at a multiple of four.
    __device__ __forceinline__ uint4* place(int stage, int row) const
    {
        return ring_ + stage * S::kStage + row * kBlockChunks +
               swizzled(row % kSwizzledRows + row_, chunk_) - row % kSwizzledRows * kBlockChunks;
    }

    const FewRowsArguments& args_;
    uint4* const ring_;
    const int warp_, step_, tile_step_;  // among the warps and the blocks of the cluster
    int tile_, block_, stage_ = 0, row_, chunk_;
    const Element* weight_;  // of this lane's first row of the tile
};

}  // namespace ds_hybrid
