// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>

#include "describe.h"
#include "fused_silu_mul_halves.h"

namespace ds_hybrid {
namespace {

at::Tensor fused_silu_mul_halves(const at::Tensor& gate_up)
{
    const auto type = gate_up.scalar_type();
    TORCH_CHECK(gate_up.is_cuda(), "fused_silu_mul_halves: gate_up must be on a CUDA device, got ",
                gate_up.device());
    TORCH_CHECK(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
                "fused_silu_mul_halves: gate_up must be float32, bfloat16 or float16, got ", type);
    TORCH_CHECK(gate_up.dim() > 0 && gate_up.size(-1) % 2 == 0,
                "fused_silu_mul_halves: the last dimension of gate_up must be two halves, got ",
                text(gate_up.sizes()));
    TORCH_CHECK(gate_up.stride(-1) == 1 || gate_up.numel() == 0,
                "fused_silu_mul_halves: the last dimension of gate_up must be contiguous, got "
                "strides ",
                text(gate_up.strides()));

    const c10::cuda::CUDAGuard guard(gate_up.device());
    const int64_t width = gate_up.size(-1), half = width / 2;
    auto out_sizes = gate_up.sizes().vec();
    out_sizes.back() = half;
    const at::Tensor out = at::empty(out_sizes, gate_up.options());
    if (out.numel() == 0) return out;

    // A view wherever the rows are evenly spaced, a copy elsewhere.
    const int64_t rows = gate_up.numel() / width;
    TORCH_CHECK(rows <= std::numeric_limits<int>::max(),
                "fused_silu_mul_halves: at most 2**31 - 1 rows, got ", text(rows));
    const at::Tensor flat = gate_up.reshape({rows, width});
    launch_fused_silu_mul_halves(
        {flat.const_data_ptr(), out.mutable_data_ptr(), rows, half, flat.stride(0), type},
        c10::cuda::getCurrentCUDAStream());
    return out;
}

}  // namespace
}  // namespace ds_hybrid

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.def("fused_silu_mul_halves", &ds_hybrid::fused_silu_mul_halves,
          "silu(first half) * second half of every row (CUDA)");
}
