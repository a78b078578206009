// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

namespace ds_hybrid {

// Programmatic dependent launch: a kernel announces its successor at once, asks for what no kernel
// of the same step writes (weights), and only then waits for its predecessor. Nothing else may be
// read or written before the wait. On cards before Hopper both are nothing.

__device__ __forceinline__ void announce_dependents()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_predecessor()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <typename Arguments>
void launch_dependent(void (*kernel)(const Arguments), dim3 grid, unsigned threads,
                      const Arguments& args, bool dependent, cudaStream_t stream)
{
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = dependent ? 1 : 0;
    C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

}  // namespace ds_hybrid
