# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A draft model at work: its context follows the target's committed tokens, and it proposes a block at a time."""

import copy
from typing import Protocol

import torch
import torch.nn.functional as F

from deepspeed_hybrid.cache.layers import StepPlan
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall
from deepspeed_hybrid.generation.state import DecodeState
from deepspeed_hybrid.speculative.draft import DFlashDraft, attention, rotated, visible
from deepspeed_hybrid.speculative.draft_cache import DraftCache


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


class DFlashDrafter:
    """Serves a copy of a draft model in the target's dtype, over the target's live embedding and head.

    Args:
        source: the model to copy; ``refresh()`` copies its weights again.
        call: the target's forward.
    """

    def __init__(self, source: DFlashDraft, call: ModelCall):
        self.source, self.call = source, call
        self.layer_ids = source.config.target_layer_ids
        self.most_tokens = source.config.block_size
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
        self._stack()

    def _stack(self) -> None:
        """One product for the context's keys and values of all layers: [L * 2 * G * E, D], keys before values."""
        attentions = [layer.self_attn for layer in self.draft.layers]
        projections = [part for one in attentions for part in (one.k_proj, one.v_proj)]
        self._weight = torch.cat([projection.weight for projection in projections])
        self._bias = None
        if self.draft.config.attention_bias:
            self._bias = torch.cat([projection.bias for projection in projections])
        self._key_norms = torch.stack([one.k_norm.weight for one in attentions])

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the source's weights, in place: every address stays."""
        for mine, theirs in zip(self.draft.parameters(), self.source.parameters(), strict=True):
            mine.copy_(theirs)
        stacks = self._weight, self._bias, self._key_norms
        self._stack()
        for old, new in zip(stacks, (self._weight, self._bias, self._key_norms), strict=True):
            if old is not None:
                old.copy_(new)
        self._weight, self._bias, self._key_norms = stacks

    def describe(self) -> str:
        config = self.draft.config
        return f"DFlash, {config.num_layers} layers over features of layers {list(config.target_layer_ids)}"

    @property
    def weight_bytes(self) -> int:
        stacks = [part for part in (self._weight, self._bias, self._key_norms) if part is not None]
        return sum(part.nbytes for part in (*self.draft.parameters(), *stacks))

    # ----------------------------------------------------------------------------------------------------- context

    def attach(self, cache: SlotCache) -> None:
        weight = self.call.embedding.weight
        if (weight.dtype, weight.device) != (self.dtype, self.device):
            self._serve()
        capacity = cache.capacity + self.most_tokens  # the last block may reach beyond the target's last position
        self.cache = DraftCache(self.draft.config, cache.slots, capacity, self.dtype, self.device)
        cache.companions.append(self.cache)

    def cache_bytes(self, slots: int, capacity: int) -> int:
        config = self.draft.config
        row = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize
        return (slots + 1) * (capacity + self.most_tokens) * row

    def release(self) -> None:
        self.cache = None

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
        block = plan.block
        if block is not None:  # token by token: row i * B + b is token i of lane b
            features = features.reshape(block.tokens, plan.lanes, -1).transpose(0, 1)
            positions = block.positions.t()
            slots = self._lane_slots(plan.lanes, plan.parked)[:, None].masked_fill(block.idle.t(), self.cache.slots)
        else:
            positions = plan.write_positions
            slots = self._lane_slots(plan.lanes, plan.parked) if plan.slots is None else plan.slots
        if plan.first:
            self.cache.clear(plan.slots)
        keys, values = self.context_keys_values(self.draft.context(features), positions)
        self.cache.write(slots, positions, keys, values)

    def _lane_slots(self, lanes: int, parked: torch.Tensor) -> torch.Tensor:
        """[B] int64: each lane's slot, or scratch where it is parked."""
        return torch.arange(lanes, device=parked.device).masked_fill(parked, self.cache.slots)

    # ----------------------------------------------------------------------------------------------------- proposals

    def propose(self, state: DecodeState, tokens: int, kv_length: int) -> torch.Tensor:
        lanes, config, device = state.token.numel(), self.draft.config, state.token.device
        ids = torch.full((lanes, tokens), config.mask_token_id, dtype=torch.int64, device=device)
        ids[:, 0] = state.token
        start = state.position.masked_fill(state.parked, 0)
        positions = start[:, None] + torch.arange(tokens, device=device)
        end = (start + tokens)[:, None].expand_as(positions)
        slots = self._lane_slots(lanes, state.parked)
        length = min(kv_length + tokens, self.cache.capacity)
        places = torch.arange(length, device=device)[None]
        masks: dict[tuple, torch.Tensor] = {}

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            self.cache.write_layer(layer, slots, positions, keys, values)
            kind = (config.layer_types[layer], config.causal[layer])
            if kind not in masks:
                masks[kind] = visible(config, layer, positions, places, end)
            return attention(queries, *self.cache.read_layer(layer, lanes, length), masks[kind])

        embeddings = F.embedding(ids, self.call.embedding.weight)
        hidden = self.draft.block(embeddings, positions, attend)
        # Not the head's forward: while the target generates it holds the target's last norm too.
        head = self.call.model.get_output_embeddings()
        # A head may have more rows than the embedding, which has to read these.
        return F.linear(hidden[:, 1:], head.weight, head.bias)[..., : self.call.known_ids].argmax(dim=-1)
