// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "attention_streamed.h"
#include "tensor_map.h"

namespace ds_hybrid {
namespace {

constexpr double kLog2E = 1.4426950408889634;
constexpr int64_t kBoxWidth = 64;  // elements

Table table_of(const std::optional<at::Tensor>& tensor, const char* name, at::ScalarType type)
{
    if (!tensor) return {nullptr, false};
    const auto own = tensor->scalar_type();
    TORCH_CHECK(own == at::kFloat || own == type, "attention_streamed: ", name,
                " must be float32 or as projected, got ", own);
    return {tensor->const_data_ptr(), own == at::kFloat};
}

CUtensorMap tiles_of(const at::Tensor& cache)
{
    const auto dim = static_cast<cuuint64_t>(cache.size(3));
    const auto tokens = static_cast<cuuint64_t>(cache.numel() / cache.size(3));
    const auto blocks = static_cast<cuuint32_t>(dim / kBoxWidth);
    return boxes_of<3>("attention_streamed", cache, {kBoxWidth, tokens, blocks}, {dim, kBoxWidth},
                       {kBoxWidth, kTile, blocks}, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

// Shapes have been checked in Python, where the CPU's reference needs the same checks. What is left
// is what only this kernel asks for.
at::Tensor attention_streamed(const at::Tensor& projected, const at::Tensor& cos,
                              const at::Tensor& sin, const at::Tensor& keys,
                              const at::Tensor& values, const at::Tensor& position,
                              const at::Tensor& parked, const std::optional<at::Tensor>& q_norm,
                              const std::optional<at::Tensor>& k_norm, double norm_offset,
                              double eps, int64_t query_heads, bool gated, double scaling,
                              int64_t splits, int64_t warps)
{
    const auto type = projected.scalar_type();
    TORCH_CHECK(type == at::kBFloat16 || type == at::kHalf,
                "attention_streamed: projected must be bfloat16 or float16, got ", type);
    const int64_t rows = projected.size(0), kv_heads = keys.size(1), dim = keys.size(3);
    TORCH_CHECK(dim == 128 || dim == 256,
                "attention_streamed: heads must have 128 or 256 dimensions, got ", text(dim));
    const int64_t group = query_heads / kv_heads;
    TORCH_CHECK(group <= kMostGroup,
                "attention_streamed: at most 8 query heads may share a key head, got ",
                text(group));
    TORCH_CHECK(splits >= 1 && splits <= kMostSplits,
                "attention_streamed: splits must be 1 to 64, got ", text(splits));
    TORCH_CHECK(warps == kMostWarps || warps == kMostWarps / 2,
                "attention_streamed: blocks must have 4 or 8 warps, got ", text(warps));
    for (const at::Tensor& cache : {keys, values}) {
        TORCH_CHECK(reinterpret_cast<uintptr_t>(cache.const_data_ptr()) % 16 == 0,
                    "attention_streamed: keys and values must start on 16-byte boundaries");
    }

    const c10::cuda::CUDAGuard guard(projected.device());
    const at::Tensor out = at::empty({rows, query_heads * dim}, projected.options());
    if (!rows) return out;
    const auto wide = projected.options().dtype(at::kFloat);
    const int64_t parts = splits == 1 ? 0 : rows * query_heads * splits;
    const at::Tensor partial = at::empty({parts, dim}, wide), marks = at::empty({parts, 2}, wide);
    AttentionArguments args = {};
    args.keys_map = tiles_of(keys);
    args.values_map = tiles_of(values);
    args.projected = projected.const_data_ptr();
    args.cos = table_of(cos, "cos", type);
    args.sin = table_of(sin, "sin", type);
    args.q_norm = table_of(q_norm, "q_norm", type);
    args.k_norm = table_of(k_norm, "k_norm", type);
    args.position = position.const_data_ptr<int64_t>();
    args.parked = parked.const_data_ptr<bool>();
    args.keys = keys.mutable_data_ptr();
    args.values = values.mutable_data_ptr();
    args.out = out.mutable_data_ptr();
    args.partial = partial.mutable_data_ptr<float>();
    args.marks = reinterpret_cast<float2*>(marks.mutable_data_ptr<float>());
    args.stride = projected.stride(0);
    args.cos_stride = cos.stride(0);
    args.sin_stride = sin.stride(0);
    args.capacity = keys.size(2);
    args.norm_offset = static_cast<float>(norm_offset);
    args.eps = static_cast<float>(eps);
    args.scale = static_cast<float>(scaling * kLog2E);
    args.rows = static_cast<int>(rows);
    args.kv_heads = static_cast<int>(kv_heads);
    args.group = static_cast<int>(group);
    args.rotary = static_cast<int>(cos.size(1));
    args.splits = static_cast<int>(splits);
    args.dim = static_cast<int>(dim);
    args.warps = static_cast<int>(warps);
    args.gated = gated;
    args.type = type;
    launch_attention_streamed(args, c10::cuda::getCurrentCUDAStream());
    return out;
}

}  // namespace
}  // namespace ds_hybrid

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.def("attention_streamed", &ds_hybrid::attention_streamed,
          "attention of one new token of every row (CUDA)");
}
