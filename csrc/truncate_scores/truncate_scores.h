// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ds_hybrid {

constexpr int kMostEntries = 1 << 26;  // of a row, so that its mass fits 64 bits

// The contract is that of truncate_scores in deepspeed_hybrid/ops/truncate_scores.py. Scores and
// out are packed [rows, vocab], the rest one value a row.
struct TruncateArguments {
    const float* scores;
    const int64_t* top_k;
    const float *top_p_tail, *min_p;
    float* out;
    int rows, vocab;
    int split;  // blocks that share a row: a cluster
};

// How many blocks are to share a row on the current device.
int blocks_of_row(int rows, int vocab);

void launch_truncate_scores(const TruncateArguments& args, cudaStream_t stream);

}  // namespace ds_hybrid
