// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

// One thread a gate. A decode step has a few thousand of them, so that the launch is what it costs;
// the types are looked at while running, which keeps this one kernel.

#include <c10/cuda/CUDAException.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "activations.cuh"
#include "gdn_gates.h"

namespace ds_hybrid {
namespace {

constexpr uint32_t kThreads = 128;

// What a tensor holds at an index, and what that is as a float: apart, so that a thread's loads are
// all under way before it looks at the first.
__device__ __forceinline__ uint32_t bits_at(const void* data, c10::ScalarType type, int64_t index)
{
    if (type == c10::ScalarType::Float) return static_cast<const uint32_t*>(data)[index];
    return static_cast<const uint16_t*>(data)[index];
}

__device__ __forceinline__ uint32_t bits_at(const Projection& projection, int64_t row,
                                            int64_t token, uint32_t head)
{
    return bits_at(projection.data, projection.type,
                   row * projection.batch_stride + token * projection.token_stride + head);
}

__device__ __forceinline__ float value_of(uint32_t bits, c10::ScalarType type)
{
    if (type == c10::ScalarType::Float) return __uint_as_float(bits);
    if (type == c10::ScalarType::BFloat16) return __uint_as_float(bits << 16);
    return static_cast<float>(c10::Half(static_cast<uint16_t>(bits), c10::Half::from_bits()));
}

// What that type holds of a value.
__device__ __forceinline__ float rounded(float value, c10::ScalarType type)
{
    if (type == c10::ScalarType::Float) return value;
    if (type == c10::ScalarType::BFloat16) return static_cast<c10::BFloat16>(value);
    return static_cast<c10::Half>(value);
}

__global__ void __launch_bounds__(kThreads) gates(const GateArguments args)
{
    const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
    if (index >= args.size) return;
    const uint32_t head = index % args.heads, position = index / args.heads;
    const uint32_t token = position % args.tokens, row = position / args.tokens;

    const uint32_t b = bits_at(args.b, row, token, head);
    const uint32_t a = bits_at(args.a, row, token, head);
    const uint32_t A_log = bits_at(args.A_log.data, args.A_log.type, head);
    const uint32_t dt_bias = bits_at(args.dt_bias.data, args.dt_bias.type, head);
    const bool parked = args.parked != nullptr && args.parked[row];

    const float beta = rounded(sigmoid(value_of(b, args.b.type)), args.b.type);
    const float rate = expf(value_of(A_log, args.A_log.type));
    const float step = softplus(value_of(a, args.a.type) + value_of(dt_bias, args.dt_bias.type));
    args.beta[index] = parked ? 0.0f : beta;
    args.g[index] = parked ? 0.0f : -rate * step;
}

}  // namespace

void launch_gdn_gates(const GateArguments& args, cudaStream_t stream)
{
    gates<<<(args.size + kThreads - 1) / kThreads, kThreads, 0, stream>>>(args);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace ds_hybrid
