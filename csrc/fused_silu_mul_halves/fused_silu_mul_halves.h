// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ds_hybrid {

// Row r of gate_up starts at gate_up + r * row_stride elements and holds 2 * half of them; out is
// packed. All of one type: float32, bfloat16 or float16.
struct SiluMulArguments {
    const void* gate_up;
    void* out;
    int64_t rows, half, row_stride;
    c10::ScalarType type;
};

void launch_fused_silu_mul_halves(const SiluMulArguments& args, cudaStream_t stream);

}  // namespace ds_hybrid
