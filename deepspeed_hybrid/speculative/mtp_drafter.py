# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""An MTP head at work: it follows the target's committed tokens, and proposes a block one token after another.

A token and the hidden state before it have their key and value at the token's position. Every forward of the target
writes them for all of its tokens, with the target's own hidden states: what a proposal wrote there, with the head's,
is gone then, and what lies behind the accepted tokens is written again before anybody sees it. A forward's first token
needs the last hidden state of the forward before, which is why some of them are kept.
"""

import torch

from deepspeed_hybrid.cache.layers import StepPlan
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall, text_model
from deepspeed_hybrid.generation.state import DecodeState
from deepspeed_hybrid.speculative.draft import attention
from deepspeed_hybrid.speculative.mtp import MtpDraft, behind_last_norm
from deepspeed_hybrid.speculative.serving import ServedDraft


class LastHidden:
    """[slots + 1, M, D], a ring for each slot: the target's hidden state at position p is in place p % M.

    A block has at most M tokens, and the one that comes to be the last committed is among them: nobody has to know
    which when they are written.
    """

    def __init__(self, slots: int, places: int, size: int, dtype: torch.dtype, device: torch.device):
        self.places = places
        self.hidden = torch.zeros(slots + 1, places, size, dtype=dtype, device=device)

    def read(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, T, D] of positions [B, T] of slots [B, T] or [B, 1] (int64 both)."""
        return self.hidden[slots, positions % self.places]

    def write(self, slots: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> None:
        """[B, T, D], to positions as :meth:`read` takes them."""
        self.hidden[slots, positions % self.places] = hidden

    def clear(self, slots: torch.Tensor) -> None:
        """What an earlier row left there may be NaN."""
        self.hidden.index_fill_(0, slots, 0.0)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"draft_hidden": self.hidden}


class MtpDrafter(ServedDraft):
    """Serves an MTP head.

    Args:
        source: the head to copy; ``refresh()`` copies its weights again.
        call: the target's forward.
        most_tokens: of a block, the anchor among them.
    """

    def __init__(self, source: MtpDraft, call: ModelCall, most_tokens: int):
        config = source.config
        self.layer_ids: tuple[int, ...] = (len(text_model(call.model).layers) - 1,)
        self.last: LastHidden | None = None
        super().__init__(source, call, (1, config.num_kv_heads, config.head_dim), most_tokens)

    def describe(self) -> str:
        return f"the model's MTP head, up to {self.most_tokens - 1} passes"

    # ----------------------------------------------------------------------------------------------------- context

    def attach(self, cache: SlotCache) -> None:
        super().attach(cache)
        hidden_size = self.draft.config.hidden_size
        self.last = LastHidden(cache.slots, self.most_tokens, hidden_size, self.dtype, self.device)
        cache.companions.append(self.last)

    def cache_bytes(self, slots: int, capacity: int) -> int:
        last = (slots + 1) * self.most_tokens * self.draft.config.hidden_size * self.dtype.itemsize
        return super().cache_bytes(slots, capacity) + last

    def release(self) -> None:
        super().release()
        self.last = None

    def observe(self, features: torch.Tensor, plan: StepPlan) -> None:
        placed, block = self.placed(features, plan), plan.block
        ids = plan.ids if block is None else plan.ids.reshape(block.tokens, plan.lanes).t()
        slots, positions = placed.slots, placed.positions
        if plan.first:
            self.cache.clear(plan.slots)
            self.last.clear(plan.slots)
        hidden = behind_last_norm(self.call.model, placed.features)
        before_first = self.last.read(slots[:, :1], positions[:, :1] - 1)
        before = torch.cat([before_first, hidden[:, :-1]], dim=1)
        # Token 0 has nothing before it. What it writes all the same is at position 0, which no query sees.
        keys, values = self.draft.keys_values(self.draft.merged(self.embedded(ids), before), positions)
        self.cache.write_layer(0, slots, positions, keys, values)
        kept = slice(None) if plan.slots is None else slice(-1, None)  # of a prompt the last token's alone
        self.last.write(slots[:, kept], positions[:, kept], hidden[:, kept])

    # ----------------------------------------------------------------------------------------------------- proposals

    def propose(self, state: DecodeState, tokens: int, kv_length: int) -> torch.Tensor:
        start = state.position.masked_fill(state.parked, 1)[:, None]  # a query at position 0 would see nothing
        slots = self.lane_slots(state.token.numel(), state.parked)[:, None]
        hidden = self.last.read(slots, start - 1)
        length = min(kv_length + tokens, self.cache.capacity)
        ids, guesses = state.token[:, None], []
        for index in range(tokens - 1):
            hidden = self._pass(ids, hidden, slots, start + index, length)
            ids = self.guesses(hidden)
            guesses.append(ids)
        return torch.cat(guesses, dim=1)

    def _pass(
        self, ids: torch.Tensor, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, length: int
    ) -> torch.Tensor:
        """One token a lane, [B, 1] each but for hidden [B, 1, D] -> [B, 1, D]."""
        places = torch.arange(length, device=positions.device)[None, None]
        seen = (places > 0) & (places <= positions[..., None])

        def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            self.cache.write_layer(0, slots, positions, keys, values)
            return attention(queries, *self.cache.read_layer(0, len(positions), length), seen)

        return self.draft(self.draft.merged(self.embedded(ids), hidden), positions, attend)
