// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/core/ScalarType.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ds_hybrid {

constexpr int kMostRows = 64;   // of x: one product on the tensor cores
constexpr int kInnerStep = 64;  // the inner dimension is a multiple of it
constexpr int kGroup = 8;       // columns of which gates and ups take turns in a tile
constexpr int kSharing = 2;     // blocks of a cluster that read x together
constexpr int kSplit = 4;       // blocks of a cluster that share a tile's inner dimension
constexpr int kTileSizes[] = {64, 80, 96, 128, 144, 160};  // rows of the weight
constexpr int kSmallTile = 80;                             // of them

// x is [rows, inner] and weight [columns, inner], with glu [2 * columns, inner]; the maps are of
// them, in boxes of a stage. out is [rows, columns]. All of one type: bfloat16 or float16.
struct WarpgroupArguments {
    CUtensorMap x, weight;
    const float* squares;  // [parts, rows] or null
    const void* bias;      // [columns] or null
    const void* residual;  // [rows, columns] or null; with it all of the next four
    const void* next_norm;
    void *scaled, *out;
    float* next_squares;  // [tiles, rows]
    float eps, next_offset;
    int rows, columns, inner, parts;
    int blocks;      // of kInnerStep
    int tiles;       // of columns
    int tile;        // rows of the weight in one: of kTileSizes
    int box;         // rows of x in a box
    int processors;  // of the card
    bool glu;
    c10::ScalarType type;
};

void launch_warpgroup_linear(const WarpgroupArguments& args, cudaStream_t stream);

}  // namespace ds_hybrid
