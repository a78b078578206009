// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

// A row's filters come down to one place in the order of (score, index): what stands below it is
// dropped. A block, or a cluster of blocks where rows are few, reads its row for the largest entry
// and then
//   - for a small top-k once more: entries that can be among the k largest are few, and what top-p
//     and min-p then drop is decided among them;
//   - otherwise for a histogram over distance from the largest entry, whose bin with the last entry
//     to be kept is a span of places; spans with too many entries are divided again, which only
//     rows full of equal scores need;
//   - and writes the result, where the few entries of the span are decided last.
// Counts and masses are integers, so a row's result is the same in any batch and cluster.

#include <algorithm>

#include "dependent_launch.cuh"
#include "search.cuh"
#include "truncate_scores.h"

namespace ds_hybrid {
namespace {

constexpr int kBlocksOfProcessor = 2;
constexpr int kMostSplit = 8;
constexpr int kFewestEntries = 4096;   // of a row, for a block
constexpr int kSmallK = kThreads / 2;  // more, and too many entries reach the bound below

// What a row asks for; zeros for nothing.
struct Wishes {
    int top_k;
    float tail, min_p;

    __device__ __forceinline__ Filter filter(bool by_mass) const
    {
        return {by_mass, static_cast<uint32_t>(top_k), tail};
    }
};

__device__ __forceinline__ Wishes read_wishes(const TruncateArguments& args, int row)
{
    const int64_t top_k = args.top_k[row];
    Wishes wishes{0, args.top_p_tail[row], args.min_p[row]};
    if (top_k > 0 && top_k < args.vocab) wishes.top_k = static_cast<int>(top_k);
    if (!(wishes.tail > 0.0f)) wishes.tail = 0.0f;  // NaN included
    if (!(wishes.min_p > 0.0f)) wishes.min_p = 0.0f;
    return wishes;
}

template <bool kAligned>
__device__ __forceinline__ Row<kAligned> slice_of(const TruncateArguments& args, int row, int rank)
{
    const int share = (args.vocab + args.split - 1) / args.split;
    const int width = (share + kPack - 1) / kPack * kPack;
    const int64_t start = static_cast<int64_t>(row) * args.vocab;
    return {args.scores + start,
            args.out + start,
            0,
            0.0f,
            args.vocab,
            min(rank * width, args.vocab),
            min((rank + 1) * width, args.vocab)};
}

// The k-th largest of the threads' keys.
__device__ uint32_t kth_key(uint32_t key, int k)
{
    uint32_t kth = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
        if (__syncthreads_count(key >= (kth | bit)) >= k) kth |= bit;
    }
    return kth;
}

// Leaves the largest key of the row in `highest`, and in `bound` one that at least top_k entries
// reach if top_k is small: as many threads do by themselves.
template <typename Row>
__device__ void find_highest(const Team& team, const Row row, int top_k)
{
    float best = -INFINITY;
    bool broken = false;
    visit_packs(row, [&](const float (&values)[kPack], int) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            best = fmaxf(best, values[i]);
            broken |= !(values[i] <= FLT_MAX);
        }
    });
    const uint32_t key = key_of(best);
    uint32_t highest = broken ? kBrokenKey : key;
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
        highest = max(highest, __shfl_xor_sync(kAllLanes, highest, mask));
    }
    if (threadIdx.x % kWarp == 0) atomicMax(&team.lead->highest, highest);
    if (top_k > 0 && top_k <= kSmallK) {
        const uint32_t bound = kth_key(key, top_k);
        if (threadIdx.x == 0) atomicMax(&team.lead->bound, bound);
    }
    team.meet();
}

__device__ __forceinline__ void collect(const Team& team, Place place)
{
    const uint32_t slot = atomicAdd(&team.lead->collected, 1u);
    if (slot < kCapacity) team.lead->places[slot] = place;
}

template <typename Row>
__device__ __forceinline__ void write_all(const Row row)
{
    visit_packs(row, [&](const float (&values)[kPack], int index) { row.store(index, values); });
}

// Collects the entries that reach a key and writes -inf everywhere.
template <typename Row>
__device__ void collect_and_clear(const Team& team, const Row row, uint32_t key)
{
    const float lowest = value_of(max(key, kLowestKey));
    visit_packs(row, [&](const float (&values)[kPack], int index) {
        constexpr float kNothing[kPack] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
        row.store(index, kNothing);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            if (values[i] >= lowest) collect(team, place_of(key_of(values[i]), index + i));
        }
    });
    team.meet();
}

// Collects the entries of a span, and with kWrite writes those from `kept` on and -inf elsewhere.
template <bool kWrite, typename Row>
__device__ void collect_span(const Team& team, const Row row, const Span& span, bool open,
                             Place kept)
{
    visit_packs(row, [&](const float (&values)[kPack], int index) {
        float results[kPack];
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            const Place place = place_of(key_of(values[i]), index + i);
            if (open && within(span, place)) collect(team, place);
            results[i] = place >= kept ? values[i] : -INFINITY;
        }
        if (kWrite) row.store(index, results);
    });
    team.meet();
}

// By the first block, after everything else has been written.
template <typename Row>
__device__ __forceinline__ void write_collected(const Shared& shared, const Row& row, Place from)
{
    const int count = static_cast<int>(shared.collected);
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const int index = index_at(shared.places[i]);
        if (shared.places[i] >= from) row.out[index] = row.scores[index];
    }
}

