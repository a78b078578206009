// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "describe.h"

namespace ds_hybrid {

// A tensor in boxes, as the copy engine takes it: chunks of 16 bytes of a box's rows of 128 bytes
// are swizzled. Sizes, and distances in elements of all dimensions but the inner;
// `promotion` is how much the L2 cache asks the memory for at once.
template <int kDimensions>
CUtensorMap boxes_of(const char* op, const at::Tensor& tensor,
                     const cuuint64_t (&sizes)[kDimensions],
                     const cuuint64_t (&distances)[kDimensions - 1],
                     const cuuint32_t (&box)[kDimensions], CUtensorMapL2promotion promotion)
{
    static const auto encode = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result;
        C10_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                        cudaEnableDefault, &result));
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
    }();
    TORCH_CHECK(encode, op, ": the driver has no cuTensorMapEncodeTiled");
    cuuint64_t strides[kDimensions - 1];
    cuuint32_t steps[kDimensions];
    std::fill_n(steps, kDimensions, 1);
    for (int i = 0; i + 1 < kDimensions; ++i) strides[i] = distances[i] * tensor.element_size();
    const auto type = tensor.scalar_type();
    CUtensorMap map;
    const CUresult result =
        encode(&map,
               type == at::kFloat  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
               : type == at::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
               kDimensions, const_cast<void*>(tensor.const_data_ptr()), sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    TORCH_CHECK(result == CUDA_SUCCESS, op, ": no tensor map, error ",
                text(static_cast<int64_t>(result)));
    return map;
}

}  // namespace ds_hybrid
