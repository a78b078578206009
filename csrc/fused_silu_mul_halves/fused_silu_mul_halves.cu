// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

// A block takes one stretch of one row. A thread reads 16 bytes of each half and writes 16 bytes;
// where a row or a half starts off a 16-byte boundary, one element of each.

#include <c10/cuda/CUDAException.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "activations.cuh"
#include "dependent_launch.cuh"
#include "fused_silu_mul_halves.h"

namespace ds_hybrid {
namespace {

constexpr int kThreads = 128;
constexpr int kBytes = 16;
constexpr int64_t kMaxGridY = 65535;

template <typename Element, int N>
struct alignas(sizeof(Element) * N) Pack {
    Element values[N];
};

// Sixteen bytes in one instruction, which a plain assignment does not become.
template <typename Element, int N>
__device__ __forceinline__ void store(Element* to, const Pack<Element, N>& pack)
{
    if constexpr (sizeof(pack) == sizeof(uint4)) {
        __stcg(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(&pack));
    } else {
        *reinterpret_cast<Pack<Element, N>*>(to) = pack;
    }
}

template <typename Element, int N>
__global__ void __launch_bounds__(kThreads) silu_mul(const SiluMulArguments args)
{
    announce_dependents();
    wait_for_predecessor();
    using Packed = Pack<Element, N>;
    const int64_t row = blockIdx.x;
    const Element* gate = static_cast<const Element*>(args.gate_up) + row * args.row_stride;
    const Element* up = gate + args.half;
    Element* out = static_cast<Element*>(args.out) + row * args.half;

    const int64_t first = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * N;
    const int64_t step = static_cast<int64_t>(gridDim.y) * kThreads * N;
    for (int64_t i = first; i < args.half; i += step) {
        const Packed gates = *reinterpret_cast<const Packed*>(gate + i);
        const Packed ups = *reinterpret_cast<const Packed*>(up + i);
        Packed products;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const Element opened = static_cast<Element>(silu(static_cast<float>(gates.values[k])));
            products.values[k] = static_cast<Element>(static_cast<float>(opened) *
                                                      static_cast<float>(ups.values[k]));
        }
        store(out + i, products);
    }
}

template <typename Element, int N>
void launch(const SiluMulArguments& args, cudaStream_t stream)
{
    constexpr int64_t kPerBlock = kThreads * N;
    const int64_t blocks = std::min((args.half + kPerBlock - 1) / kPerBlock, kMaxGridY);
    const dim3 grid(static_cast<unsigned>(args.rows), static_cast<unsigned>(blocks));
    launch_dependent(silu_mul<Element, N>, grid, kThreads, 1, 0, stream, args);
}

template <typename Element>
void launch(const SiluMulArguments& args, cudaStream_t stream)
{
    constexpr int64_t kSize = sizeof(Element);
    const auto offsets =
        reinterpret_cast<uintptr_t>(args.gate_up) | reinterpret_cast<uintptr_t>(args.out) |
        static_cast<uintptr_t>(args.row_stride * kSize) | static_cast<uintptr_t>(args.half * kSize);
    if (offsets % kBytes == 0) {
        launch<Element, kBytes / kSize>(args, stream);
    } else {
        launch<Element, 1>(args, stream);
    }
}

}  // namespace

void launch_fused_silu_mul_halves(const SiluMulArguments& args, cudaStream_t stream)
{
    switch (args.type) {
        case c10::ScalarType::Float:
            launch<float>(args, stream);
            break;
        case c10::ScalarType::BFloat16:
            launch<c10::BFloat16>(args, stream);
            break;
        default:
            launch<c10::Half>(args, stream);
            break;
    }
}

}  // namespace ds_hybrid
