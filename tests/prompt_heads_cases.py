# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments for prompt_heads and gated_heads, and float64 oracles written from the formulas."""

import torch

EPS = 1e-6
# rows, tokens, query heads, KV heads, dimensions, rotated ones, gated
SHAPES = [
    (1, 1, 1, 1, 2, 2, False),
    (2, 5, 3, 1, 10, 4, True),
    (3, 17, 4, 2, 32, 32, True),
    (1, 40, 6, 3, 64, 16, False),
]


def heads_arguments(
    rows, tokens, query_heads, kv_heads, size, rotated, gated, dtype=torch.float32, weights=torch.float32, norms=True,
    tables=torch.float32, shared=True, around=0, seed=0,
) -> dict:  # fmt: skip
    """``around``: columns of poison on both sides of the projection; ``shared``: one table of angles for all rows."""
    generator = torch.Generator().manual_seed(seed)
    columns = ((1 + gated) * query_heads + 2 * kv_heads) * size
    wide = torch.full((rows, tokens, columns + 2 * around), float("nan"), dtype=dtype)
    projected = wide[..., around : around + columns]
    projected.copy_(2 * torch.randn(rows, tokens, columns, generator=generator))
    projected[..., -kv_heads * size :] = float("nan")  # values are not looked at
    angles = 6 * torch.rand(1 if shared else rows, tokens, rotated // 2, generator=generator).repeat(1, 1, 2)
    q_norm, k_norm = (torch.randn(size, generator=generator).to(weights) for _ in range(2))
    return {
        "projected": projected,
        "cos": angles.cos().to(tables),
        "sin": angles.sin().to(tables),
        "q_norm": q_norm if norms else None,
        "k_norm": k_norm if norms else None,
        "norm_offset": 1.0 if norms else 0.0,
        "eps": EPS,
        "query_heads": query_heads,
        "kv_heads": kv_heads,
        "head_dim": size,
        "gated": gated,
    }


def heads_oracle(
    projected, cos, sin, q_norm, k_norm, norm_offset, eps, query_heads, kv_heads, head_dim, gated
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head by head, rounded behind its norm, and a rotation as a product of complex numbers."""
    half, results = cos.shape[-1] // 2, []
    turn = torch.complex(cos.double(), sin.double())[..., :half]
    start, step = 0, head_dim * (1 + gated)
    for heads, weight, stride in ((query_heads, q_norm, step), (kv_heads, k_norm, head_dim)):
        vectors = []
        for head in range(heads):
            vector = projected[..., start + head * stride : start + head * stride + head_dim].double()
            if weight is not None:
                root = (vector.square().sum(-1, keepdim=True) / head_dim + eps).sqrt()
                vector = (vector / root * (weight.double() + norm_offset)).to(projected.dtype).double()
            turned = torch.complex(vector[..., :half], vector[..., half : 2 * half]) * turn
            vectors.append(torch.cat([turned.real, turned.imag, vector[..., 2 * half :]], dim=-1))
        results.append(torch.stack(vectors, dim=2))
        start += heads * stride
    return results[0], results[1]


def gate_arguments(rows, tokens, heads, size, dtype=torch.float32, seed=0) -> dict:
    """What attention leaves is not packed by token, and gates lie between queries."""
    generator = torch.Generator().manual_seed(seed)
    mixed = (3 * torch.randn(rows, heads, tokens, size, generator=generator)).to(dtype).transpose(1, 2)
    wide = torch.full((rows, tokens, heads, 2 * size + 3), float("nan"), dtype=dtype)
    gate = wide[..., size : 2 * size]
    gate.copy_(4 * torch.randn(rows, tokens, heads, size, generator=generator))
    return {"mixed": mixed, "gate": gate}


def gate_oracle(mixed, gate) -> torch.Tensor:
    return (mixed.double() / (1 + (-gate.double()).exp())).flatten(2)
