// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "describe.h"
#include "gdn_streamed_block.h"
#include "tensor_map.h"

namespace ds_hybrid {
namespace {

PerHead per_head(const at::Tensor& tensor, const char* name, const at::Tensor& projected)
{
    const auto type = tensor.scalar_type();
    TORCH_CHECK(type == at::kFloat || type == projected.scalar_type(), "gdn_streamed_block: ", name,
                " must be float32 or as projected, got ", type);
    return {tensor.const_data_ptr(), type == at::kFloat};
}

// Shapes have been checked in Python, where the CPU's reference needs the same checks. What is left
// is what only this kernel asks for.
at::Tensor gdn_streamed_block(const at::Tensor& projected, const at::Tensor& window,
                              const at::Tensor& conv_weight, const at::Tensor& A_log,
                              const at::Tensor& dt_bias, const at::Tensor& state,
                              const at::Tensor& keys, const at::Tensor& deltas,
                              const at::Tensor& decays, const at::Tensor& norm_weight, double eps,
                              const at::Tensor& position, const at::Tensor& answered,
                              const at::Tensor& stepped, const at::Tensor& counts,
                              int64_t key_heads)
{
    const auto type = projected.scalar_type();
    TORCH_CHECK(type == at::kBFloat16, "gdn_streamed_block: projected must be bfloat16, got ",
                type);
    for (const at::Tensor& tensor : {window, conv_weight, keys}) {
        TORCH_CHECK(tensor.scalar_type() == type,
                    "gdn_streamed_block: window, conv_weight and keys must be as projected, got ",
                    tensor.scalar_type());
    }
    TORCH_CHECK(state.scalar_type() == at::kFloat,
                "gdn_streamed_block: state must be float32, got ", state.scalar_type());
    TORCH_CHECK(state.size(2) == kDim && state.size(3) == kDim,
                "gdn_streamed_block: heads must have 128 dimensions, got ", text(state.sizes()));
    TORCH_CHECK(window.size(2) == kTaps, "gdn_streamed_block: the conv must have 4 taps, got ",
                text(window.size(2)));
    const auto starts_at = [](const at::Tensor& tensor, uintptr_t boundary) {
        return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % boundary == 0;
    };
    for (const at::Tensor& tensor : {projected, window, conv_weight, state, keys, deltas, decays}) {
        TORCH_CHECK(starts_at(tensor, 16),
                    "gdn_streamed_block: what it copies must start on 16-byte boundaries");
    }
    TORCH_CHECK(projected.stride(0) % 8 == 0,
                "gdn_streamed_block: rows of projected must be a multiple of 8 apart, got ",
                text(projected.stride(0)));
    const int64_t rows = counts.size(0), heads = state.size(1);
    const int64_t tokens = rows ? projected.size(0) / rows : 0, places = decays.size(2);
    TORCH_CHECK(tokens <= kMostOfStep, "gdn_streamed_block: at most 16 tokens a row, got ",
                text(tokens));
    TORCH_CHECK(places % 4 == 0 && places <= kMostRing,
                "gdn_streamed_block: rings must have a multiple of 4 places, 64 at most, got ",
                text(places));

    const c10::cuda::CUDAGuard guard(projected.device());
    const at::Tensor out = at::empty({projected.size(0), heads * kDim}, projected.options());
    if (!rows) return out;
    GdnStreamedBlockArguments args = {};
    args.conv_weight = conv_weight.const_data_ptr();
    args.A_log = per_head(A_log, "A_log", projected);
    args.dt_bias = per_head(dt_bias, "dt_bias", projected);
    args.norm_weight = per_head(norm_weight, "norm_weight", projected);
    args.position = position.const_data_ptr<int64_t>();
    args.answered = answered.const_data_ptr<int64_t>();
    args.stepped = stepped.const_data_ptr<int64_t>();
    args.counts = counts.const_data_ptr<int64_t>();
    args.window = window.mutable_data_ptr();
    args.state = state.mutable_data_ptr<float>();
    args.states =
        boxes_of<3>("gdn_streamed_block", state,
                    {kStripColumns, static_cast<cuuint64_t>(state.size(0) * heads * kDim), kStrips},
                    {kDim, kStripColumns}, {kStripColumns, kStageRows, kStrips},
                    CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
    args.keys = keys.mutable_data_ptr();
    args.deltas = deltas.mutable_data_ptr<float>();
    args.decays = decays.mutable_data_ptr<float>();
    args.stride = projected.stride(0);
    args.eps = static_cast<float>(eps);
    args.rows = static_cast<int>(rows);
    args.key_heads = static_cast<int>(key_heads);
    args.value_heads = static_cast<int>(heads);
    args.channels = static_cast<int>(window.size(1));
    args.places = static_cast<int>(places);
    args.type = type;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&args.processors, cudaDevAttrMultiProcessorCount,
                                          projected.get_device()));
    // Behind one another, for what a launch has kept is what the next one finds.
    for (int64_t ahead = 0; ahead < tokens; ahead += kMostTokens) {
        args.ahead = static_cast<int>(ahead);
        args.tokens = static_cast<int>(std::min<int64_t>(tokens - ahead, kMostTokens));
        args.projected = static_cast<const uint16_t*>(projected.const_data_ptr()) +
                         ahead * rows * projected.stride(0);
        args.out = static_cast<uint16_t*>(out.mutable_data_ptr()) + ahead * rows * heads * kDim;
        launch_gdn_streamed_block(args, c10::cuda::getCurrentCUDAStream());
    }
    return out;
}

}  // namespace
}  // namespace ds_hybrid

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.def("gdn_streamed_block", &ds_hybrid::gdn_streamed_block,
          "tokens of every row through a GatedDeltaNet layer, of which some will stay (CUDA)");
}
