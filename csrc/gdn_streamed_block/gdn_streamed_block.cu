// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

// Up to eight tokens of every row through a GatedDeltaNet layer, between its two products, of which
// it is decided afterwards how many have been.
//
// As in gdn_streamed, the copy engine brings the states of a block's heads, and what goes with
// them, from before the kernel ahead has ended, and groups of four warps take one head after the
// other. Of a state nothing but products with the tokens' keys and queries is wanted. What kept
// tokens have written, and what the block's own write for one another, is weighed by products of
// keys on the tensor cores. Each token is kept beside the state, where it is nothing until the
// row's position has passed it.

#include <algorithm>

#include "state.cuh"

namespace ds_hybrid {
namespace {

constexpr int kGroups = 2;
constexpr int kThreads = kGroups * (kGroupThreads + 2 * kWarp);  // warps behind them feed them

template <int kTokens>
struct Shared {
    Inbox inboxes[kGroups];
    Scratch<kTokens> scratch[kGroups];
};

static_assert(sizeof(Shared<kMostTokens>) <= 227 * 1024);

// What a turn is about, loaded a turn ahead: gates are of the token of a lane's number.
struct Ahead {
    BlockPlace place;
    uint32_t A_log, dt_bias;
    uint16_t b, a;

    __device__ __forceinline__ void load(const GdnStreamedBlockArguments& args, const Head& head)
    {
        place.load(args, head.row);
        A_log = bits_at(args.A_log, head.value_head);
        dt_bias = bits_at(args.dt_bias, head.value_head);
        const int token = min(static_cast<int>(threadIdx.x % kWarp), args.tokens - 1);
        const uint16_t* const gates =
            static_cast<const uint16_t*>(args.projected) +
            (static_cast<int64_t>(token) * args.rows + head.row) * args.stride + args.channels +
            args.value_heads * kDim + head.value_head;
        b = gates[0];
        a = gates[args.value_heads];
    }
};

// By a warp, a token a lane.
template <typename Element, int kTokens>
__device__ __forceinline__ void open_gates(const GdnStreamedBlockArguments& args, const Head& head,
                                           const Ahead& ahead, Scratch<kTokens>& scratch, int lane)
{
    const BlockPlace& place = ahead.place;
    if (lane >= kTokens) return;
    const float rate = expf(value_of<Element>(args.A_log, ahead.A_log));
    const float shift = value_of<Element>(args.dt_bias, ahead.dt_bias);
    const float decay = expf(-rate * softplus(value_of<Element>(ahead.a) + shift));
    scratch.beta[lane] = rounded<Element>(sigmoid(value_of<Element>(ahead.b)));
    scratch.decays[place.kept + lane] = decay;
    if (lane < place.count) {
        args.decays[head.of_values(args) * args.places + (place.position + lane) % args.places] =
            decay;
    }
}

// Coefficients of what has been written, with all tokens' keys and queries.
template <typename Element, int kTokens>
__device__ __forceinline__ void weigh_all(const BlockPlace& place, Scratch<kTokens>& scratch,
                                          int group, int thread)
{
    const int warp = thread / kWarp;
    // Tiles of kept tokens 0 and 2 are the first warp's, 1 and the block's own the second one's.
    float front[2][4] = {}, back[2][4] = {};
    const bool own = warp == 1, has_front = warp < 2 && warp * 16 < place.kept;
    const bool has_back = own || (warp == 0 && 2 * 16 < place.kept);
    if (has_front) {
        multiply_keys<Element>(front[0], front[1], scratch.kept_keys + warp * 16 * kChunks,
                               scratch.keys_queries);
    }
    if (has_back) {
        multiply_keys<Element>(back[0], back[1],
                               own ? scratch.keys_queries : scratch.kept_keys + 2 * 16 * kChunks,
                               scratch.keys_queries);
    }
    if (warp >= 2) fade(place, scratch, thread - 2 * kWarp);
    meet_group(group);
    if (has_front) weigh<Element>(place, scratch, warp, front[0], front[1]);
    if (has_back) weigh<Element>(place, scratch, own ? -1 : 2, back[0], back[1]);
    if (thread >= 2 * kWarp && thread < 2 * kWarp + kTokens) {
        const int token = thread - 2 * kWarp;
        const int in_state = token < place.change ? place.first : place.last;
        scratch.of_state[token] = scratch.left[in_state][token];
    }
    meet_group(group);
}

// Of a row that is none nothing is read or changed.
template <typename Element>
__device__ __forceinline__ void pass_over(const GdnStreamedBlockArguments& args, const Head& head,
                                          Inbox& inbox, int number, int thread)
{
    for (int token = 0; token < args.tokens; ++token) {
        static_cast<Element*>(
            args.out)[(static_cast<int64_t>(token) * args.rows * args.value_heads +
                       head.of_values(args)) *
                          kDim +
                      thread] = Element(0.0f);
    }
    give_back(inbox.beside_empty);
#pragma unroll 1
    for (int part = 0; part < kHeadStages; ++part) {
        const Stage stage(number + part);
        wait_for_phase(shared_address(&inbox.full[stage.place]), stage.parity);
        give_back(inbox.empty[stage.place]);
    }
}

// The gated norm of what the state answers, rounded before it, ahead of the weight and behind that.
template <typename Element, int kTokens>
__device__ __forceinline__ void norm(const GdnStreamedBlockArguments& args, const Head& head,
                                     int count, const Scratch<kTokens>& scratch,
                                     const uint2 (&gates)[kShare<kTokens>], const float (&gain)[4],
                                     int warp, int lane)
{
#pragma unroll
    for (int share = 0; share < kShare<kTokens>; ++share) {
        const int token = share * kGroupWarps + warp;
        if (token >= min(kTokens, args.tokens)) break;
        const float4 four = reinterpret_cast<const float4*>(scratch.core[token])[lane];
        float core[4] = {four.x, four.y, four.z, four.w}, gate[4];
        unpack<Element>(gate, gates[share]);
        const float mean = sum_of_lanes<kWarp>(core[0] * core[0] + core[1] * core[1] +
                                               core[2] * core[2] + core[3] * core[3]) /
                           kDim;
        const float factor = rsqrtf(mean + args.eps);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float value = rounded<Element>(core[i] * factor) * gain[i];
            if (!args.norm_weight.wide) value = rounded<Element>(value);
            core[i] = value * silu(gate[i]);
        }
        const int64_t place =
            static_cast<int64_t>(token) * args.rows * args.value_heads + head.of_values(args);
        static_cast<uint2*>(args.out)[place * (kDim / 4) + lane] =
            token < count ? packed<Element>(core) : make_uint2(0, 0);
    }
}

// A token that is the only one is one for sure, and so takes its place in the window.
__device__ __forceinline__ void enter_window(const GdnStreamedBlockArguments& args,
                                             const Head& head, int position, const Beside& beside,
                                             int thread)
{
#pragma unroll
    for (int part = 0; part < 3; ++part) {
        if (part < 2 && !head.first) continue;
        const int64_t channel = head.of_channels(args, part) + thread;
        static_cast<uint16_t*>(args.window)[channel * kTaps + position % kTaps] =
            beside.raw[0][part][thread];
    }
}

// One head's turn. `ahead` is of it, and comes to be of the next one.
template <typename Element, int kTokens>
__device__ __forceinline__ void take(const GdnStreamedBlockArguments& args, Inbox& inbox,
                                     Scratch<kTokens>& scratch, int group, int item, int step,
                                     int turn, Ahead& ahead, const float (&gain)[4])
{
    const int thread = threadIdx.x % kGroupThreads, warp = thread / kWarp, lane = thread % kWarp;
    const Head head(args, item);
    const Ahead now = ahead;
    const BlockPlace& place = now.place;
    if (item + step < args.items()) ahead.load(args, Head(args, item + step));

    Beside& beside = inbox.beside;
    wait_for_phase(shared_address(&inbox.beside_full), turn % 2);
    wait_for_copies<0>();
    meet_group(group);
    const auto ask_ahead = [&] {
        if (item + step >= args.items()) return;
        ask_for_tokens(args, Head(args, item + step), ahead.place.count, beside, thread);
    };
    if (!place.count) {
        ask_ahead();
        return pass_over<Element>(args, head, inbox, turn * kHeadStages, thread);
    }
    uint2 gates[kShare<kTokens>];
    if (warp == 0) open_gates<Element>(args, head, now, scratch, lane);
    bring<Element>(args, head, place, beside, scratch, gates, thread);
    if (args.tokens == 1 && !args.ahead) enter_window(args, head, place.position, beside, thread);
    meet_group(group);
    ask_ahead();
    weigh_all<Element>(place, scratch, group, thread);

    float known[kTokens] = {}, answer[kTokens] = {};
#pragma unroll 2
    for (int token = place.first; token < place.kept; ++token) {
        const float delta = beside.deltas[token][thread];
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
            const float2 pair = scratch.kept[token][i];
            known[i] = fmaf(pair.x, delta, known[i]);
            answer[i] = fmaf(pair.y, delta, answer[i]);
        }
    }
    float of_key[kTokens], of_query[kTokens];
    multiply_state(place, scratch, inbox, args.state + head.of_values(args) * kDim * kDim,
                   !args.ahead, turn * kHeadStages, of_key, of_query);

