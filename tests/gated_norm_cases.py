# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments for gated_norm, and a float64 oracle written from the formula."""

import torch

EPS = 1e-6


def arguments_of(rows, tokens, heads, size, dtype=torch.float32, weights=torch.float32, around=0, seed=0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((rows, tokens, heads * size + 2 * around), float("nan"), dtype=dtype)
    gate = wide[..., around : around + heads * size]
    gate.copy_(2 * torch.randn(rows, tokens, heads * size, generator=generator))
    return {
        "core": (3 * torch.randn(rows, tokens, heads, size, generator=generator)).to(dtype),
        "gate": gate,
        "weight": (1 + torch.randn(size, generator=generator) / 4).to(weights),
        "eps": EPS,
    }


def oracle(core, gate, weight, eps):
    core, gate = core.double(), gate.double().view(core.shape)
    normed = core / (core.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return (normed * gate / (1 + (-gate).exp())).flatten(2)
