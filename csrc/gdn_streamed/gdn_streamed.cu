// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

// One token of every row through a GatedDeltaNet layer, between its two products, at the rate at
// which states can be read.
//
// The copy engine brings the states of a block's heads, and what goes with them, from before the
// kernel ahead has ended. Groups of four warps take one head after the other: conv, gates and
// products with kept tokens while the state is on its way, then the state's products, the delta
// rule and the gated norm. Key, delta and decay of a token are kept beside the state; when a block
// of tokens is full, they are added to the state as it passes by, and it is written.
//
// The memory is what is to be busy. Whatever a turn reads comes a turn ahead: while states stream,
// a load that waits for its address takes two microseconds. And a block fits on a multiprocessor
// beside a product's, so that its first states come during the end of the kernel ahead.

#include <algorithm>

#include "gdn_streamed.h"
#include "state.cuh"

namespace ds_hybrid {
namespace {

constexpr int kGroups = 2;
constexpr int kThreads = kGroups * (kGroupThreads + kWarp);  // warps behind the groups feed them
constexpr int kRegisters = 112;                              // next to 160 threads with 168
constexpr int kParts = kGroupThreads / kPlaces;              // threads that share a kept token
constexpr int kRuns = kDim / kParts / 4;                     // of four of its values, for each

struct Shared {
    Inbox inboxes[kGroups];
    Scratch scratch[kGroups];
};

static_assert(sizeof(Shared) <= 113 * 1024, "no room beside a product's block");

// What a turn is about, loaded a turn ahead.
struct Ahead {
    Place place;
    uint32_t A_log, dt_bias;
    uint16_t b, a;

    __device__ __forceinline__ void load(const GdnStreamedArguments& args, const Head& head)
    {
        place.load(args, head.row);
        A_log = bits_at(args.A_log, head.value_head);
        dt_bias = bits_at(args.dt_bias, head.value_head);
        const uint16_t* const gates = static_cast<const uint16_t*>(args.projected) +
                                      head.row * args.stride + args.channels +
                                      args.value_heads * kDim + head.value_head;
        b = gates[0];
        a = gates[args.value_heads];
    }
};

// What the token brings, for a thread's channel: the conv's query, key and value, and the rest.
template <typename Element>
struct Token {
    uint16_t raw[4];
    float query, key, value, beta, decay;

    __device__ __forceinline__ void read(const Beside& beside, int thread, int now)
    {
        float heads[3];
#pragma unroll
        for (int part = 0; part < 4; ++part) raw[part] = beside.raw[part][thread];
#pragma unroll
        for (int part = 0; part < 3; ++part) {
            heads[part] = activated<Element>(beside.window[part][thread], beside.taps[part][thread],
                                             raw[part], now);
        }
        query = heads[0];
        key = heads[1];
        value = heads[2];
    }

    __device__ __forceinline__ void open_gates(const GdnStreamedArguments& args, const Ahead& ahead)
    {
        beta = rounded<Element>(sigmoid(value_of<Element>(ahead.b)));
        const float rate = expf(value_of<Element>(args.A_log, ahead.A_log));
        const float shift = value_of<Element>(args.dt_bias, ahead.dt_bias);
        decay = expf(-rate * softplus(value_of<Element>(ahead.a) + shift));
    }

    // Behind it nobody has met yet to see `key_query`.
    __device__ __forceinline__ void normalise(Scratch& scratch, int group, int thread)
    {
        const float query_squares = sum_of_lanes<kWarp>(query * query);
        if (thread % kWarp == 0) scratch.squares[1][thread / kWarp] = query_squares;
        const float key_squares = sum_of_group(key * key, scratch.squares[0], group);
        query = rounded<Element>(query * rsqrtf(sum_of_warps(scratch.squares[1]) + kNormEps));
        key = rounded<Element>(key * rsqrtf(key_squares + kNormEps));
        scratch.key_query[thread] = make_float2(key, query);
    }
};

// What is kept beside the state, from the oldest token on: a thread's column of what each has
// written, and a share of one token's key. Where there is no token, zeros.
struct Kept {
    float deltas[kMostKept];
    uint2 key[kRuns];
    float of_state, left;  // what decays of kept tokens have left of the state, and of that token

