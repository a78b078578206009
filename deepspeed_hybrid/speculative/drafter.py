# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A draft model at work: its context follows the target's committed tokens, and it proposes a block at a time."""

from typing import Protocol

import torch

from deepspeed_hybrid.cache.layers import StepPlan
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall
from deepspeed_hybrid.generation.state import DecodeState
from deepspeed_hybrid.ops.block_step import block_inputs
from deepspeed_hybrid.ops.fused_linear import normed_linear
from deepspeed_hybrid.speculative.draft import DFlashDraft
from deepspeed_hybrid.speculative.draft_cache import DraftCache
from deepspeed_hybrid.speculative.served_draft import ServedDraft


class Drafter(Protocol):
    """What proposes tokens. It may be wrong in any way: only speed depends on it."""

    layer_ids: tuple[int, ...]  # whose features it wants, in this order; none: ()

    def attach(self, cache: SlotCache) -> None:
        """Hang what it keeps of each slot on a new cache, to be forked and moved with it."""

    def release(self) -> None:
        """Give that up."""

    def cache_bytes(self, slots: int, capacity: int) -> int:
        """Of that."""

    def observe(self, features: torch.Tensor, plan: StepPlan) -> None:
        """See a forward's features [B, T, C], of tokens where ``plan`` puts them."""

    def propose(self, state: DecodeState, tokens: int, kv_length: int) -> torch.Tensor:
        """[B, tokens - 1] int64 in the vocabulary: guesses of what follows every lane's last token."""

    def refresh(self) -> None:
        """Follow weights that were trained since."""

    def describe(self) -> str:
        """In a few words."""

    @property
    def weight_bytes(self) -> int:
        """Of weights that it holds beside the target's."""


class DFlashDrafter:
    """Serves a copy of a draft model in the target's dtype, over the target's live embedding and head.

    Args:
        source: the model to copy; ``refresh()`` copies its weights again.
        call: the target's forward.
        cache_dtype: of the context's keys and values: float8_e4m3fn, or None for the target's.
    """

    def __init__(self, source: DFlashDraft, call: ModelCall, cache_dtype: torch.dtype | None = None):
        self.source, self.call, self._cache_dtype = source, call, cache_dtype
        config = source.config
        self.layer_ids = config.target_layer_ids
        self.row = config.num_layers, config.num_kv_heads, config.head_dim
        self.cache: DraftCache | None = None
        self._serve()

    # ----------------------------------------------------------------------------------------------------- weights

    def _serve(self) -> None:
        """Make the copy, as the target is now."""
        weight = self.call.embedding.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.draft = ServedDraft(self.source, self.dtype, self.device)

    def refresh(self) -> None:
        """Copy the source's weights, in place: every address stays."""
        self.draft.refresh(self.source)

    def describe(self) -> str:
        config = self.source.config
        kept = "" if self._cache_dtype is None else f", kept in {str(self._cache_dtype).removeprefix('torch.')}"
        return f"DFlash, {config.num_layers} layers over features of layers {list(config.target_layer_ids)}{kept}"

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the context's keys and values."""
        return self._cache_dtype or self.dtype

    @property
    def weight_bytes(self) -> int:
        return sum(part.nbytes for part in self.draft.tensors())

    # ----------------------------------------------------------------------------------------------------- context

    def attach(self, cache: SlotCache) -> None:
        weight = self.call.embedding.weight
        if (weight.dtype, weight.device) != (self.dtype, self.device):
            self._serve()
        self.cache = DraftCache(self.row, cache.slots, cache.capacity, self.cache_dtype, self.device)
        cache.companions.append(self.cache)

    def cache_bytes(self, slots: int, capacity: int) -> int:
        return DraftCache.nbytes(self.row, slots, capacity, self.cache_dtype)

    def release(self) -> None:
        self.cache = None

    def observe(self, features: torch.Tensor, plan: StepPlan) -> None:
        slots = None
        if plan.block is not None:
            position, idle = plan.block.positions.flatten(), plan.block.idle.flatten()
        else:
            position, idle = plan.write_positions.flatten(), plan.parked
        if plan.slots is not None:
            slots = plan.slots.repeat_interleave(plan.write_positions.shape[1])
            idle = None if plan.token_mask is None else ~plan.token_mask.flatten()
        rows = features.reshape(-1, features.shape[-1])
        self.draft.observe(rows, self.cache, slots, position, idle, plan.lanes)

    # ----------------------------------------------------------------------------------------------------- proposals

    def propose(self, state: DecodeState, tokens: int, kv_length: int) -> torch.Tensor:
        rows = state.token, state.position, state.length, state.limit, state.parked
        ids, positions, _, _ = block_inputs(*rows, None, self.source.config.mask_token_id, tokens)
        places = min(kv_length, self.cache.capacity)
        embedding, where = self.call.embedding.weight, (state.position, state.parked)
        scaled, squares = self.draft.block(ids.flatten(), positions.flatten(), embedding, self.cache, places, *where)
        # Not the head's forward: while the target generates it holds the target's last norm too.
        head, eps = self.call.model.get_output_embeddings(), self.source.config.rms_norm_eps
        logits = normed_linear(scaled, squares, eps, head.weight, head.bias, False)
        # A head may have more rows than the embedding, which has to read these.
        return logits.unflatten(0, ids.shape)[1:, :, : self.call.known_ids].argmax(dim=-1).t()
