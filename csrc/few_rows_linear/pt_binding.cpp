// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>

#include "describe.h"
#include "few_rows_linear.h"

namespace ds_hybrid {
namespace {

int64_t tiles_of(int64_t columns, int64_t tile) { return (columns + tile - 1) / tile; }

// Blocks of threads that share a tile where there are so many: as many as there are idle
// processors.
int split_of(int64_t tiles, int processors)
{
    int split = 1;
    while (2 * split <= kMostSplit && 2 * split * tiles <= processors) split *= 2;
    return split;
}

// Four times the rows of the weight that the busiest processor streams.
int64_t longest_share(int64_t columns, int64_t tile, int processors)
{
    const int64_t tiles = tiles_of(columns, tile), split = split_of(tiles, processors);
    return tiles_of(tiles, processors / split) * tile * kMostSplit / split;
}

// Shapes and types have been checked in Python, where the CPU's reference needs the same checks.
// What is left is what only this kernel asks for.
std::tuple<at::Tensor, at::Tensor, at::Tensor> few_rows_linear(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& squares,
    double eps, const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& residual,
    const std::optional<at::Tensor>& next_norm, double next_offset, bool glu)
{
    TORCH_CHECK(x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf,
                "few_rows_linear: x must be bfloat16 or float16, got ", x.scalar_type());
    TORCH_CHECK(x.size(0) >= 1 && x.size(0) <= kMostRows,
                "few_rows_linear: x must have 1 to 16 rows, got ", text(x.size(0)));
    TORCH_CHECK(x.size(1) % kInnerStep == 0,
                "few_rows_linear: the columns of x must be a multiple of 64, got ",
                text(x.size(1)));
    const int64_t rows = x.size(0), columns = weight.size(0) / (glu ? 2 : 1);
    const bool added = residual.has_value();
    int processors = 0;
    C10_CUDA_CHECK(
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, x.get_device()));
    const int64_t halves = glu ? 2 : 1;
    const int64_t narrow_tile = kNarrowColumns / halves, wide_tile = kWideColumns / halves;
    const bool narrow = added || longest_share(columns, narrow_tile, processors) <
                                     longest_share(columns, wide_tile, processors);
    const int64_t tile = narrow ? narrow_tile : wide_tile, tiles = tiles_of(columns, tile);
    TORCH_CHECK(columns >= tile, "few_rows_linear: the weight must have at least ", text(tile),
                " columns, got ", text(columns));
    for (const at::Tensor& tensor : {x, weight}) {
        TORCH_CHECK(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0,
                    "few_rows_linear: x and weight must start on 16-byte boundaries");
    }

    const c10::cuda::CUDAGuard guard(x.device());
    const at::Tensor out = at::empty({rows, columns}, x.options());
    const at::Tensor scaled = at::empty({added ? rows : 0, columns}, x.options());
    const at::Tensor next_squares =
        at::empty({added ? tiles : 0, rows}, x.options().dtype(at::kFloat));

    const auto place = [](const std::optional<at::Tensor>& tensor) {
        return tensor ? tensor->const_data_ptr() : nullptr;
    };
    FewRowsArguments args = {};
    args.x = x.const_data_ptr();
    args.weight = weight.const_data_ptr();
    args.squares = static_cast<const float*>(place(squares));
    args.bias = place(bias);
    args.residual = place(residual);
    args.next_norm = place(next_norm);
    args.scaled = scaled.mutable_data_ptr();
    args.out = out.mutable_data_ptr();
    args.next_squares = static_cast<float*>(next_squares.mutable_data_ptr());
    args.eps = static_cast<float>(eps);
    args.next_offset = static_cast<float>(next_offset);
    args.rows = static_cast<int>(rows);
    args.columns = static_cast<int>(columns);
    args.inner = static_cast<int>(x.size(1));
    args.parts = squares ? static_cast<int>(squares->size(0)) : 0;
    args.glu = glu;
    args.blocks = args.inner / kInnerStep;
    args.tiles = static_cast<int>(tiles);
    args.narrow = narrow;
    args.processors = processors;
    args.split = split_of(tiles, processors);
    while (1 << args.shift < args.split) ++args.shift;
    args.type = x.scalar_type();
    launch_few_rows_linear(args, c10::cuda::getCurrentCUDAStream());
    return {out, scaled, next_squares};
}

}  // namespace
}  // namespace ds_hybrid

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.def("few_rows_linear", &ds_hybrid::few_rows_linear,
          "product of up to 16 rows with what lies around it (CUDA)");
}
