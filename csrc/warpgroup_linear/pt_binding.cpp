// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "describe.h"
#include "tensor_map.h"
#include "warpgroup_linear.h"

namespace ds_hybrid {
namespace {

int64_t whole(int64_t count, int64_t of) { return (count + of - 1) / of; }

// A matrix in boxes; its rows follow each other.
template <int kDimensions>
CUtensorMap map_of(const at::Tensor& matrix, const cuuint64_t (&sizes)[kDimensions],
                   const cuuint64_t (&rows)[kDimensions - 1], const cuuint32_t (&box)[kDimensions])
{
    cuuint64_t distances[kDimensions - 1];
    for (int i = 0; i + 1 < kDimensions; ++i) distances[i] = rows[i] * sizes[0];
    return boxes_of("warpgroup_linear", matrix, sizes, distances, box,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

// The size of tiles with which the busiest multiprocessor streams least; of equals the largest.
// Where x is small, gates and ups come faster in small tiles, of which more are under way, unless
// that makes an eighth more to stream.
int64_t tile_of(int64_t rows, int64_t columns, bool glu, bool shared, int processors)
{
    const auto share_of = [&](int64_t tile) {
        const int64_t blocks = whole(columns, glu ? tile / 2 : tile) * (shared ? kSplit : 1);
        return whole(blocks, processors / kSharing * kSharing) * tile;
    };
    int64_t best = 0;
    for (const int64_t tile : kTileSizes) {
        if (columns < (glu ? tile / 2 : tile)) continue;
        if (!best || share_of(tile) <= share_of(best)) best = tile;
    }
    const bool small = glu && rows <= kMostRows / 2 && best > kSmallTile;
    return small && 8 * share_of(kSmallTile) <= 9 * share_of(best) ? kSmallTile : best;
}

// Shapes and types have been checked in Python, where the CPU's reference needs the same checks.
// What is left is what only this kernel asks for.
std::tuple<at::Tensor, at::Tensor, at::Tensor> warpgroup_linear(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& squares,
    double eps, const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& residual,
    const std::optional<at::Tensor>& next_norm, double next_offset, bool glu)
{
    TORCH_CHECK(x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf,
                "warpgroup_linear: x must be bfloat16 or float16, got ", x.scalar_type());
    TORCH_CHECK(x.size(0) >= 1 && x.size(0) <= kMostRows,
                "warpgroup_linear: x must have 1 to 64 rows, got ", text(x.size(0)));
    const int64_t rows = x.size(0), inner = x.size(1), columns = weight.size(0) / (glu ? 2 : 1);
    TORCH_CHECK(inner % kInnerStep == 0 && inner >= kSplit * kInnerStep,
                "warpgroup_linear: the columns of x must be a multiple of 64 from 256 on, got ",
                text(inner));
    TORCH_CHECK(columns % kGroup == 0,
                "warpgroup_linear: the weight's columns must be a multiple of 8, got ",
                text(columns));
    for (const at::Tensor& tensor : {x, weight}) {
        TORCH_CHECK(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0,
                    "warpgroup_linear: x and weight must start on 16-byte boundaries");
    }
    const bool added = residual.has_value();
    TORCH_CHECK(added == next_norm.has_value() && !(added && (squares || glu)) && !(glu && bias),
                "warpgroup_linear: a residual goes with a norm behind it, and with neither a norm "
                "before it nor glu; glu takes no bias");
    int processors = 0;
    C10_CUDA_CHECK(
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, x.get_device()));
    const int64_t tile = tile_of(rows, columns, glu, added, processors);
    TORCH_CHECK(tile, "warpgroup_linear: the weight must have more columns, got ", text(columns));
    const int64_t out_columns = glu ? tile / 2 : tile, tiles = whole(columns, out_columns);

    const c10::cuda::CUDAGuard guard(x.device());
    const at::Tensor out = at::empty({rows, columns}, x.options());
    const at::Tensor scaled = at::empty({added ? rows : 0, columns}, x.options());
    const at::Tensor next_squares =
        at::empty({added ? tiles : 0, rows}, x.options().dtype(at::kFloat));

    const auto place = [](const std::optional<at::Tensor>& tensor) {
        return tensor ? tensor->const_data_ptr() : nullptr;
    };
    const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
    const auto part = [](int64_t value) { return static_cast<cuuint32_t>(value); };
    const int64_t readers = added ? 1 : kSharing;
    WarpgroupArguments args = {};
    args.box = static_cast<int>(whole(rows, kGroup * readers) * kGroup);
    args.x = map_of<2>(x, {size(inner), size(rows)}, {1}, {kInnerStep, part(args.box)});
    args.weight =
        glu ? map_of<4>(weight, {size(inner), kGroup, 2, size(columns / kGroup)},
                        {1, size(columns), kGroup}, {kInnerStep, kGroup, 2, part(tile / 16)})
            : map_of<2>(weight, {size(inner), size(columns)}, {1}, {kInnerStep, part(tile)});
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
    args.inner = static_cast<int>(inner);
    args.parts = squares ? static_cast<int>(squares->size(0)) : 0;
    args.glu = glu;
    args.blocks = args.inner / kInnerStep;
    args.tiles = static_cast<int>(tiles);
    args.tile = static_cast<int>(tile);
    args.processors = processors;
    args.type = x.scalar_type();
    launch_warpgroup_linear(args, c10::cuda::getCurrentCUDAStream());
    return {out, scaled, next_squares};
}

}  // namespace
}  // namespace ds_hybrid

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.def("warpgroup_linear", &ds_hybrid::warpgroup_linear,
          "product of 17 to 64 rows with what lies around it (CUDA)");
}
