// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

// Up to eight tokens of every row through a GatedDeltaNet layer, between its two products, of which
// it is decided afterwards how many have been.
//
// As in gdn_streamed, the copy engine brings the states of a block's heads, and what goes with
// them, from before the kernel ahead has ended, and groups of eight warps take one head after the
// other. Of a state nothing but products with the tokens' keys and queries is wanted. What kept
// tokens have written, and what the block's own write for one another, is weighed by products of
// keys on the tensor cores. Each token is kept beside the state, where it is nothing until the
// row's position has passed it.

#include <algorithm>

#include "column.cuh"
#include "state.cuh"

namespace ds_hybrid {
namespace {

constexpr int kGroups = 2;
constexpr int kThreads = kGroups * (kTeamThreads + 2 * kWarp);  // warps behind them feed them

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

// By a warp, a token a lane: decay and beta.
template <typename Element, int kTokens>
__device__ __forceinline__ void open_gates(const GdnStreamedBlockArguments& args, const Head& head,
                                           const Ahead& ahead, float2 (&gates)[kTokens], int lane)
{
    if (lane >= kTokens) return;
    const float rate = expf(value_of<Element>(args.A_log, ahead.A_log));
    const float shift = value_of<Element>(args.dt_bias, ahead.dt_bias);
    const float decay = expf(-rate * softplus(value_of<Element>(ahead.a) + shift));
    gates[lane] = make_float2(decay, rounded<Element>(sigmoid(value_of<Element>(ahead.b))));
    if (lane < ahead.place.count) {
        args.decays[head.of_values(args) * args.places + ahead.place.in_ring(args, lane)] = decay;
    }
}

// Coefficients of what has been written, with all tokens' keys and queries.
template <typename Element, int kTokens>
__device__ __forceinline__ void weigh_all(const BlockPlace& place, Scratch<kTokens>& scratch,
                                          const float2 (&gates)[kTokens], int group, int thread)
{
    const int warp = thread / kWarp;
    // Tiles of kept tokens are the first warps', the block's own the fourth one's.
    constexpr int kKeptTiles = kKeyRows / 16, kFading = kKeptTiles + 1, kBehind = kFading + 2;
    const bool own = warp == kKeptTiles;
    const bool weighs = own || (warp < kKeptTiles && warp * 16 < place.kept);
    float with_keys[4] = {}, with_queries[4] = {};
    if (weighs) {
        multiply_keys<Element>(with_keys, with_queries,
                               own ? scratch.keys_queries : scratch.kept_keys + warp * 16 * kChunks,
                               scratch.keys_queries);
    }
    if (warp >= kFading && warp < kBehind) fade(place, scratch, gates, thread - kFading * kWarp);
    meet_team(group);
    if (weighs) weigh<Element>(place, scratch, own ? -1 : warp, with_keys, with_queries);
    const int token = thread - kBehind * kWarp;
    if (token >= 0 && token < kTokens) {
        const int in_state = token < place.change ? place.first : place.last;
        scratch.of_state[token] = scratch.left[in_state][token];
    }
    meet_team(group);
}

// Of a row that is none nothing is read or changed.
template <typename Element>
__device__ __forceinline__ void pass_over(const GdnStreamedBlockArguments& args, const Head& head,
                                          Inbox& inbox, int number, int thread)
{
    for (int token = thread / kDim; token < args.tokens; token += kTeamThreads / kDim) {
        static_cast<Element*>(
            args.out)[(static_cast<int64_t>(token) * args.rows * args.value_heads +
                       head.of_values(args)) *
                          kDim +
                      thread % kDim] = Element(0.0f);
    }
    give_back(inbox.beside_empty);
#pragma unroll 1
    for (int part = 0; part < kHeadStages; ++part) {
        const Stage stage(number + part);
        wait_for_phase(shared_address(&inbox.full[stage.place]), stage.parity);
        give_back(inbox.empty[stage.place]);
    }
}

// The gated norm of what the state answers, rounded before it, ahead of the weight and behind that:
// a token for each warp.
template <typename Element, int kTokens>
__device__ __forceinline__ void norm(const GdnStreamedBlockArguments& args, const Head& head,
                                     int count, const Scratch<kTokens>& scratch, const uint2& gates,
                                     const float (&gain)[4], int token, int lane)
{
    if (token >= min(kTokens, args.tokens)) return;
    const float4 four = reinterpret_cast<const float4*>(scratch.core[token])[lane];
    float core[4] = {four.x, four.y, four.z, four.w}, gate[4];
    unpack<Element>(gate, gates);
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

// A token that is the only one is one for sure, and so takes its place in the window.
__device__ __forceinline__ void enter_window(const GdnStreamedBlockArguments& args,
                                             const Head& head, int position, const Beside& beside,
                                             int thread)
{
    if (thread >= kDim) return;
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
    const int thread = threadIdx.x % kTeamThreads, warp = thread / kWarp, lane = thread % kWarp;
    const Head head(args, item);
    const Ahead now = ahead;
    const BlockPlace& place = now.place;
    if (item + step < args.items()) ahead.load(args, Head(args, item + step));

    Beside& beside = inbox.beside;
    wait_for_phase(shared_address(&inbox.beside_full), turn % 2);
    wait_for_copies<0>();
    meet_team(group);
    const auto ask_ahead = [&] {
        if (item + step >= args.items()) return;
        const Head next(args, item + step);
        ask_for_tokens(args, next, ahead.place.count, beside, thread);
        if (warp == kTeamWarps - 1) {
            open_gates<Element>(args, next, ahead, scratch.gates[(turn + 1) % 2], lane);
        }
    };
    if (!place.count) {
        ask_ahead();
        return pass_over<Element>(args, head, inbox, turn * kHeadStages, thread);
    }
    const uint2 outer =
        warp < kTokens ? reinterpret_cast<const uint2*>(beside.raw[warp][3])[lane] : uint2{};
    bring<Element>(args, head, place, beside, scratch, thread);
    if (args.tokens == 1 && !args.ahead) enter_window(args, head, place.position, beside, thread);
    meet_team(group);
    ask_ahead();
    const auto& gates = scratch.gates[turn % 2];
    weigh_all<Element>(place, scratch, gates, group, thread);

    Column<Element, kTokens> column(scratch, gates, thread);
    column.add_kept(place, beside);
    multiply_state(place, scratch, inbox, args.state + head.of_values(args) * kDim * kDim,
                   !args.ahead, turn * kHeadStages, thread);
    meet_team(group);
    column.load_products();
    if (column.from == 0) column.answer();
    meet_team(group);
    if (column.from > 0) column.answer_behind();
    column.keep(args, head, place);
    meet_team(group);
    norm<Element>(args, head, place.count, scratch, outer, gain, warp, lane);
}

template <typename Element, int kTokens>
__global__ void __launch_bounds__(kThreads, 1)
    gdn_streamed_block(const __grid_constant__ GdnStreamedBlockArguments args)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    announce_dependents();
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& shared = *reinterpret_cast<Shared<kTokens>*>(bytes);
    if (threadIdx.x == 0) {
        for (Inbox& inbox : shared.inboxes) inbox.init();
        show_barriers();
    }
    __syncthreads();
    const int group = threadIdx.x / kTeamThreads, step = kGroups * gridDim.x;
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
                   threadIdx.x % kTeamThreads);
    if (threadIdx.x % kTeamThreads / kWarp == kTeamWarps - 1) {
        open_gates<Element>(args, Head(args, item), ahead, shared.scratch[group].gates[0],
                            threadIdx.x % kWarp);
    }
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