    __device__ __forceinline__ void read(const Beside& beside, const Place& place, int thread)
    {
        const int count = place.kept(), token = thread / kParts, lane = thread % kWarp;
#pragma unroll
        for (int index = 0; index < kMostKept; ++index) {
            deltas[index] = index < count ? beside.deltas[index][thread] : 0.0f;
        }
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            key[run] = token < count ? beside.keys[token][run * kParts + thread % kParts]
                                     : make_uint2(0, 0);
        }
        const int oldest = place.slot() - count + kPlaces;
        float decays = lane < count ? beside.decays[(oldest + lane) % kPlaces] : 1.0f;
#pragma unroll
        for (int distance = 1; distance < kPlaces; distance *= 2) {
            const float behind = __shfl_down_sync(kAllLanes, decays, distance);
            if (lane + distance < kPlaces) decays *= behind;
        }
        of_state = __shfl_sync(kAllLanes, decays, 0);
        left = __shfl_sync(kAllLanes, decays, token + 1);
    }

    // Of each kept key with the token's key and query: into scratch.
    template <typename Element>
    __device__ __forceinline__ void multiply(Scratch& scratch, float decay, int thread) const
    {
        const float4* const pairs = reinterpret_cast<const float4*>(scratch.key_query);
        const int token = thread / kParts, share = thread % kParts;
        float with_key = 0.0f, with_query = 0.0f;
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            const float4 front = pairs[(run * kParts + share) * 2];
            const float4 back = pairs[(run * kParts + share) * 2 + 1];
            const float2 low = values_of<Element>(key[run].x);
            const float2 high = values_of<Element>(key[run].y);
            with_key += low.x * front.x + low.y * front.z + high.x * back.x + high.y * back.z;
            with_query += low.x * front.y + low.y * front.w + high.x * back.y + high.y * back.w;
        }
        with_key = sum_of_lanes<kParts>(with_key) * (left * decay);
        with_query = rounded<Element>(sum_of_lanes<kParts>(with_query) * (left * decay));
        if (share == 0) {
            scratch.with_key[token] = with_key;
            scratch.with_query[token] = with_query;
            scratch.left[token] = left;
        }
    }

    // For write_rows(): in place of what was there, what is left of each delta, and zeros.
    __device__ __forceinline__ void settle(const Scratch& scratch, Beside& beside, int group,
                                           int thread) const
    {
        meet_group(group);
#pragma unroll
        for (int index = 0; index < kMostKept; ++index) {
            beside.deltas[index][thread] = deltas[index] * scratch.left[index];
        }
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            beside.keys[thread / kParts][run * kParts + thread % kParts] = key[run];
        }
        hand_over();
        meet_group(group);
    }
};

// Of a row that is none nothing is read or changed.
__device__ __forceinline__ void pass_over(Inbox& inbox, int number)
{
    give_back(inbox.beside_empty);
#pragma unroll 1
    for (int part = 0; part < kHeadStages; ++part) {
        const Stage stage(number + part);
        wait_for_phase(shared_address(&inbox.full[stage.place]), stage.parity);
        give_back(inbox.empty[stage.place]);
    }
}

// The gated norm of what the state answers, rounded before it, ahead of the weight and behind that.
template <typename Element>
__device__ __forceinline__ Element normed(const GdnStreamedArguments& args, Scratch& scratch,
                                          float answer, uint32_t gain, uint16_t gate, int group)
{
    const float core = rounded<Element>(answer * kScale);
    const float mean = sum_of_group(core * core, scratch.norm, group) / kDim;
    float value = rounded<Element>(core * rsqrtf(mean + args.eps)) *
                  value_of<Element>(args.norm_weight, gain);
    if (!args.norm_weight.wide) value = rounded<Element>(value);
    return static_cast<Element>(value * silu(value_of<Element>(gate)));
}

// The token takes its place beside the state and in the window.
template <typename Element>
__device__ __forceinline__ void keep(const GdnStreamedArguments& args, const Head& head,
                                     const Place& place, const Token<Element>& token, float delta,
                                     int thread)
{
    const int64_t of_head = head.of_values(args) * kPlaces + place.slot();
    args.deltas[of_head * kDim + thread] = delta;
    if (thread == 0) args.decays[of_head] = token.decay;
    if (head.first) {
        const int64_t of_key = head.of_keys(args) * kPlaces + place.slot();
        static_cast<Element*>(args.keys)[of_key * kDim + thread] = static_cast<Element>(token.key);
    }
#pragma unroll
    for (int part = 0; part < 3; ++part) {
        if (part < 2 && !head.first) continue;
        const int64_t channel = head.of_channels(args, part) + thread;
        static_cast<uint16_t*>(args.window)[channel * kTaps + place.position % kTaps] =
            token.raw[part];
    }
}

