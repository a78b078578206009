// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ds_hybrid {

constexpr int kChunk = 1024;  // vocabulary entries one warp scans; CHUNK of the reference

// One chunk of one row: its largest entry, and the sum of exp((entry - max) / temperature).
struct alignas(8) Partial {
    float max;
    float sum;
};

// Logits, float32, bfloat16 or float16. Row r starts at data + r * stride elements.
struct Matrix {
    const void* data;
    int64_t stride;
    c10::ScalarType type;
};

// The contract is that of decode_step in deepspeed_hybrid/ops/decode_step.py, argument by argument.
struct Arguments {
    Matrix scores, raw_logits;  // raw_logits.data is null where logprobs are of the scores
    const float* temperature;   // null where the scores are final
    const int64_t *seed, *request, *sample, *limit, *stop_ids;
    int64_t *token, *position, *length;
    bool* parked;
    uint8_t* finish;
    int64_t* tokens;
    float* logprobs;
    int64_t tokens_stride, logprobs_stride, columns;
    Partial* partials;  // [rows, chunks] of the scores, then as many of raw_logits if given
    int rows, vocab, chunks, stops;
};

void launch_decode_step(const Arguments& args, bool sampled, cudaStream_t stream);

}  // namespace ds_hybrid
