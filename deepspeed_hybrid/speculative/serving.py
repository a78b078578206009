# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What every draft model at work has: a copy that serves, keys and values of every slot, the target's own head."""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_hybrid.cache.layers import StepPlan
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall
from deepspeed_hybrid.speculative.draft_cache import DraftCache, RowShape


class Placed(NamedTuple):
    """A forward's tokens, a row for each of the target's, and where they go."""

    features: torch.Tensor  # [B, T, C]
    slots: torch.Tensor  # [B, T] or [B, 1] int64; the scratch slot for tokens that are none
    positions: torch.Tensor  # [B, T] int64


class ServedDraft:
    """Serves a copy of a draft model in the target's dtype, over the target's live embedding and head.

    Args:
        source: the model to copy; ``refresh()`` copies its weights again.
        call: the target's forward.
        row: what the model keeps of a position.
        most_tokens: of a block, the anchor among them.
    """

    def __init__(self, source: nn.Module, call: ModelCall, row: RowShape, most_tokens: int):
        self.source, self.call = source, call
        self.row, self.most_tokens = row, most_tokens
        self.cache: DraftCache | None = None
        self._serve()

    # ----------------------------------------------------------------------------------------------------- weights

    @torch.inference_mode(False)  # whoever makes it there may refresh() it elsewhere
    @torch.no_grad()
    def _serve(self) -> None:
        """Make the copy, as the target is now."""
        weight = self.call.embedding.weight
        self.device, self.dtype = weight.device, weight.dtype
        copied = copy.deepcopy(self.source).requires_grad_(False).eval()
        self.draft = copied.to(device=self.device, dtype=self.dtype)

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the source's weights, in place: every address stays."""
        for mine, theirs in zip(self.draft.parameters(), self.source.parameters(), strict=True):
            mine.copy_(theirs)

    def held_weights(self) -> Iterator[torch.Tensor]:
        """All that is kept beside the target's."""
        yield from self.draft.parameters()

    @property
    def weight_bytes(self) -> int:
        return sum(part.nbytes for part in self.held_weights())

    # ----------------------------------------------------------------------------------------------------- slots

    def attach(self, cache: SlotCache) -> None:
        weight = self.call.embedding.weight
        if (weight.dtype, weight.device) != (self.dtype, self.device):
            self._serve()
        capacity = cache.capacity + self.most_tokens  # the last block may reach beyond the target's last position
        self.cache = DraftCache(self.row, cache.slots, capacity, self.dtype, self.device)
        cache.companions.append(self.cache)

    def cache_bytes(self, slots: int, capacity: int) -> int:
        layers, heads, head_dim = self.row
        position = 2 * layers * heads * head_dim * self.dtype.itemsize
        return (slots + 1) * (capacity + self.most_tokens) * position

    def release(self) -> None:
        self.cache = None

    def placed(self, features: torch.Tensor, plan: StepPlan) -> Placed:
        """Features as a forward has them, by the slots and positions that it writes to."""
        block = plan.block
        if block is None:
            slots = self.lane_slots(plan.lanes, plan.parked) if plan.slots is None else plan.slots
            return Placed(features, slots[:, None], plan.write_positions)
        # Token by token: row i * B + b is token i of lane b.
        features = features.reshape(block.tokens, plan.lanes, -1).transpose(0, 1)
        slots = self.lane_slots(plan.lanes, plan.parked)[:, None].masked_fill(block.idle.t(), self.cache.slots)
        return Placed(features, slots, block.positions.t())

    def lane_slots(self, lanes: int, parked: torch.Tensor) -> torch.Tensor:
        """[B] int64: each lane's slot, or scratch where it is parked."""
        return torch.arange(lanes, device=parked.device).masked_fill(parked, self.cache.slots)

    # ----------------------------------------------------------------------------------------------------- tokens

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] int64 -> [..., D]."""
        return F.embedding(ids, self.call.embedding.weight)

    def guesses(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens by the target's head, [..., D] -> [...] int64."""
        # Not the head's forward: while the target generates it holds the target's last norm too.
        head = self.call.model.get_output_embeddings()
        # A head may have more rows than the embedding, which has to read these.
        return F.linear(hidden, head.weight, head.bias)[..., : self.call.known_ids].argmax(dim=-1)