// One head's turn. `ahead` is of it, and comes to be of the next one.
template <typename Element>
__device__ __forceinline__ void take(const GdnStreamedArguments& args, Inbox& inbox,
                                     Scratch& scratch, int group, int item, int step, int turn,
                                     Ahead& ahead, uint32_t gain)
{
    const int thread = threadIdx.x % kGroupThreads, lane = thread % kWarp;
    const Head head(args, item);
    const Ahead now = ahead;
    if (item + step < args.items()) ahead.load(args, Head(args, item + step));
    Element* const out = static_cast<Element*>(args.out) + head.of_values(args) * kDim + thread;

    wait_for_phase(shared_address(&inbox.beside_full), turn % 2);
    if (!now.place.count) {
        *out = Element(0.0f);
        return pass_over(inbox, turn * kHeadStages);
    }
    Token<Element> token;
    Kept kept;
    token.read(inbox.beside, thread, now.place.position % kTaps);
    kept.read(inbox.beside, now.place, thread);
    const bool full = now.place.is_full();
    if (!full) give_back(inbox.beside_empty);
    token.open_gates(args, now);
    token.normalise(scratch, group, thread);
    meet_group(group);

    kept.multiply<Element>(scratch, token.decay, thread);
    const float4* const pairs = reinterpret_cast<const float4*>(scratch.key_query);
    const float4 front = pairs[lane], back = pairs[lane + kWarp];
    const float own = rounded<Element>(sum_of_lanes<kWarp>(front.x * front.y + front.z * front.w +
                                                           back.x * back.y + back.z * back.w));
    if (full) kept.settle(scratch, inbox.beside, group, thread);
    float* const state = args.state + head.of_values(args) * kDim * kDim;
    const float2 of_state = multiply_state(
        scratch, inbox, group, turn * kHeadStages, [&](const float4* rows, int row, int column) {
            if (!full) return;
            write_rows<Element>(inbox.beside, kept.of_state, row, column, rows,
                                reinterpret_cast<float4*>(state + row * kDim + column));
        });
    if (full) give_back(inbox.beside_empty);

    float known = 0.0f, answer = 0.0f;
#pragma unroll
    for (int index = 0; index < kMostKept; ++index) {
        known = fmaf(scratch.with_key[index], kept.deltas[index], known);
        answer = fmaf(scratch.with_query[index], kept.deltas[index], answer);
    }
    known = fmaf(of_state.x, kept.of_state * token.decay, known);
    answer = fmaf(of_state.y, kept.of_state * token.decay, answer);
    const float delta = fmaf(-known, token.beta, rounded<Element>(token.value * token.beta));
    answer = fmaf(own, delta, answer);
    *out = normed<Element>(args, scratch, answer, gain, token.raw[3], group);
    keep(args, head, now.place, token, delta, thread);
}

template <typename Element>
__global__ void __maxnreg__(kRegisters) gdn_streamed(const GdnStreamedArguments args)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    announce_dependents();
    extern __shared__ __align__(128) unsigned char bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(bytes);
    if (threadIdx.x == 0) {
        for (Inbox& inbox : shared.inboxes) inbox.init();
        show_barriers();
    }
    __syncthreads();
    const int group = threadIdx.x / kGroupThreads, step = kGroups * gridDim.x;
    if (group >= kGroups) {
        const int fed = (threadIdx.x - kGroups * kGroupThreads) / kWarp;
        if (threadIdx.x % kWarp == 0) {
            Feeder{args, shared.inboxes[fed]}.run(blockIdx.x + fed * gridDim.x, step);
        }
        return;
    }
    int item = blockIdx.x + group * gridDim.x;
    if (item >= args.items()) return;
    const uint32_t gain = bits_at(args.norm_weight, threadIdx.x % kGroupThreads);
    Ahead ahead;
    wait_for_predecessor();
    ahead.load(args, Head(args, item));
#pragma unroll 1
    for (int turn = 0; item < args.items(); ++turn, item += step) {
        take<Element>(args, shared.inboxes[group], shared.scratch[group], group, item, step, turn,
                      ahead, gain);
    }
#endif
}

template <typename Element>
void launch(const GdnStreamedArguments& args, cudaStream_t stream)
{
    auto* const kernel = gdn_streamed<Element>;
    C10_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    launch_dependent(kernel, dim3(std::min(args.items(), args.processors)), kThreads, 1,
                     sizeof(Shared), stream, args);
}

}  // namespace

void launch_gdn_streamed(const GdnStreamedArguments& args, cudaStream_t stream)
{
    if (args.type == c10::ScalarType::BFloat16) {
        launch<c10::BFloat16>(args, stream);
    } else {
        launch<c10::Half>(args, stream);
    }
}

}  // namespace ds_hybrid