    const Element* const values = reinterpret_cast<const Element*>(scratch.values);
    float deltas[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
#pragma unroll
        for (int before = 0; before < i; ++before) {
            const float2 pair = scratch.own[before][i];
            known[i] = fmaf(pair.x, deltas[before], known[i]);
            answer[i] = fmaf(pair.y, deltas[before], answer[i]);
        }
        known[i] = fmaf(of_key[i], scratch.of_state[i], known[i]);
        answer[i] = fmaf(of_query[i], scratch.of_state[i], answer[i]);
        const float value = static_cast<float>(values[i * kDim + thread]);
        deltas[i] = (value - known[i]) * scratch.beta[i];
        answer[i] = fmaf(scratch.own[i][i].y, deltas[i], answer[i]);
        scratch.core[i][thread] = rounded<Element>(answer[i] * kScale);
        if (i < place.count) {
            const int64_t in_ring =
                head.of_values(args) * args.places + (place.position + i) % args.places;
            args.deltas[in_ring * kDim + thread] = deltas[i];
        }
    }
    meet_group(group);
    norm<Element>(args, head, place.count, scratch, gates, gain, warp, lane);
}

template <typename Element, int kTokens>
__global__ void __launch_bounds__(kThreads, 1)
    gdn_streamed_block(const GdnStreamedBlockArguments args)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    announce_dependents();
    extern __shared__ __align__(128) unsigned char bytes[];
    auto& shared = *reinterpret_cast<Shared<kTokens>*>(bytes);
    if (threadIdx.x == 0) {
        for (Inbox& inbox : shared.inboxes) inbox.init();
        show_barriers();
    }
    __syncthreads();
    const int group = threadIdx.x / kGroupThreads, step = kGroups * gridDim.x;
    if (group >= kGroups) {
        const int feeder = threadIdx.x / kWarp % (2 * kGroups), fed = feeder % kGroups;
        const Feeder feeds = {args, shared.inboxes[fed]};
        if (threadIdx.x % kWarp) return;
        if (feeder < kGroups) {
            feeds.run_states(blockIdx.x + fed * gridDim.x, step);
        } else {
            feeds.run_beside(blockIdx.x + fed * gridDim.x, step);
        }
        return;
    }
    int item = blockIdx.x + group * gridDim.x;
    if (item >= args.items()) return;
    float gain[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        gain[i] = value_of<Element>(args.norm_weight,
                                    bits_at(args.norm_weight, threadIdx.x % kWarp * 4 + i));
    }
    Ahead ahead;
    wait_for_predecessor();
    ahead.load(args, Head(args, item));
    ask_for_tokens(args, Head(args, item), ahead.place.count, shared.inboxes[group].beside,
                   threadIdx.x % kGroupThreads);
#pragma unroll 1
    for (int turn = 0; item < args.items(); ++turn, item += step) {
        take<Element, kTokens>(args, shared.inboxes[group], shared.scratch[group], group, item,
                               step, turn, ahead, gain);
    }
#endif
}

template <typename Element, int kTokens>
void launch(const GdnStreamedBlockArguments& args, cudaStream_t stream)
{
    auto* const kernel = gdn_streamed_block<Element, kTokens>;
    constexpr int kBytes = sizeof(Shared<kTokens>);
    C10_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    launch_dependent(kernel, dim3(std::min(args.items(), args.processors)), kThreads, 1, kBytes,
                     stream, args);
}

}  // namespace

void launch_gdn_streamed_block(const GdnStreamedBlockArguments& args, cudaStream_t stream)
{
    if (args.tokens == 1) {
        launch<c10::BFloat16, 1>(args, stream);
    } else if (args.tokens <= 4) {
        launch<c10::BFloat16, 4>(args, stream);
    } else {
        launch<c10::BFloat16, kMostTokens>(args, stream);
    }
}

}  // namespace ds_hybrid
