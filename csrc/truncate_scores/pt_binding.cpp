// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>

#include "describe.h"
#include "truncate_scores.h"

namespace ds_hybrid {
namespace {

// Shapes and types have been checked in Python, where the CPU's reference needs the same checks.
at::Tensor truncate_scores(const at::Tensor& scores, const at::Tensor& top_k,
                           const at::Tensor& top_p_tail, const at::Tensor& min_p)
{
    TORCH_CHECK(scores.is_cuda(), "truncate_scores: scores must be on a CUDA device, got ",
                scores.device());
    TORCH_CHECK(scores.size(1) <= kMostEntries,
                "truncate_scores: at most 2**26 entries a row, got ", text(scores.size(1)));
    TORCH_CHECK(scores.size(0) <= std::numeric_limits<int>::max(),
                "truncate_scores: at most 2**31 - 1 rows, got ", text(scores.size(0)));
    for (const at::Tensor& tensor : {scores, top_k, top_p_tail, min_p}) {
        TORCH_CHECK(tensor.device() == scores.device(),
                    "truncate_scores: all arguments must be on ", scores.device(), ", got one on ",
                    tensor.device());
        TORCH_CHECK(tensor.is_contiguous(),
                    "truncate_scores: all arguments must be contiguous, got strides ",
                    text(tensor.strides()));
    }

    const c10::cuda::CUDAGuard guard(scores.device());
    const at::Tensor out = at::empty_like(scores);
    if (scores.size(0) == 0) return out;
    TruncateArguments args;
    args.scores = scores.const_data_ptr<float>();
    args.top_k = top_k.const_data_ptr<int64_t>();
    args.top_p_tail = top_p_tail.const_data_ptr<float>();
    args.min_p = min_p.const_data_ptr<float>();
    args.out = out.mutable_data_ptr<float>();
    args.rows = static_cast<int>(scores.size(0));
    args.vocab = static_cast<int>(scores.size(1));
    args.split = blocks_of_row(args.rows, args.vocab);
    launch_truncate_scores(args, c10::cuda::getCurrentCUDAStream());
    return out;
}

}  // namespace
}  // namespace ds_hybrid

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.def("truncate_scores", &ds_hybrid::truncate_scores,
          "Set to -inf what top-k, top-p and min-p drop of every row (CUDA)");
}
