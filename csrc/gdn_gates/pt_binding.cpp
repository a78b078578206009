// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>
#include <optional>
#include <tuple>

#include "describe.h"
#include "gdn_gates.h"

namespace ds_hybrid {
namespace {

void check_device(const at::Tensor& tensor, const char* name, const at::Tensor& b)
{
    TORCH_CHECK(tensor.device() == b.device(), "gdn_gates: ", name, " is on ", tensor.device(),
                ", b is on ", b.device());
}

Projection check_projection(const at::Tensor& tensor, const char* name, const at::Tensor& b)
{
    const auto type = tensor.scalar_type();
    check_device(tensor, name, b);
    TORCH_CHECK(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
                "gdn_gates: ", name, " must be float32, bfloat16 or float16, got ", type);
    TORCH_CHECK(tensor.dim() == 3 && tensor.sizes() == b.sizes(), "gdn_gates: ", name,
                " must be [batch, tokens, heads] as b is, got ", text(tensor.sizes()));
    TORCH_CHECK(tensor.stride(2) == 1 || tensor.size(2) <= 1, "gdn_gates: the heads of ", name,
                " must be adjacent, got strides ", text(tensor.strides()));
    return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), type};
}

// The tensor itself, or a float32 copy where it is float64.
at::Tensor check_per_head(const at::Tensor& tensor, const char* name, const at::Tensor& b)
{
    const auto type = tensor.scalar_type();
    check_device(tensor, name, b);
    TORCH_CHECK(
        type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble,
        "gdn_gates: ", name, " must be float64, float32, bfloat16 or float16, got ", type);
    TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == b.size(2) && tensor.is_contiguous(),
                "gdn_gates: ", name, " must be contiguous with one value a head (", text(b.size(2)),
                "), got ", text(tensor.sizes()), " with strides ", text(tensor.strides()));
    return type == at::kDouble ? tensor.to(at::kFloat) : tensor;
}

std::tuple<at::Tensor, at::Tensor> gdn_gates(const at::Tensor& b, const at::Tensor& a,
                                             const at::Tensor& A_log, const at::Tensor& dt_bias,
                                             const std::optional<at::Tensor>& parked)
{
    TORCH_CHECK(b.is_cuda(), "gdn_gates: b must be on a CUDA device, got ", b.device());
    const c10::cuda::CUDAGuard guard(b.device());
    GateArguments args{};
    args.b = check_projection(b, "b", b);
    args.a = check_projection(a, "a", b);
    const at::Tensor rate = check_per_head(A_log, "A_log", b);
    const at::Tensor bias = check_per_head(dt_bias, "dt_bias", b);
    args.A_log = {rate.const_data_ptr(), rate.scalar_type()};
    args.dt_bias = {bias.const_data_ptr(), bias.scalar_type()};
    if (parked) {
        check_device(*parked, "parked", b);
        TORCH_CHECK(parked->scalar_type() == at::kBool, "gdn_gates: parked must be Bool, got ",
                    parked->scalar_type());
        TORCH_CHECK(parked->dim() == 1 && parked->size(0) == b.size(0) && parked->is_contiguous(),
                    "gdn_gates: parked must be contiguous with one value a row (", text(b.size(0)),
                    "), got ", text(parked->sizes()), " with strides ", text(parked->strides()));
        args.parked = parked->const_data_ptr<bool>();
    }
    TORCH_CHECK(b.numel() <= std::numeric_limits<int>::max(),
                "gdn_gates: at most 2**31 - 1 gates, got ", text(b.sizes()));

    const auto options = b.options().dtype(at::kFloat);
    const at::Tensor beta = at::empty(b.sizes(), options), g = at::empty(b.sizes(), options);
    if (b.numel() == 0) return {beta, g};
    args.beta = beta.mutable_data_ptr<float>();
    args.g = g.mutable_data_ptr<float>();
    args.size = static_cast<uint32_t>(b.numel());
    args.tokens = static_cast<uint32_t>(b.size(1));
    args.heads = static_cast<uint32_t>(b.size(2));

    launch_gdn_gates(args, c10::cuda::getCurrentCUDAStream());
    return {beta, g};
}

}  // namespace
}  // namespace ds_hybrid

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.def("gdn_gates", &ds_hybrid::gdn_gates, "beta and log-decay g of a GatedDeltaNet (CUDA)");
}
