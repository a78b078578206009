// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime.h>

#include <type_traits>

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

// Does the current device launch dependents ahead?
inline bool launches_dependents()
{
    int device = 0, major = 0;
    C10_CUDA_CHECK(cudaGetDevice(&device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major >= 9;
}

// A launch that may start before the kernel ahead has ended, in clusters of blocks. On a device
// before Hopper it starts afterwards, and `cluster` has to be 1.
template <typename... Parameters>
void launch_dependent(void (*kernel)(Parameters...), dim3 grid, unsigned threads, unsigned cluster,
                      size_t shared_bytes, cudaStream_t stream,
                      const std::remove_const_t<Parameters>&... arguments)
{
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (launches_dependents()) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count].val.clusterDim.x = cluster;
        attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
        ++count;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace ds_hybrid
