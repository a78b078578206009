# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A draft model at work: its context follows the target's committed tokens, and it proposes a block at a time."""

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F

from deepspeed_hybrid.cache.layers import StepPlan
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall
from deepspeed_hybrid.generation.state import DecodeState
from deepspeed_hybrid.speculative.draft import DFlashDraft, attention, rotated, visible
from deepspeed_hybrid.speculative.serving import ServedDraft


class Drafter(Protocol):
    """What proposes tokens. It may be wrong in any way: only speed depends on it."""

    layer_ids: tuple[int, ...]  # whose features it wants, in this order; none: ()
    most_tokens: int  # of a block, the anchor among them

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


class DFlashDrafter(ServedDraft):
    """Serves a DFlash draft model.

    Args:
        source: the model to copy; ``refresh()`` copies its weights again.
        call: the target's forward.
    """

    def __init__(self, source: DFlashDraft, call: ModelCall):
        config = source.config
        self.layer_ids = config.target_layer_ids
        super().__init__(source, call, (config.num_layers, config.num_kv_heads, config.head_dim), config.block_size)

    # ----------------------------------------------------------------------------------------------------- weights

    def _serve(self) -> None:
        super()._serve()
        self._weight, self._bias, self._key_norms = self._stacks()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _stacks(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """One product for the context's keys and values of all layers: [L * 2 * G * E, D], keys before values; its
        bias; and the norms of keys."""
        attentions = [layer.self_attn for layer in self.draft.layers]
        projections = [part for one in attentions for part in (one.k_proj, one.v_proj)]
        biased = self.draft.config.attention_bias
        return (
            torch.cat([projection.weight for projection in projections]),
            torch.cat([projection.bias for projection in projections]) if biased else None,
            torch.stack([one.k_norm.weight for one in attentions]),
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        super().refresh()
        for old, new in zip((self._weight, self._bias, self._key_norms), self._stacks(), strict=True):
            if old is not None:
                old.copy_(new)

    def held_weights(self) -> Iterator[torch.Tensor]:
        yield from super().held_weights()
        yield from (part for part in (self._weight, self._bias, self._key_norms) if part is not None)

    def describe(self) -> str:
        config = self.draft.config
        return f"DFlash, {config.num_layers} layers over features of layers {list(config.target_layer_ids)}"

    # ----------------------------------------------------------------------------------------------------- context

    def context_keys_values(self, context: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`DFlashDraft.context_keys_values`, all layers in one product."""
        config = self.draft.config
        product = F.linear(context, self._weight, self._bias)
        parts = product.unflatten(-1, (config.num_layers, 2, config.num_kv_heads, config.head_dim))
        keys, values = parts.unbind(dim=-3)
        wide = keys.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        keys = normed.to(keys.dtype) * self._key_norms[:, None]
        cos, sin = (table[:, :, None] for table in self.draft.rotary(positions, context.dtype))
        return rotated(keys, (cos, sin)), values

    def observe(self, features: torch.Tensor, plan: StepPlan) -> None:
        placed = self.placed(features, plan)
        if plan.first:
            self.cache.clear(plan.slots)
        keys, values = self.context_keys_values(self.draft.context(placed.features), placed.positions)
        self.cache.write(placed.slots, placed.positions, keys, values)

    # ----------------------------------------------------------------------------------------------------- proposals

    def propose(self, state: DecodeState, tokens: int, kv_length: int) -> torch.Tensor:
        lanes, config, device = state.token.numel(), self.draft.config, state.token.device
        ids = torch.full((lanes, tokens), config.mask_token_id, dtype=torch.int64, device=device)
        ids[:, 0] = state.token
        start = state.position.masked_fill(state.parked, 0)
        positions = start[:, None] + torch.arange(tokens, device=device)
        end = (start + tokens)[:, None].expand_as(positions)
        slots = self.lane_slots(lanes, state.parked)[:, None]
        length = min(kv_length + tokens, self.cache.capacity)
        places = torch.arange(length, device=device)[None]
        masks: dict[tuple, torch.Tensor] = {}

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            self.cache.write_layer(layer, slots, positions, keys, values)
            kind = (config.layer_types[layer], config.causal[layer])
            if kind not in masks:
                masks[kind] = visible(config, layer, positions, places, end)
            return attention(queries, *self.cache.read_layer(layer, lanes, length), masks[kind])

        return self.guesses(self.draft.block(self.embedded(ids), positions, attend)[:, 1:])
