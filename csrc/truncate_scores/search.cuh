// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "histogram.cuh"

namespace ds_hybrid {

constexpr float kMassScale = 68719476736.0f;  // 2**36; the likeliest entry has this mass
constexpr float kBinsOfUnit = 64.0f;          // of the first histogram, which is 32 wide

// An entry's unnormalised probability in fixed point, so that no sum depends on its order.
__device__ __forceinline__ uint64_t mass_of(float value, float highest)
{
    return __float2ull_rn(expf(value - highest) * kMassScale);
}

// Top-k, which weighs an entry as one, or top-p, which weighs it by its mass.
struct Filter {
    bool by_mass;
    uint32_t count;  // top-k
    float tail;      // 1 - top-p

    __device__ __forceinline__ uint64_t weight(float value, float highest) const
    {
        return by_mass ? mass_of(value, highest) : 1;
    }
    // The weight from the top at which the last entry to be kept is reached. The likeliest always
    // is: nothing is reached before it.
    __device__ __forceinline__ uint64_t needed(uint64_t total) const
    {
        if (!by_mass) return count;
        const double dropped = static_cast<double>(tail) * static_cast<double>(total);
        return dropped < static_cast<double>(total) ? total - static_cast<uint64_t>(dropped) : 1;
    }
    // Top-k keeps ties, so that it needs no more than a key.
    __device__ __forceinline__ bool resolved(const Span& span) const
    {
        return by_mass ? span.low == span.high : key_at(span.low) == key_at(span.high);
    }
};

__device__ __forceinline__ uint32_t distance_bin(float value, float highest)
{
    return min(__float2uint_rz((highest - value) * kBinsOfUnit), static_cast<uint32_t>(kBins - 1));
}

__device__ __forceinline__ bool within(const Span& span, Place place)
{
    return place >= span.low && place <= span.high;
}

// Bins of 2**shift places each cover the span, the first one at its top.
__device__ __forceinline__ int shift_of(const Span& span, const Filter& filter)
{
    const int bits = 64 - __clzll(static_cast<long long>(span.high - span.low));
    return max(bits - kBinBits, filter.by_mass ? 0 : 32);
}

__device__ __forceinline__ uint32_t place_bin(const Span& span, Place place, int shift)
{
    return static_cast<uint32_t>((span.high - place) >> shift);
}

// Do the entries of a bin, which start at `low`, fit `places`? None is lighter than the lowest, and
// an eighth is left for what exp may be off.
__device__ __forceinline__ bool fits(const Filter& filter, Place low, uint64_t inside,
                                     float highest)
{
    if (!filter.by_mass) return inside <= kCapacity;
    return inside <= (kCapacity - kCapacity / 8) * mass_of(value_of(key_at(low)), highest);
}

__device__ __forceinline__ Span narrowed(const Span& span, const Filter& filter, const Found& found,
                                         int shift, int vocab, float highest)
{
    if (found.bin == kBins) return {0, 0, 0, true};  // everything is kept
    Span part = span;
    part.need = found.need;
    part.high -= static_cast<Place>(found.bin) << shift;
    const Place width = (Place{1} << shift) - 1;
    if (part.high - part.low > width) part.low = part.high - width;
    if (filter.by_mass && key_at(part.low) == key_at(part.high)) {
        part.high = min(part.high, place_of(key_at(part.high), vocab - 1));
    }
    part.few = fits(filter, part.low, found.inside, highest);
    return part;
}

__device__ __forceinline__ uint64_t needed(const Filter& filter, const Span& span, uint64_t total)
{
    return span.need != 0 ? span.need : filter.needed(total);
}

// The last place to be kept, among entries that `places` holds. All threads of the first block.
template <typename Row>
__device__ Place search_places(Shared& shared, Span span, const Filter& filter, const Row& row)
{
    const int count = static_cast<int>(shared.collected);
    do {
        const int shift = shift_of(span, filter);
        for (int i = threadIdx.x; i < count; i += kThreads) {
            const Place place = shared.places[i];
            if (!within(span, place)) continue;
            const uint64_t weight = filter.weight(value_of(key_at(place)), row.highest);
            if (weight != 0) add(shared, place_bin(span, place, shift), weight);
        }
        __syncthreads();
        const Found found =
            find_bin(shared, [&](uint64_t total) { return needed(filter, span, total); });
        span = narrowed(span, filter, found, shift, row.vocab, row.highest);
    } while (!filter.resolved(span));
    return span.low;
}

// The bin of the first histogram as a span of places from `from` on. All threads of the first
// block.
template <typename Row>
__device__ void write_first_span(Shared& shared, const Filter& filter, const Found& found,
                                 Place from, const Row& row)
{
    const uint32_t lowest = max(key_at(from), kLowestKey), highest = key_of(row.highest);
    if (threadIdx.x < 2 && found.bin < kBins) {
        const uint32_t bin = found.bin - threadIdx.x;  // and the one above, whose end is this one's
        shared.edges[threadIdx.x] =
            found.bin < threadIdx.x
                ? highest + 1
                : first_key(
                      lowest, highest,
                      [&](uint32_t key) {
                          return distance_bin(value_of(key), row.highest) <= bin;
                      });
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (found.bin == kBins) {
        shared.span = {0, 0, 0, true};
        return;
    }
    const Place low = place_of(shared.edges[0], 0);
    shared.span = {low, place_of(shared.edges[1], 0) - 1, found.need,
                   fits(filter, low, found.inside, row.highest)};
}

// A pass over the row that weighs it by distance from its largest entry.
template <bool kByMass, typename Row>
__device__ void weigh_by_distance(const Team& team, const Row row, float lowest)
{
    uint32_t far = 0;  // entries of the last bin, which may be most of the row; their mass is 0
    visit_packs(row, [&](const float (&values)[kPack], int) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            if (!(values[i] >= lowest)) continue;
            const uint32_t bin = distance_bin(values[i], row.highest);
            if (bin == kBins - 1) {
                ++far;
            } else if constexpr (kByMass) {
                add(*team.mine, bin, mass_of(values[i], row.highest));
            } else {
                add_one(*team.mine, bin);
            }
        }
    });
    if (!kByMass && far != 0) add(*team.mine, kBins - 1, far);
    merge_histograms(team);
}

