// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "../gdn_streamed/heads.cuh"
#include "barrier.cuh"
#include "dependent_launch.cuh"
#include "place.cuh"

// What a group's turns need, on its way into shared memory by the copy engine: states, a quarter at
// a time through a ring, and beside each state what is kept there and what the tokens bring.

namespace ds_hybrid {

constexpr int kStageRows = 32, kHeadStages = kDim / kStageRows;
constexpr int kStageFloats = kStageRows * kDim, kStageBytes = kStageFloats * 4;
constexpr int kStages = 2;
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

// A group's own, so that none waits for another's turn.
struct alignas(128) Inbox {
    float stages[kStages][kStageFloats];
    Beside beside;
    uint64_t full[kStages], empty[kStages], beside_full, beside_empty;

    __device__ __forceinline__ void init()
    {
        for (int stage = 0; stage < kStages; ++stage) {
            init_barrier(shared_address(&full[stage]), 1);
            init_barrier(shared_address(&empty[stage]), kGroupWarps);
        }
        init_barrier(shared_address(&beside_full), 3);  // window, tokens and kept tokens
        init_barrier(shared_address(&beside_empty), kGroupWarps);
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

// A warp has read what it is about to give back.
__device__ __forceinline__ void give_back(uint64_t& empty)
{
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive_here(shared_address(&empty));
}

// By one thread for each group.
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

    __device__ __forceinline__ const uint16_t* projected(const Head& head, int token) const
    {
        return static_cast<const uint16_t*>(args.projected) +
               (static_cast<int64_t>(token) * args.rows + head.row) * args.stride;
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
                         projected(head, -age) + head.channel(args, part), kPartBytes);
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

    __device__ __forceinline__ void send_tokens(const Head& head, int count) const
    {
        constexpr int kPartBytes = sizeof(inbox.beside.raw[0][0]);
        const int tokens = min(count, args.tokens);
        expect(tokens * 4 * kPartBytes);
#pragma unroll 1
        for (int token = 0; token < tokens; ++token) {
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const int from =
                    part < 3 ? head.channel(args, part) : args.channels + head.value_head * kDim;
                copy(inbox.beside.raw[token][part], projected(head, token) + from, kPartBytes);
            }
        }
    }

    __device__ __forceinline__ void send_kept(const Head& head, const BlockPlace& place) const
    {
        Beside& beside = inbox.beside;
        const int oldest = place.oldest(args);
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

    // Nothing, as often as that would have been something.
    __device__ __forceinline__ void send_none(int times) const
    {
        for (int i = 0; i < times; ++i) arrive_here(shared_address(&inbox.beside_full));
    }

    __device__ __forceinline__ void send_next(int item, int turn, const BlockPlace& place) const
    {
        if (item >= args.items()) return;
        wait_for_phase(shared_address(&inbox.beside_empty), turn % 2);
        if (!place.count) return send_none(3);
        const Head head(args, item);
        send_older(head);
        send_tokens(head, place.count);
        send_kept(head, place);
    }

    // The first state and what is old beside it come before the kernel ahead has ended; what rows
    // that are none would need does not come at all.
    __device__ __forceinline__ void run(int item, int step) const
    {
        const int items = args.items();
        if (item >= items) return;
        if (args.ahead) wait_for_predecessor();  // which has written states
        send_older(Head(args, item));
        BlockPlace here = {}, next = {};
        here.count = 1;
        int number = 0;
        for (int turn = 0; item < items; ++turn, item += step) {
            const int later = item + step;
            if (turn && later < items) next.load(args, later / args.value_heads);
#pragma unroll 1
            for (int part = 0; part < kHeadStages; ++part, ++number) {
                if (number == kStages) {
                    wait_for_predecessor();
                    here.load(args, item / args.value_heads);
                    if (later < items) next.load(args, later / args.value_heads);
                    if (here.count) {
                        send_tokens(Head(args, item), here.count);
                        send_kept(Head(args, item), here);
                    } else {
                        send_none(2);
                    }
                }
                if (part == kStages && !here.last) send_next(later, turn, next);
                const Stage stage(number);
                const uint32_t full = shared_address(&inbox.full[stage.place]);
                if (number >= kStages) {
                    wait_for_phase(shared_address(&inbox.empty[stage.place]), stage.parity ^ 1);
                }
                if (here.count || number < kStages) {
                    const int64_t place = static_cast<int64_t>(item) * kHeadStages + part;
                    expect_bytes(full, kStageBytes);
                    copy_bytes_once(shared_address(inbox.stages[stage.place]),
                                    args.state + place * kStageFloats, kStageBytes, full);
                } else {
                    arrive_here(full);
                }
            }
            if (here.last) send_next(later, turn, next);  // what is beside was in use till now
            here = next;
        }
    }
};

}  // namespace ds_hybrid