// Decides the whole row among the entries that reach the bound; false, with nothing decided, where
// they are too many.
template <typename Row>
__device__ bool keep_few(const Team& team, const Row& row, const Wishes& wishes)
{
    const uint32_t bound = team.lead->bound;
    collect_and_clear(team, row, bound);
    if (team.lead->collected > kCapacity) {
        team.meet();  // everyone has seen it
        if (team.leads() && threadIdx.x == 0) team.mine->collected = 0;
        return false;
    }
    if (!team.leads()) return true;
    Span span{place_of(max(bound, kLowestKey), 0), place_of(key_of(row.highest), -1), 0, true};
#pragma unroll 1
    for (int filter = 0; filter < (wishes.tail > 0.0f ? 2 : 1); ++filter) {
        const Place last = search_places(*team.mine, span, wishes.filter(filter == 1), row);
        span.low = max(span.low, last);
    }
    write_collected(*team.mine, row, max(span.low, row.least));
    return true;
}

// The last place that a filter keeps, for all blocks.
template <typename Row>
__device__ Place find_last(const Team& team, const Row& row, const Filter& filter)
{
    const Span span = find_span(team, row, filter, 0);
    if (filter.resolved(span)) return span.low;
    collect_span<false>(team, row, span, true, 0);
    if (team.leads()) {
        const Place last = search_places(*team.mine, span, filter, row);
        __syncthreads();
        if (threadIdx.x == 0) {
            team.mine->span.low = last;
            team.mine->collected = 0;
        }
    }
    team.meet();
    return team.lead->span.low;
}

// Writes what a filter keeps, weighing entries from `from` on.
template <typename Row>
__device__ void keep_and_write(const Team& team, const Row& row, const Filter& filter, Place from)
{
    const Span span = find_span(team, row, filter, from);
    const bool open = !filter.resolved(span);
    collect_span<true>(team, row, span, open, max(open ? span.high + 1 : span.low, row.least));
    if (!open || !team.leads()) return;
    const Place last = search_places(*team.mine, span, filter, row);
    write_collected(*team.mine, row, max(last, row.least));
}

// The place of the first entry that min-p keeps.
__device__ Place first_of_min_p(float min_p, uint32_t highest)
{
    const uint32_t key = first_key(kLowestKey, highest + 1, [&](uint32_t key) {
        return key > highest || expf(value_of(key) - value_of(highest)) >= min_p;
    });
    return place_of(key, 0);
}

template <typename Row>
__device__ void truncate_row(const Team& team, Row& row, const Wishes& wishes)
{
    find_highest(team, row, wishes.top_k);
    const uint32_t highest = team.lead->highest;
    if (highest < kLowestKey || highest > kHighestKey) return write_all(row);
    if (threadIdx.x == 0) {
        row.highest = value_of(highest);
        if (wishes.min_p > 0.0f) row.least = first_of_min_p(wishes.min_p, highest);
    }
    __syncthreads();
    if (wishes.top_k > 0 && wishes.top_k <= kSmallK && keep_few(team, row, wishes)) return;

    if (wishes.top_k == 0 && wishes.tail == 0.0f) {
        collect_span<true>(team, row, {}, false, row.least);
        return;
    }
    Place from = 0;
    if (wishes.top_k > 0 && wishes.tail > 0.0f) {
        from = find_last(team, row, wishes.filter(false));
    }
    keep_and_write(team, row, wishes.filter(wishes.tail > 0.0f), from);
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksOfProcessor)
    truncate_rows(const TruncateArguments args)
{
    announce_dependents();
    __shared__ Shared shared;
    __shared__ Row<kAligned> row;
    __shared__ Wishes wishes;
    const int rank = static_cast<int>(blockIdx.x) % args.split;
    const Team team{args.split, rank, &shared, of_block(&shared, args.split, 0)};
    uint64_t weights[kBinsOfThread];
    take_bins(shared, weights);
    if (threadIdx.x == 0) shared.collected = shared.highest = shared.bound = 0;
    team.meet();
    wait_for_predecessor();
    if (threadIdx.x == 0) {
        const int index = static_cast<int>(blockIdx.x) / args.split;
        wishes = read_wishes(args, index);
        row = slice_of<kAligned>(args, index, rank);
    }
    __syncthreads();

    if (wishes.top_k == 0 && wishes.tail == 0.0f && wishes.min_p == 0.0f) return write_all(row);
    truncate_row(team, row, wishes);
    team.meet();  // the first block's memory is read no more
}

}  // namespace

int blocks_of_row(int rows, int vocab)
{
    if (!launches_dependents()) return 1;  // nor has it clusters
    int device = 0, processors = 0;
    C10_CUDA_CHECK(cudaGetDevice(&device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    int split = 1;
    while (2 * split <= kMostSplit && vocab / (2 * split) >= kFewestEntries &&
           rows <= kBlocksOfProcessor * processors / (2 * split)) {
        split *= 2;
    }
    return split;
}

void launch_truncate_scores(const TruncateArguments& args, cudaStream_t stream)
{
    const auto starts =
        reinterpret_cast<uintptr_t>(args.scores) | reinterpret_cast<uintptr_t>(args.out);
    const bool aligned = starts % sizeof(float4) == 0 && args.vocab % kPack == 0;
    launch_dependent(aligned ? truncate_rows<true> : truncate_rows<false>,
                     dim3(static_cast<unsigned>(args.rows) * args.split), kThreads,
                     static_cast<unsigned>(args.split), 0, stream, args);
}

}  // namespace ds_hybrid
