// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ds_hybrid {

constexpr int kMostRows = 16;
constexpr int kInnerStep = 64;    // the inner dimension is a multiple of it
constexpr int kWideColumns = 48;  // rows of the weight that a block of threads takes at a time
constexpr int kMostSplit = 4;     // blocks of threads that share a tile
constexpr int kNarrowColumns =
    40;  // the same where that, or a residual behind it, suits the weight

// x is [rows, inner] and weight [columns, inner], with glu [2 * columns, inner], both packed and on
// 16-byte boundaries; out is [rows, columns]. All of one type: bfloat16 or float16.
struct FewRowsArguments {
    const void *x, *weight;
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
    int split;       // blocks of threads that share a tile: a cluster
    int shift;       // its logarithm to base 2
    int processors;  // of the card
    bool glu;
    bool narrow;  // tiles of kNarrowColumns; always with a residual
    c10::ScalarType type;
};

void launch_few_rows_linear(const FewRowsArguments& args, cudaStream_t stream);

}  // namespace ds_hybrid
