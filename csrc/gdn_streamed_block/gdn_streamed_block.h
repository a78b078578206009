// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <cuda.h>

#include "../gdn_streamed/gdn_streamed.h"

namespace ds_hybrid {

constexpr int kMostTokens = 8;   // of a launch
constexpr int kMostOfStep = 16;  // of all launches of a step
constexpr int kTaken = 16;       // tokens that a state takes in at a time
constexpr int kLag = kMostTokens - 1;
constexpr int kMostBeside = kTaken + kLag - 1 + kMostOfStep;  // tokens before a launch's first one
constexpr int kMostRing = 64;                                 // places for a row's tokens, at most

// A state comes by stages of rows, and of these first the columns of the first strip. Chunks of 16
// bytes of a row of a strip are swizzled.
constexpr int kStageRows = 16, kStripColumns = 32, kStrips = kDim / kStripColumns;

// As of gdn_streamed, but for T tokens a row: T * B rows of `projected` and `out`, token by token,
// from behind those of launches `ahead` on, and rings of `places` for keys, deltas and decays. The
// window is written if the step has one token.
struct GdnStreamedBlockArguments : GdnStreamedArguments {
    CUtensorMap states;         // in boxes of a stage
    const int64_t* stepped;     // [B] tokens that the row's last step has brought
    int tokens, ahead, places;  // `ahead` tokens of the step were in launches before
};

void launch_gdn_streamed_block(const GdnStreamedBlockArguments& args, cudaStream_t stream);

}  // namespace ds_hybrid