// A pass over the row that weighs the entries of a span by their place.
template <typename Row>
__device__ void weigh_by_place(const Team& team, const Row row, const Span& span,
                               const Filter& filter, int shift)
{
    visit_packs(row, [&](const float (&values)[kPack], int index) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            const Place place = place_of(key_of(values[i]), index + i);
            if (!within(span, place)) continue;
            const uint64_t weight = filter.weight(values[i], row.highest);
            if (weight != 0) add(*team.mine, place_bin(span, place, shift), weight);
        }
    });
    merge_histograms(team);
}

// Where the last entry that the filter keeps is, among entries from `from` on, to a span that
// `places` holds or that needs no more search.
template <typename Row>
__device__ Span find_span(const Team& team, const Row& row, const Filter& filter, Place from)
{
    const float lowest = value_of(max(key_at(from), kLowestKey));
    if (filter.by_mass) {
        weigh_by_distance<true>(team, row, lowest);
    } else {
        weigh_by_distance<false>(team, row, lowest);
    }
    if (team.leads()) {
        const Found found =
            find_bin(*team.mine, [&](uint64_t total) { return filter.needed(total); });
        write_first_span(*team.mine, filter, found, from, row);
    }
    team.meet();
    Span span = team.lead->span;
    while (!span.few && !filter.resolved(span)) {
        const int shift = shift_of(span, filter);
        weigh_by_place(team, row, span, filter, shift);
        if (team.leads()) {
            const Found found =
                find_bin(*team.mine, [&](uint64_t total) { return needed(filter, span, total); });
            if (threadIdx.x == 0)
                team.mine->span = narrowed(span, filter, found, shift, row.vocab, row.highest);
        }
        team.meet();
        span = team.lead->span;
    }
    return span;
}

}  // namespace ds_hybrid
