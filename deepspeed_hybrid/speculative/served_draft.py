# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A draft model as it serves: what :class:`DFlashDraft` computes, in a handful of launches a layer.

Products that read the same input are one, over weights that lie side by side, and norms are split between the
products around them, as in the target's own decode step. All layers' keys and values of the context are one product.
"""

import copy

import torch

from deepspeed_hybrid.ops.draft_attention import draft_attention
from deepspeed_hybrid.ops.draft_context import draft_context
from deepspeed_hybrid.ops.embedded_rows import embedded_rows
from deepspeed_hybrid.ops.fused_linear import normed_linear, normed_rows, residual_linear
from deepspeed_hybrid.ops.rotary_tables import rotary_tables
from deepspeed_hybrid.segments.weights import FusedLinear, FusedTensor
from deepspeed_hybrid.speculative.config import SLIDING
from deepspeed_hybrid.speculative.copies import copy_weights
from deepspeed_hybrid.speculative.draft import DFlashDraft
from deepspeed_hybrid.speculative.draft_cache import DraftCache

# Shapes: M tokens of any rows, D hidden, C features, L layers, G key heads, E dimensions of a head, R rotated ones.


class ServedDraft:
    """A copy of a draft model.

    Args:
        source: the model to copy; ``refresh()`` copies its weights again.
        dtype, device: of the copy.
    """

    @torch.inference_mode(False)  # whoever makes it there may refresh() it elsewhere
    @torch.no_grad()
    def __init__(self, source: DFlashDraft, dtype: torch.dtype, device: torch.device):
        self.model = copy.deepcopy(source).requires_grad_(False).eval().to(device=device, dtype=dtype)
        self.config = self.model.config
        layers = self.model.layers
        attentions = [layer.self_attn for layer in layers]
        self._inputs = [FusedLinear([one.q_proj, one.k_proj, one.v_proj]) for one in attentions]
        self._gate_up = [FusedLinear([layer.mlp.gate_proj, layer.mlp.up_proj]) for layer in layers]
        self._context = FusedLinear([part for one in attentions for part in (one.k_proj, one.v_proj)], may_move=False)
        self._key_norms = FusedTensor([one.k_norm.weight for one in attentions])
        self._inv_freq = self.config.rope.inv_freq().to(device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self, source: DFlashDraft) -> None:
        """Copy the source's weights, in place: every address stays."""
        copy_weights(self.model, source)
        self._context.refresh()

    def tensors(self) -> list[torch.Tensor]:
        """Everything that is the copy's own."""
        packed = [tensor.data for tensor in self._context.tensors if self._context.packed_bytes]
        return [*self.model.parameters(), *packed]

    def _rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [M, R] of positions [M] int64, contiguous."""
        rope, dtype = self.config.rope, self.model.fc.weight.dtype
        cos, sin = rotary_tables(positions[None], self._inv_freq, rope.scaling, dtype)
        return cos[0], sin[0]

    def observe(
        self,
        features: torch.Tensor,
        cache: DraftCache,
        slots: torch.Tensor | None,
        position: torch.Tensor,
        idle: torch.Tensor | None,
        lanes: int,
    ) -> None:
        """The context's keys and values of all layers, from features [M, C] into the cache.

        Args:
            slots, position, idle, lanes: as of :func:`deepspeed_hybrid.ops.draft_context.draft_context`.
        """
        model, eps = self.model, self.config.rms_norm_eps
        plain = features.new_empty(0, features.shape[0], dtype=torch.float32)  # features have no norm
        hidden = normed_linear(features.to(model.fc.weight.dtype), plain, eps, model.fc.weight, None, False)
        scaled, squares = normed_rows(hidden, model.hidden_norm.weight, 0.0, eps)
        product = normed_linear(scaled, squares, eps, self._context.weight, self._context.bias, False)
        norms = self._key_norms.data.view(self.config.num_layers, -1)
        tables = self._rotary(position)
        draft_context(product, *tables, norms, cache.keys, cache.values, slots, position, idle, lanes, eps)

    def block(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        embedding: torch.Tensor,
        cache: DraftCache,
        places: int,
        start: torch.Tensor,
        parked: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks through all layers, each over its lane's context.

        Args:
            ids: [T * B] int64, in rows token by token: of the anchors, and of masks.
            positions: [T * B] int64, theirs.
            embedding: the target's, [vocabulary, D].
            places: of the cache that may hold any context.
            start, parked: as of :func:`deepspeed_hybrid.ops.draft_attention.draft_attention`.

        Returns:
            scaled [T * B, D] and squares of the last norm, as :mod:`deepspeed_hybrid.ops.fused_linear` defines them:
            ready for the target's head.
        """
        config, layers, eps = self.config, self.model.layers, self.config.rms_norm_eps
        norms = [*(layer.input_layernorm.weight for layer in layers), self.model.norm.weight]
        hidden, scaled, squares = embedded_rows(ids, embedding, norms[0], 0.0, eps)
        tables = self._rotary(positions)
        for index, layer in enumerate(layers):
            attention, inputs = layer.self_attn, self._inputs[index]
            projected = normed_linear(scaled, squares, eps, inputs.weight, inputs.bias, False)
            mixed = draft_attention(
                projected,
                *tables,
                cache.keys[:, :places, index],
                cache.values[:, :places, index],
                start,
                parked,
                attention.q_norm.weight,
                attention.k_norm.weight,
                eps,
                config.num_heads,
                config.head_dim**-0.5,
                config.causal[index],
                config.sliding_window if config.layer_types[index] == SLIDING else 0,
            )
            output, mlp_norm = attention.o_proj, layer.post_attention_layernorm.weight
            hidden, scaled, squares = residual_linear(mixed, output.weight, output.bias, hidden, mlp_norm, 0.0, eps)
            gated = normed_linear(scaled, squares, eps, self._gate_up[index].weight, None, True)
            down = layer.mlp.down_proj.weight
            hidden, scaled, squares = residual_linear(gated, down, None, hidden, norms[index + 1], 0.0, eps)
        return scaled, squares
