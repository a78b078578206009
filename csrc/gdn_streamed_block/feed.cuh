// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "../gdn_streamed/heads.cuh"
#include "barrier.cuh"
#include "dependent_launch.cuh"
#include "place.cuh"
#include "tensor_core.cuh"

// What a group's turns need, on its way into shared memory: by the copy engine states, an eighth at
// a time through a ring, and what is kept beside each; by the group itself what tokens bring, in
// pieces that are small and many.

namespace ds_hybrid {

// A group of warps for one state: as many for each of its columns as share a block's tokens.
constexpr int kTeamWarps = 8, kTeamThreads = kTeamWarps * kWarp;
static_assert(kTeamWarps >= kMostTokens);

__device__ __forceinline__ void meet_team(int team)
{
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kTeamThreads) : "memory");
}

constexpr int kHeadStages = kDim / kStageRows;
constexpr int kStageFloats = kStageRows * kDim, kStageBytes = kStageFloats * 4;
constexpr int kStages = 4;
static_assert(kStages < kHeadStages,
              "the kernel ahead has ended before a first state is all there");

// Beside the state of one turn. Kept tokens lie in their order, decays as in their ring.
struct Beside {
    float deltas[kMostBeside][kDim];
    uint4 keys[kMostBeside][kDim / 8];
    uint2 window[3][kDim], taps[3][kDim];  // of query, key and value; or in the window's place ...
    uint16_t raw[kMostTokens][4][kDim];    // query, key, value and gate as projected
    float decays[kMostRing];

    // ... raw values of the three tokens before the launch's first one, which are in no window yet.
    __device__ __forceinline__ const uint16_t* earlier(int part, int age) const
    {
        return reinterpret_cast<const uint16_t*>(window[part]) + (age - 1) * kDim;
    }
};

// What a token of the launch projects to, or by a negative number one before them.
__device__ __forceinline__ const uint16_t* projected_by(const GdnStreamedBlockArguments& args,
                                                        const Head& head, int token)
{
    return static_cast<const uint16_t*>(args.projected) +
           (static_cast<int64_t>(token) * args.rows + head.row) * args.stride;
}

// By a group's threads: each asks for its share.
__device__ __forceinline__ void ask_for_tokens(const GdnStreamedBlockArguments& args,
                                               const Head& head, int count, Beside& beside,
                                               int thread)
{
    constexpr int kPieces = kDim / 8, kOfToken = 4 * kPieces;
    const int part = thread % kOfToken / kPieces, piece = thread % kPieces;
    const int from = part < 3 ? head.channel(args, part) : args.channels + head.value_head * kDim;
    for (int token = thread / kOfToken; token < min(count, args.tokens);
         token += kTeamThreads / kOfToken) {
        copy_chunk(reinterpret_cast<uint4*>(beside.raw[token][part]) + piece,
                   projected_by(args, head, token) + from + piece * 8);
    }
    commit_copies();
}

// A group's own, so that none waits for another's turn.
struct alignas(1024) Inbox {
    float stages[kStages][kStageFloats];  // where boxes are swizzled
    Beside beside;
    uint64_t full[kStages], empty[kStages], beside_full, beside_empty;

    __device__ __forceinline__ void init()
    {
        for (int stage = 0; stage < kStages; ++stage) {
            init_barrier(shared_address(&full[stage]), 1);
            init_barrier(shared_address(&empty[stage]), kTeamWarps);
        }
        init_barrier(shared_address(&beside_full), 2);  // window and kept tokens
        init_barrier(shared_address(&beside_empty), kTeamWarps);
    }
};

// Stages are numbered from a group's first on.
struct Stage {
    int place, parity;

    __device__ __forceinline__ explicit Stage(int number)
        : place(number % kStages), parity(number / kStages % 2)
    {
    }
};

// A warp has read what it is about to give back, and waits for it: an arrival does not wait for
// loads before it whose values nobody has used yet, and the copy engine might overtake them.
__device__ __forceinline__ void give_back(uint64_t& empty)
{
    hand_over();
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive_here(shared_address(&empty));
}

// Where a stage has two columns of a row.
__device__ __forceinline__ const float2& two_of(const float* stage, int row, int column)
{
    constexpr int kChunkFloats = 16 / sizeof(float);
    const int chunk = column % kStripColumns / kChunkFloats ^ row % kSwizzledRows;
    return *reinterpret_cast<const float2*>(
        stage + (column / kStripColumns * kStageRows + row) * kStripColumns + chunk * kChunkFloats +
        column % kChunkFloats);
}

// A stage, from a row of all states' on. It is read once: the L2 cache need not hold it.
__device__ __forceinline__ void copy_stage(uint32_t to, const CUtensorMap& states, int row,
                                           uint32_t barrier)
{
    asm volatile(
        "{\n"
        ".reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %3}], [%2], policy;\n"
        "}" ::"r"(to),
        "l"(&states), "r"(barrier), "r"(0), "r"(row)
        : "memory");
}

