# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Queries and keys of a prompt, from the fused q|k|v projection to what attention takes."""

import torch

from deepspeed_hybrid.ops.attention_decode import normed_heads, rotated_heads
from deepspeed_hybrid.ops.gdn_decode import MODEL_DTYPES, WEIGHT_DTYPES
from deepspeed_hybrid.ops.inference import refuse_gradients

# Shapes: B rows, T tokens, H query heads, KV key-value heads, D dimensions of a head, the first R of them rotated.


def prompt_heads_reference(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`prompt_heads` does, in plain torch on any device."""
    _check(projected, cos, sin, q_norm, k_norm, query_heads, kv_heads, head_dim, gated)
    columns = [(1 + gated) * query_heads * head_dim, kv_heads * head_dim]
    parts = projected.flatten(0, 1)[:, : sum(columns)].split(columns, dim=-1)
    cos, sin = (table.expand(*projected.shape[:2], table.shape[2]).flatten(0, 1) for table in (cos, sin))
    results = []
    widths = (1 + gated) * head_dim, head_dim
    for part, heads, width, weight in zip(parts, (query_heads, kv_heads), widths, (q_norm, k_norm), strict=True):
        vectors = part.unflatten(-1, (heads, width))[..., :head_dim]
        vectors = rotated_heads(normed_heads(vectors, weight, norm_offset, eps), cos, sin)
        results.append(vectors.unflatten(0, projected.shape[:2]))
    return results[0], results[1]


@torch.library.custom_op("deepspeed_hybrid::prompt_heads", mutates_args=(), device_types="cuda")
def prompt_heads(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm and rotary embedding of every query and key head, with the roundings of attention_decode.

    On CUDA this is one launch, without a host sync; the first call for a set of sizes and dtypes compiles it. On a CPU
    it is :func:`prompt_heads_reference`. There is no gradient.

    Args:
        projected: [B, T, N] fp32, bf16 or fp16, contiguous in the last dimension, N at least the columns of q | k;
            with ``gated``, each head's q is followed by its gate. What is behind them, such as v, is left alone.
        cos, sin: [B or 1, T, R] of any float dtype, contiguous in the last dimension. The first half of R is rotated
            against the second; other dimensions pass.
        q_norm, k_norm: [D] weights of a norm over each head, of any float dtype, or None for both: no norm.
        norm_offset: is added to these weights: 1.0 for norms that store them around zero.
        eps: of these norms.
        query_heads, kv_heads, head_dim: H, KV and D. One of H and KV may be 0, where there are heads of one kind only.
        gated: see ``projected``.

    Returns:
        Queries [B, T, H, D] and keys [B, T, KV, D] in the dtype of ``projected``, contiguous.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    _check(projected, cos, sin, q_norm, k_norm, query_heads, kv_heads, head_dim, gated)
    from deepspeed_hybrid.ops.triton.prompt_heads import launch  # here, because a torch for CPUs has no Triton

    return launch(projected, cos, sin, q_norm, k_norm, norm_offset, eps, query_heads, kv_heads, head_dim, gated)


@prompt_heads.register_fake
def _(projected, cos, sin, q_norm, k_norm, norm_offset, eps, query_heads, kv_heads, head_dim, gated):
    _check(projected, cos, sin, q_norm, k_norm, query_heads, kv_heads, head_dim, gated)
    rows, tokens, _ = projected.shape
    query, key = (projected.new_empty(rows, tokens, heads, head_dim) for heads in (query_heads, kv_heads))
    return query, key


prompt_heads.register_kernel("cpu")(prompt_heads_reference)
refuse_gradients(prompt_heads, "prompt_heads")


def _check(projected, cos, sin, q_norm, k_norm, query_heads: int, kv_heads: int, head_dim: int, gated: bool) -> None:

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise RuntimeError(f"prompt_heads: {message}")

    require(projected.dim() == 3 and projected.dtype in MODEL_DTYPES, "projected must be [B, T, N] in a model's dtype")
    require(projected.stride(2) == 1 or projected.shape[2] == 1, "projected must be contiguous in the last dimension")
    rows, tokens, columns = projected.shape
    sizes = query_heads, kv_heads, head_dim
    positive = min(sizes) >= 0 and query_heads + kv_heads > 0 and head_dim > 0
    require(positive, f"query_heads or kv_heads, and head_dim, must be positive, got {sizes}")
    least = ((1 + gated) * query_heads + kv_heads) * head_dim
    require(columns >= least, f"projected must have {least} columns or more, got {columns}")
    require((q_norm is None) == (k_norm is None), "q_norm and k_norm must both be given or both be None")
    for name, table in (("cos", cos), ("sin", sin)):
        require(
            table.dim() == 3 and table.shape[0] in (1, rows) and table.shape[1] == tokens and table.shape == cos.shape,
            f"{name} must be [B or 1, {tokens}, R], got {list(table.shape)}",
        )
        require(table.dtype in WEIGHT_DTYPES and table.stride(2) == 1, f"{name} must be contiguous floats")
        require(
            table.shape[2] % 2 == 0 and 0 < table.shape[2] <= head_dim, f"{name} must have 2 to {head_dim} columns"
        )
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            fits = tuple(weight.shape) == (head_dim,) and weight.dtype in WEIGHT_DTYPES and weight.is_contiguous()
            require(fits, f"{name} must be contiguous floats [{head_dim}], got {list(weight.shape)} {weight.dtype}")
    for name, tensor in (("cos", cos), ("sin", sin), ("q_norm", q_norm), ("k_norm", k_norm)):
        require(tensor is None or tensor.device == projected.device, f"{name} is on another device than projected")
