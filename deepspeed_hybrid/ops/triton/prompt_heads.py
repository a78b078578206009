# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Norm and rotary embedding of a prompt's queries and keys, over all tokens and heads."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.rounding import rounded, rounded_if, weighted

TILE = 2048  # elements of a program


# How many tokens there are is no reason to compile again.
@triton.jit(do_not_specialize=["tokens"])
def _norm_and_rotate(
    projected,
    cos,
    sin,
    q_norm,
    k_norm,
    query,
    key,
    tokens,
    row_stride,
    token_stride,
    cos_row_stride,
    cos_token_stride,
    sin_row_stride,
    sin_token_stride,
    offset,
    eps,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    QUERY_COLUMNS: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tokens of all rows, blocks of heads, those of queries first). A dimension's partner is read again."""
    announce(PDL)
    dtype: tl.constexpr = projected.dtype.element_ty
    at = tl.program_id(0).to(tl.int64)
    row, token = at // tokens, at % tokens
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_key = (head >= H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    partner = tl.where(d < R // 2, d + R // 2, tl.where(d < R, d - R // 2, d))
    inside = (head < H + KV)[:, None] & (d < D)
    column = tl.where(is_key, H * QUERY_COLUMNS + (head - H)[:, None] * D, head[:, None] * QUERY_COLUMNS)
    source = projected + row * row_stride + token * token_stride + column
    wait(PDL)
    value = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + partner, mask=inside & (d < R), other=0.0).to(tl.float32)
    if NORMED:
        gain = tl.where(is_key, tl.load(k_norm + d, mask=d < D, other=0.0), tl.load(q_norm + d, mask=d < D, other=0.0))
        others = tl.where(
            is_key, tl.load(k_norm + partner, mask=d < R, other=0.0), tl.load(q_norm + partner, mask=d < R, other=0.0)
        )
        scale = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
        value = rounded(weighted(value * scale, gain, offset, dtype), dtype)
        other = rounded(weighted(other * scale, others, offset, dtype), dtype)
    cosine = tl.load(cos + row * cos_row_stride + token * cos_token_stride + d, mask=d < R, other=1.0).to(tl.float32)
    sine = tl.load(sin + row * sin_row_stride + token * sin_token_stride + d, mask=d < R, other=0.0).to(tl.float32)
    value = rounded_if(cos.dtype.element_ty == dtype, value * cosine, dtype)
    value += rounded_if(sin.dtype.element_ty == dtype, other * tl.where(d < R // 2, -sine, sine), dtype)
    queries = query + (at * H + head[:, None]) * D + d
    tl.store(queries, value.to(query.dtype.element_ty), mask=inside & (head < H)[:, None])
    keys = key + (at * KV + head[:, None] - H) * D + d
    tl.store(keys, value.to(key.dtype.element_ty), mask=inside & is_key)


def launch(
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
    """Run the kernel on arguments that the op has checked."""
    rows, tokens, _ = projected.shape
    query, key = (projected.new_empty(rows, tokens, heads, head_dim) for heads in (query_heads, kv_heads))
    if rows * tokens == 0:
        return query, key
    block_d = triton.next_power_of_2(head_dim)
    heads = query_heads + kv_heads
    block_heads = min(triton.next_power_of_2(heads), max(1, TILE // max(block_d, 32)))
    row = 0 if cos.shape[0] == 1 else 1  # one table serves all rows
    with torch.cuda.device_of(projected):  # Triton launches on the current device
        _norm_and_rotate[(rows * tokens, triton.cdiv(heads, block_heads))](
            projected,
            cos,
            sin,
            q_norm,
            k_norm,
            query,
            key,
            tokens,
            projected.stride(0),
            projected.stride(1),
            row * cos.stride(0),
            cos.stride(1),
            row * sin.stride(0),
            sin.stride(1),
            float(norm_offset),
            float(eps),
            H=query_heads,
            KV=kv_heads,
            D=head_dim,
            R=cos.shape[2],
            QUERY_COLUMNS=(1 + gated) * head_dim,
            NORMED=q_norm is not None,
            BLOCK_D=block_d,
            BLOCK_HEADS=block_heads,
            num_warps=4,
            **pdl(projected),
        )
    return query, key
