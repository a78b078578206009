# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The draft model: a few decoder layers that see the target's features as context and guess a block at once.

It has no embedding and no head: both are the target's, passed in at each call.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_hybrid.speculative.config import DraftConfig
from deepspeed_hybrid.speculative.rope import Rotary, rotated

# Shapes: B rows, T block tokens, N context tokens, D hidden, C = D * features, L layers, H/G heads, E head_dim.

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class RMSNorm(nn.Module):
    """weight * x / rms(x). Not the target's class: Qwen3.5's stores its weights around zero."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class DraftAttention(nn.Module):
    """Projections and head norms; who attends to what is the caller's business."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        heads, kv_heads, bias = config.num_heads, config.num_kv_heads, config.attention_bias
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * config.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, rotary: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, N, D] -> keys and values [B, N, G, E], keys normalised and rotated."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotated(keys, rotary), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def queries(self, x: torch.Tensor, rotary: tuple) -> torch.Tensor:
        """[B, T, D] -> [B, T, H, E]."""
        return rotated(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rotary)


class DraftMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor, rotary: tuple, attend: Callable) -> torch.Tensor:
        normed = self.input_layernorm(x)
        queries = self.self_attn.queries(normed, rotary)
        keys, values = self.self_attn.keys_values(normed, rotary)
        x = x + self.self_attn.o_proj(attend(queries, keys, values).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDraft(nn.Module):
    """A DFlash draft model. Parameters are named as in published checkpoints.

    Args:
        config: its shape.
    """

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.rope)

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """What every layer sees of the target: features [B, N, C], in the order of target_layer_ids -> [B, N, D]."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def context_keys_values(self, context: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all layers, [B, N, L, G, E] each, for context [B, N, D] at positions [B, N]."""
        rotary = self.rotary(positions, context.dtype)
        pairs = [layer.self_attn.keys_values(context, rotary) for layer in self.layers]
        keys, values = (torch.stack(parts, dim=2) for parts in zip(*pairs, strict=True))
        return keys, values

    def block(self, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Block tokens through all layers and the last norm.

        Args:
            embeddings: [B, T, D], of the anchor and of masks.
            positions: [B, T] int64.
            attend: layer number, queries [B, T, H, E], keys and values [B, T, G, E] of the block -> [B, T, H, E].

        Returns:
            [B, T, D], ready for the target's head.
        """
        hidden = embeddings.to(self.fc.weight.dtype)
        rotary = self.rotary(positions, hidden.dtype)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotary, lambda *qkv, index=index: attend(index, *qkv))
        return self.norm(hidden)


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, T, H, E] over keys and values [B, N, G, E]; mask [B, T, N] bool, True where a query sees a key.

    Heads that share keys are queries more of one head, so that nobody has to copy a cache's keys for each of them.
    """
    shared = queries.shape[2] // keys.shape[2]
    packed = queries.unflatten(2, (-1, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    seen = mask[:, None, None].expand(-1, -1, shared, -1, -1).flatten(2, 3)
    mixed = F.scaled_dot_product_attention(packed, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=seen)
    return mixed.unflatten(2, (shared, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
