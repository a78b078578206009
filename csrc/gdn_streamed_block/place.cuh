// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "gdn_streamed_block.h"

namespace ds_hybrid {

// Where a row is, and which of its tokens are in its state.
//
// A token's state has in it all tokens up to a multiple of 16 that is at least seven positions
// back, and so none of a launch that it may be in. Which, goes by its position alone: its bits do
// not depend on how a row's tokens came in blocks. A step finds the state of its predecessor's
// first token, and leaves that of its own.
struct BlockPlace {
    int position, count;
    int place;   // of the launch's first token in its ring
    int kept;    // tokens beside the state, and from which of them on ...
    int first;   // ... they are beside that of the first token, in which those before are
    int last;    // ... and beside that of the last one
    int change;  // which token is the first with the latter; none where the two are the same

    __device__ __forceinline__ void load(const GdnStreamedBlockArguments& args, int row)
    {
        const int begin = static_cast<int>(args.position[row]);
        position = begin + args.ahead;
        count = max(0, static_cast<int>(args.counts[row]) - args.ahead);
        place = position % args.places;
        const int prompt = begin + 1 - static_cast<int>(args.answered[row]);
        const int before = begin - (args.ahead ? 0 : static_cast<int>(args.stepped[row]));
        const auto in_state = [&](int token) { return max(prompt, (token - kLag) & -kTaken); };
        const int found = min(in_state(before), begin);
        kept = position - found;
        first = in_state(position) - found;
        last = in_state(position + args.tokens - 1) - found;
        change = last > first ? found + last + kLag - position : kMostTokens;
    }

    // In the ring, of a token of the launch, or by a negative number of one before them.
    __device__ __forceinline__ int in_ring(const GdnStreamedBlockArguments& args, int token) const
    {
        const int at = place + token;
        return at < 0 ? at + args.places : at < args.places ? at : at - args.places;
    }
};

}  // namespace ds_hybrid
