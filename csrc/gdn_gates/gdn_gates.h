// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ds_hybrid {

// Every input is float32, bfloat16 or float16. A projection is [B, T, HV] with adjacent heads.
struct Projection {
    const void* data;
    int64_t batch_stride, token_stride;
    c10::ScalarType type;
};

// One value a head.
struct PerHead {
    const void* data;
    c10::ScalarType type;
};

struct GateArguments {
    Projection b, a;
    PerHead A_log, dt_bias;
    const bool* parked;  // [B], or null where no row is
    float *beta, *g;     // [B, T, HV], packed
    uint32_t size, tokens, heads;
};

void launch_gdn_gates(const GateArguments& args, cudaStream_t stream);

}  // namespace ds_hybrid
