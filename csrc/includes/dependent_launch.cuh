// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

namespace ds_hybrid {

// Programmatic dependent launch, on Hopper and later: a kernel announces its successor, which
// starts beside it, asks for what no kernel of the same step writes (weights), and only then waits
// for its predecessor. Nothing else may be read or written before the wait.

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

// A launch that may start before the kernel ahead has ended, in clusters of blocks.
template <typename Arguments>
void launch_dependent(void (*kernel)(const Arguments), dim3 grid, unsigned threads,
                      unsigned cluster, size_t shared_bytes, const Arguments& args,
                      cudaStream_t stream)
{
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
    C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

}  // namespace ds_hybrid
