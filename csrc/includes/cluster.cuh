// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

namespace ds_hybrid {

// Blocks of a cluster, on Hopper and later; `split` says how many there are, and may be 1 anywhere.

// The same place in the shared memory of another block of the cluster.
template <typename T>
__device__ __forceinline__ T* of_block(T* shared, int split, int rank)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (split > 1) return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
#endif
    return shared;
}

__device__ __forceinline__ void synchronise(int split)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (split > 1) return cooperative_groups::this_cluster().sync();
#endif
    __syncthreads();
}

}  // namespace ds_hybrid
