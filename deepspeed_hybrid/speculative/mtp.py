# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Qwen3.5's native MTP head: one decoder layer that reads a token and what the target thought before it.

For the token at position q it merges two norms, of the token's embedding and of the target's hidden state at q - 1,
runs one full-attention layer over all such pairs so far, and guesses the token at q + 1 by the target's own head. For
the tokens behind, the layer runs again on its own output. What shapes do not tell, as vLLM and transformers' generic
``MtpModel`` have it:

* the hidden state is behind the target's last norm, where its head reads it; ``pre_fc_norm_hidden`` comes on top. With
  the residual stream before that norm guesses look right, and fewer are: LightLLM measured 1.8 tokens a step on
  Qwen3.5-0.8B in place of 2.7, with three passes;
* the embedding comes first in ``fc``'s input;
* ``norm`` is behind the layer, and what it gives is both the head's input and the hidden state of the next pass;
* positions are those of the tokens (transformers) or of the hidden states (vLLM): the rotary embedding only knows
  differences;
* the first pair of a sequence is like any other. Token 0 is in none.
"""

from collections.abc import Callable

import torch
from torch import nn

from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.speculative.draft import DraftMLP
from deepspeed_hybrid.speculative.mtp_config import MtpConfig
from deepspeed_hybrid.speculative.rope import Rotary, rotated

# Shapes: B rows, T tokens, D hidden, H/G heads, E head_dim.

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ZeroCentredNorm(nn.Module):
    """(1 + weight) * x / rms(x), rounded at the end. DFlash's norms are not of this kind."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * (1.0 + self.weight.float())).to(x.dtype)


class GatedAttention(nn.Module):
    """Projections, head norms and the outputs' gate; who attends to what is the caller's business."""

    def __init__(self, config: MtpConfig):
        super().__init__()
        hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(hidden, heads * 2 * config.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, kv_heads * config.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, kv_heads * config.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * config.head_dim, hidden, bias=config.attention_bias)
        self.q_norm = ZeroCentredNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = ZeroCentredNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, rotary: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T, D] -> keys and values [B, T, G, E], keys normalised and rotated."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotated(keys, rotary), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(self, x: torch.Tensor, rotary: tuple, attend: Attend) -> torch.Tensor:
        # Each head's gate is behind its query.
        queries, gates = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        mixed = attend(rotated(self.q_norm(queries), rotary), *self.keys_values(x, rotary))
        return self.o_proj((mixed * torch.sigmoid(gates)).flatten(2))


class MtpLayer(nn.Module):
    def __init__(self, config: MtpConfig):
        super().__init__()
        self.input_layernorm = ZeroCentredNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GatedAttention(config)
        self.post_attention_layernorm = ZeroCentredNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor, rotary: tuple, attend: Attend) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class MtpDraft(nn.Module):
    """An MTP head. Parameters are named as below ``mtp.`` in published checkpoints; embedding and head are the
    target's.

    Args:
        config: its shape.
    """

    def __init__(self, config: MtpConfig):
        super().__init__()
        self.config = config
        self.pre_fc_norm_embedding = ZeroCentredNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = ZeroCentredNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([MtpLayer(config)])
        self.norm = ZeroCentredNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.rope)

    def merged(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's input for tokens' embeddings and the hidden states before them, [B, T, D] each -> [B, T, D]."""
        dtype = self.fc.weight.dtype
        norms = self.pre_fc_norm_embedding(embeddings.to(dtype)), self.pre_fc_norm_hidden(hidden.to(dtype))
        return self.fc(torch.cat(norms, dim=-1))

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What later tokens see of these: keys and values [B, T, G, E] of x [B, T, D] at positions [B, T]. With one
        layer they depend on nothing before."""
        (layer,) = self.layers
        return layer.self_attn.keys_values(layer.input_layernorm(x), self.rotary(positions, x.dtype))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Tokens through the layer and the last norm.

        Args:
            x: [B, T, D], of :meth:`merged`.
            positions: [B, T] int64, of the tokens.
            attend: queries [B, T, H, E], keys and values [B, T, G, E] of the tokens -> [B, T, H, E].

        Returns:
            [B, T, D], ready for the target's head, and to be the hidden states before the tokens behind.
        """
        (layer,) = self.layers
        return self.norm(layer(x, self.rotary(positions, x.dtype), attend))


def behind_last_norm(model: nn.Module, features: torch.Tensor) -> torch.Tensor:
    """The target's hidden states as its head reads them, for what leaves its last layer; both [..., D]."""
    norm = text_model(model).norm
    return type(norm).forward(norm, features)  # its bound forward is none while the target generates: the head has it
