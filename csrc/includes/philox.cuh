// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <cstdint>

// Philox4x32-10 (Salmon et al., SC 2011) and the Gumbel noise made of it, word for word as in
// deepspeed_hybrid/ops/philox.py, so that a row's noise is the same here, there and on any device.

namespace ds_hybrid {

struct NoiseKey {
    uint64_t seed;
    uint32_t position;
    uint32_t sample;
    uint32_t request;
};

__device__ __forceinline__ uint4 philox4x32(uint4 counter, uint2 key)
{
    constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
    constexpr uint32_t kIncrement0 = 0x9E3779B9u, kIncrement1 = 0xBB67AE85u;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = static_cast<uint64_t>(counter.x) * kMultiplier0;
        const uint64_t product1 = static_cast<uint64_t>(counter.z) * kMultiplier1;
        counter = make_uint4(static_cast<uint32_t>(product1 >> 32) ^ counter.y ^ key.x,
                             static_cast<uint32_t>(product1),
                             static_cast<uint32_t>(product0 >> 32) ^ counter.w ^ key.y,
                             static_cast<uint32_t>(product0));
        key.x += kIncrement0;
        key.y += kIncrement1;
    }
    return counter;
}

// The words of vocabulary entries 4 * group .. 4 * group + 3.
__device__ __forceinline__ uint4 noise_words(const NoiseKey& key, uint32_t group)
{
    return philox4x32(
        make_uint4(group, key.position, key.sample, key.request),
        make_uint2(static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32)));
}

// The word of vocabulary entry `entry`, where one thread needs one of the four only.
__device__ __forceinline__ uint32_t noise_word(const NoiseKey& key, int64_t entry)
{
    const uint4 words = noise_words(key, static_cast<uint32_t>(entry / 4));
    const uint32_t low = entry & 1 ? words.y : words.x, high = entry & 1 ? words.w : words.z;
    return entry & 2 ? high : low;
}

// Standard Gumbel noise, finite for every word. The accurate logarithms are meant: the choice of a
// token hangs on them.
__device__ __forceinline__ float gumbel(uint32_t word)
{
    constexpr float kLargestUniform = 1.0f - 0x1p-24f;
    const float uniform = fminf((static_cast<float>(word) + 0.5f) * 0x1p-32f, kLargestUniform);
    return -logf(-log1pf(-uniform));
}

}  // namespace ds_hybrid
