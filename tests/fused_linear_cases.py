# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments for normed_rows, normed_linear and residual_linear, and float64 oracles written from the formulas."""

import torch

EPS = 1e-6


def normal(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(dtype)


def normed_arguments(
    rows: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.float32,
    parts: int = 1,
    bias: bool = False,
    glu: bool = False,
    seed: int = 0,
) -> dict:
    """Keyword arguments of normed_linear on the CPU; ``n`` columns come out."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "scaled": normal(rows, k, dtype=dtype, seed=seed + 1),
        # Of rows whose root mean square is far from 1, each part another share of it.
        "squares": (0.1 + torch.rand(parts, rows, generator=generator)) * 4 * k / max(parts, 1),
        "eps": EPS,
        "weight": normal(n * (2 if glu else 1), k, dtype=dtype, seed=seed + 2, scale=k**-0.5),
        "bias": normal(n, dtype=dtype, seed=seed + 3) if bias else None,
        "glu": glu,
    }


def residual_arguments(
    rows: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    offset: float = 1.0,
    seed: int = 0,
) -> dict:
    """Keyword arguments of residual_linear on the CPU."""
    return {
        "x": normal(rows, k, dtype=dtype, seed=seed + 1),
        "weight": normal(n, k, dtype=dtype, seed=seed + 2, scale=k**-0.5),
        "bias": normal(n, dtype=dtype, seed=seed + 3) if bias else None,
        "residual": normal(rows, n, dtype=dtype, seed=seed + 4),
        "next_norm": normal(n, dtype=dtype, seed=seed + 5, scale=0.5),
        "next_offset": offset,
        "next_eps": EPS,
    }


def rms_norm_oracle(hidden: torch.Tensor, norm: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    hidden = hidden.double()
    return hidden / (hidden.square().mean(-1, keepdim=True) + eps).sqrt() * (norm.double() + offset)


def silu_mul_oracle(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def normed_linear_oracle(
    scaled: torch.Tensor,
    squares: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    glu: bool,
) -> torch.Tensor:
    product = scaled.double() @ weight.double().t()
    if len(squares):
        product = product / (squares.double().sum(0) / scaled.shape[1] + eps).sqrt()[:, None]
    if bias is not None:
        product = product + bias.double()
    return silu_mul_oracle(product) if glu else product


def hidden_oracle(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, *_, **__
) -> torch.Tensor:
    """The first result of residual_linear, whose product is rounded behind its bias."""
    product = x.double() @ weight.double().t()
    product = product if bias is None else product + bias.double()
    return residual.double() + product.to(x.dtype).double()


def finished(scaled: torch.Tensor, squares: torch.Tensor, eps: float) -> torch.Tensor:
    """The normalised rows, in float64, that the two parts of a norm stand for."""
    if not len(squares):
        return scaled.double()
    return scaled.double() / (squares.double().sum(0) / scaled.shape[1] + eps).sqrt()[:, None]
