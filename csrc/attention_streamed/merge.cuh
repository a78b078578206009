// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "dependent_launch.cuh"
#include "tiles.cuh"

// What warps, and then splits, have seen of a row is put together.

namespace ds_hybrid {

// Of a row's positions.
struct Split {
    int index, tiles, warps;

    __device__ __forceinline__ Split(int index, int64_t position, int warps)
        : index(index), tiles(static_cast<int>(position / kTile) + 1), warps(warps)
    {
    }

    // Splits take turns of as many tiles as they have warps; the first of a short row have all.
    __device__ __forceinline__ int active(int splits) const
    {
        return min(splits, (tiles + warps - 1) / warps);
    }

    __device__ __forceinline__ bool has_last(int splits) const
    {
        return (tiles - 1) / warps % splits == index;
    }
};

constexpr int kMergeThreads = 256, kMergeColumns = 16;  // of four dimensions
constexpr int kMergeParts = kMergeThreads / kMergeColumns;
constexpr int kMostParts = (kMostSplits + kMergeParts - 1) / kMergeParts;

// One query head of one row, 64 dimensions of it. Everything is asked for at once: there is little
// of it, and each wait is a microsecond.
template <typename Element, int kDim>
__global__ void __launch_bounds__(kMergeThreads)
    attention_merge(const __grid_constant__ AttentionArguments args)
{
    announce_dependents();
    __shared__ float sums[kMergeParts][kMergeColumns * 4];
    __shared__ float2 of_parts[kMergeParts];
    const int row = blockIdx.z, head = blockIdx.y, first = blockIdx.x * kMergeColumns * 4;
    const int part = threadIdx.x / kMergeColumns, column = threadIdx.x % kMergeColumns;
    const int thread = threadIdx.x, heads = args.kv_heads * args.group;
    Element* const out =
        static_cast<Element*>(args.out) + (static_cast<int64_t>(row) * heads + head) * kDim + first;
    if (args.parked[row]) {
        wait_for_predecessor();
        if (thread < kMergeColumns * 4) out[thread] = Element(0.0f);
        return;
    }
    const int active = Split(0, args.position[row], args.warps).active(args.splits);
    wait_for_predecessor();

    const int64_t of_first =
        (static_cast<int64_t>(row) * args.kv_heads + head / args.group) * args.splits * args.group +
        head % args.group;
    float2 marks[kMostParts];
    float4 parts[kMostParts];
#pragma unroll
    for (int i = 0; i < kMostParts; ++i) {
        const int split = part + i * kMergeParts;
        marks[i] = {-INFINITY, 0.0f};
        parts[i] = {};
        if (split < active) {
            const int64_t entry = of_first + static_cast<int64_t>(split) * args.group;
            marks[i] = args.marks[entry];
            parts[i] = reinterpret_cast<const float4*>(args.partial + entry * kDim + first)[column];
        }
    }
    Element gate(0.0f);
    if (args.gated && thread < kMergeColumns * 4) {
        gate = static_cast<const Element*>(
            args.projected)[row * args.stride + (2 * head + 1) * kDim + first + thread];
    }
    float peak = marks[0].x, total = 0.0f;
    float4 sum = {};
#pragma unroll
    for (int i = 1; i < kMostParts; ++i) peak = fmaxf(peak, marks[i].x);
    if (part < active) {
#pragma unroll
        for (int i = 0; i < kMostParts; ++i) {
            const float weight = exp2f(marks[i].x - peak);
            total = fmaf(weight, marks[i].y, total);
            sum.x = fmaf(weight, parts[i].x, sum.x);
            sum.y = fmaf(weight, parts[i].y, sum.y);
            sum.z = fmaf(weight, parts[i].z, sum.z);
            sum.w = fmaf(weight, parts[i].w, sum.w);
        }
    }
    reinterpret_cast<float4*>(sums[part])[column] = sum;
    if (column == 0) of_parts[part] = {peak, total};
    __syncthreads();
    if (thread >= kMergeColumns * 4) return;
    peak = of_parts[0].x;
    total = 0.0f;
    float mixed = 0.0f;
    for (int i = 1; i < min(kMergeParts, active); ++i) peak = fmaxf(peak, of_parts[i].x);
    for (int i = 0; i < min(kMergeParts, active); ++i) {
        const float weight = exp2f(of_parts[i].x - peak);
        total = fmaf(weight, of_parts[i].y, total);
        mixed = fmaf(weight, sums[i][thread], mixed);
    }
    out[thread] = answer<Element>(mixed / total, args.gated, gate);
}

}  // namespace ds_hybrid