// By two threads for each group, one for states and one for what is beside them: the engine is
// asked slowly.
struct Feeder {
    const GdnStreamedBlockArguments& args;
    Inbox& inbox;

    __device__ __forceinline__ void copy(void* to, const void* from, int bytes) const
    {
        copy_bytes(shared_address(to), from, bytes, shared_address(&inbox.beside_full));
    }

    __device__ __forceinline__ void expect(int bytes) const
    {
        expect_bytes(shared_address(&inbox.beside_full), bytes);
    }

    __device__ __forceinline__ void send_older(const Head& head) const
    {
        constexpr int kPartBytes = sizeof(inbox.beside.raw[0][0]);
        expect((args.ahead ? 9 * kPartBytes : sizeof(inbox.beside.window)) +
               sizeof(inbox.beside.taps));
#pragma unroll
        for (int part = 0; part < 3; ++part) {
            if (args.ahead) {
#pragma unroll
                for (int age = 1; age < kTaps; ++age) {
                    copy(const_cast<uint16_t*>(inbox.beside.earlier(part, age)),
                         projected_by(args, head, -age) + head.channel(args, part), kPartBytes);
                }
            } else {
                copy(inbox.beside.window[part],
                     static_cast<const uint2*>(args.window) + head.of_channels(args, part),
                     sizeof(inbox.beside.window[part]));
            }
            copy(inbox.beside.taps[part],
                 static_cast<const uint2*>(args.conv_weight) + head.channel(args, part),
                 sizeof(inbox.beside.taps[part]));
        }
    }

    __device__ __forceinline__ void send_kept(const Head& head, const BlockPlace& place) const
    {
        Beside& beside = inbox.beside;
        const int oldest = place.in_ring(args, -place.kept);
        const int64_t of_head = head.of_values(args) * args.places,
                      of_key = head.of_keys(args) * args.places;
        constexpr int kDeltaBytes = sizeof(beside.deltas[0]), kKeyBytes = sizeof(beside.keys[0]);
        expect(args.places * 4 + place.kept * (kDeltaBytes + kKeyBytes));
        copy(beside.decays, args.decays + of_head, args.places * 4);
        // Up to the ring's end, and from its start.
        const int upper = min(place.kept, args.places - oldest), lower = place.kept - upper;
        const auto send = [&](int to, int from, int count) {
            if (!count) return;
            copy(beside.deltas[to], args.deltas + (of_head + from) * kDim, count * kDeltaBytes);
            copy(beside.keys[to],
                 static_cast<const uint4*>(args.keys) + (of_key + from) * (kDim / 8),
                 count * kKeyBytes);
        };
        send(0, oldest, upper);
        send(upper, 0, lower);
    }

    // What is beside, a turn ahead; the first window and taps before the kernel ahead has ended.
    __device__ __forceinline__ void run_beside(int item, int step) const
    {
        if (item >= args.items()) return;
        if (args.ahead) wait_for_predecessor();  // it has projected the tokens before
        send_older(Head(args, item));
        wait_for_predecessor();
        for (int turn = 0; item < args.items(); ++turn, item += step) {
            const Head head(args, item);
            BlockPlace place;
            place.load(args, head.row);
            if (turn) {
                wait_for_phase(shared_address(&inbox.beside_empty), (turn - 1) % 2);
                if (place.count) {
                    send_older(head);
                } else {
                    arrive_here(shared_address(&inbox.beside_full));
                }
            }
            if (place.count) {
                send_kept(head, place);
            } else {
                arrive_here(shared_address(&inbox.beside_full));
            }
        }
    }

    // The first states come before the kernel ahead has ended; those of rows that are none do not.
    __device__ __forceinline__ void run_states(int item, int step) const
    {
        if (args.ahead) wait_for_predecessor();  // it has written states
        const auto is_some = [&](int of) {       // loaded a turn ahead
            return of < args.items() && args.counts[of / args.value_heads] > args.ahead;
        };
        int number = 0;
        bool there = true, next = false;
        for (; item < args.items(); item += step, there = next) {
#pragma unroll 1
            for (int part = 0; part < kHeadStages; ++part, ++number) {
                const Stage stage(number);
                const uint32_t full = shared_address(&inbox.full[stage.place]);
                if (number == kStages) {
                    wait_for_predecessor();
                    there = is_some(item);
                }
                if (part == kStages) next = is_some(item + step);
                if (number >= kStages) {
                    wait_for_phase(shared_address(&inbox.empty[stage.place]), stage.parity ^ 1);
                }
                if (there) {
                    expect_bytes(full, kStageBytes);
                    copy_stage(shared_address(inbox.stages[stage.place]), args.states,
                               item * kDim + part * kStageRows, full);
                } else {
                    arrive_here(full);
                }
            }
        }
    }
};

}  // namespace ds_hybrid
