# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Attention of a draft model's block: every token of it sees the context in a cache, and the others of its block."""

import torch

from deepspeed_hybrid.ops.attention_decode import DTYPES, MAX_HEAD_DIM, normed_heads, rotated_heads
from deepspeed_hybrid.ops.inference import refuse_gradients

# Shapes: B lanes, T tokens of a block, S slots, C places, G key heads, H query heads, E dimensions of a head.

CACHE_DTYPES = (*DTYPES, torch.float8_e4m3fn)


def draft_attention_reference(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: torch.Tensor,
    parked: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    query_heads: int,
    scaling: float,
    causal: bool,
    window: int,
) -> torch.Tensor:
    """What :func:`draft_attention` does, in plain torch on any device; it reads all places."""
    _check(projected, cos, sin, keys, values, start, parked, q_norm, k_norm, query_heads, window)
    lanes, (_, places, kv_heads, head_dim) = start.shape[0], keys.shape
    if not lanes:
        return projected.new_empty(0, query_heads * head_dim)
    dtype, kv_width = projected.dtype, kv_heads * head_dim
    query, key, value = projected.split([query_heads * head_dim, kv_width, kv_width], dim=-1)
    query = rotated_heads(normed_heads(query.unflatten(-1, (query_heads, -1)), q_norm, 0.0, eps), cos, sin)
    key = rotated_heads(normed_heads(key.unflatten(-1, (kv_heads, -1)), k_norm, 0.0, eps), cos, sin)
    rows = (query.to(dtype), key.to(dtype), value.unflatten(-1, (kv_heads, -1)))
    query, key, value = (part.unflatten(0, (-1, lanes)).transpose(0, 1) for part in rows)  # [B, T, heads, E]

    start = start.masked_fill(parked, 0)[:, None]  # theirs may be anything
    known = torch.arange(places, device=keys.device) < start
    # A weight of zero would not hide a NaN or an infinity.
    hidden = ~known[..., None, None]
    seen_keys, seen_values = (
        torch.cat([cache[:lanes].float().masked_fill(hidden, 0.0), new.float()], dim=1)
        for cache, new in ((keys, key), (values, value))
    )
    own = start + torch.arange(query.shape[1], device=keys.device)
    place = torch.cat([torch.arange(places, device=keys.device).expand(lanes, -1), own], dim=1)[:, None]
    visible = torch.cat([known, torch.ones_like(own, dtype=torch.bool)], dim=1)[:, None]
    if causal:
        visible = visible & (place <= own[..., None])
    if window:
        visible = visible & (place > own[..., None] - window)

    shared = query_heads // kv_heads
    packed = query.float().unflatten(2, (kv_heads, shared)).permute(0, 2, 3, 1, 4)  # [B, G, shared, T, E]
    scores = packed @ seen_keys.permute(0, 2, 3, 1)[:, :, None] * scaling
    weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(dim=-1)
    mixed = (weights @ seen_values.transpose(1, 2)[:, :, None]).permute(3, 0, 1, 2, 4)  # [T, B, G, shared, E]
    return mixed.masked_fill(parked[:, None, None, None], 0.0).flatten(0, 1).flatten(1).to(dtype)


@torch.library.custom_op("deepspeed_hybrid::draft_attention", mutates_args=(), device_types="cuda")
def draft_attention(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: torch.Tensor,
    parked: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    query_heads: int,
    scaling: float,
    causal: bool,
    window: int,
) -> torch.Tensor:
    """Norm and rotate the block's queries and keys, and attend to the context and to the block.

    Lane b has slot b of the cache and sees its places 0 to ``start[b]`` - 1; what lies beyond does not matter, and
    nothing is written: a block's own keys and values are those in ``projected``. Math is in fp32; queries, and the
    block's keys and values, are rounded to the dtype of ``projected`` before the scores.

    On CUDA these are one or two Triton launches without a host sync, in time that follows ``start``, not the places;
    the first call of a shape compiles them. On a CPU it is :func:`draft_attention_reference`. There is no gradient.

    Args:
        projected: [T * B, (H + 2 G) * E] fp32, bf16 or fp16, contiguous in the last dimension, in rows token by token:
            row i * B + b is token i of lane b. Columns are q | k | v of all heads.
        cos, sin: [T * B, R] of the tokens' positions, of these dtypes. The first R dimensions of a head are rotated,
            the first half of them against the second.
        keys, values: [S, C, G, E] in the dtype of ``projected`` or float8_e4m3fn, S >= B, heads contiguous in a place.
        start: [B] int64, at most C: tokens of the context, and so the position of a block's first token. A GPU may
            read it and ``parked`` ahead of the end of the kernel before: they must not be of its making.
        parked: [B] bool, lanes whose output is 0.
        q_norm, k_norm: [E] weights of an RMSNorm over each head.
        eps: of these norms.
        query_heads: H, a multiple of G; neighbours share a key head.
        scaling: of the scores.
        causal: of the block, a token sees itself and those before it; otherwise all.
        window: how many keys up to its own position a token sees at most, itself among them; 0: all.

    Returns:
        [T * B, H * E] in the dtype of ``projected``.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    _check(projected, cos, sin, keys, values, start, parked, q_norm, k_norm, query_heads, window)
    # Not at the top: a torch built for CPUs only comes without Triton.
    from deepspeed_hybrid.ops.triton.draft_attention import launch

    settings = eps, query_heads, scaling, causal, window
    return launch(projected, cos, sin, keys, values, start, parked, q_norm, k_norm, *settings)


@draft_attention.register_fake
def _(projected, cos, sin, keys, values, start, parked, q_norm, k_norm, eps, query_heads, *_):
    return projected.new_empty(projected.shape[0], query_heads * keys.shape[3])


draft_attention.register_kernel("cpu")(draft_attention_reference)
refuse_gradients(draft_attention, "draft_attention")


def _check(projected, cos, sin, keys, values, start, parked, q_norm, k_norm, query_heads: int, window: int) -> None:

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise RuntimeError(f"draft_attention: {message}")

    require(keys.dim() == 4, f"keys must be [slots, places, heads, head_dim], not {list(keys.shape)}")
    slots, _, kv_heads, head_dim = keys.shape
    require(
        kv_heads > 0 and 0 < head_dim <= MAX_HEAD_DIM,
        f"keys must have heads of 1 to {MAX_HEAD_DIM} dimensions, not {list(keys.shape)}",
    )
    for name, cache in (("keys", keys), ("values", values)):
        require(
            cache.dtype == projected.dtype or cache.dtype == torch.float8_e4m3fn,
            f"{name} must be {projected.dtype} as projected or float8_e4m3fn, not {cache.dtype}",
        )
        same = (cache.shape, cache.dtype, cache.stride()) == (keys.shape, keys.dtype, keys.stride())
        require(same, f"{name} must be {list(keys.shape)} {keys.dtype} as keys, and laid out as they are")
    require(keys.stride()[2:] == (head_dim, 1), f"a place's heads must be contiguous, not {keys.stride()}")
    require(
        query_heads > 0 and query_heads % kv_heads == 0,
        f"query_heads must be a multiple of the {kv_heads} heads of keys, not {query_heads}",
    )
    lanes = start.shape[0] if start.dim() == 1 else -1
    require(start.dtype == torch.int64 and 0 <= lanes <= slots, f"start must be int64 [up to {slots}]")
    require(start.is_contiguous(), "start must be contiguous")
    require(
        parked.dtype == torch.bool and parked.shape == start.shape and parked.is_contiguous(),
        f"parked must be contiguous bool [{lanes}], not {parked.dtype} {list(parked.shape)}",
    )
    width = (query_heads + 2 * kv_heads) * head_dim
    require(
        projected.dim() == 2 and projected.shape[1] == width and projected.stride(1) == 1,
        f"projected must be [T * B, {width}], contiguous in the last dimension, not {list(projected.shape)}",
    )
    require(projected.dtype in DTYPES, f"projected must be float32, bfloat16 or float16, not {projected.dtype}")
    rows = projected.shape[0]
    require(
        rows % lanes == 0 and rows > 0 if lanes else rows == 0,
        f"projected has {rows} rows, which {lanes} lanes do not share",
    )
    require(
        cos.dim() == 2 and cos.shape[0] == rows and cos.shape[1] % 2 == 0 and 0 < cos.shape[1] <= head_dim,
        f"cos must be [{rows}, an even number up to {head_dim}], not {list(cos.shape)}",
    )
    for name, tensor, shape in (
        ("sin", sin, cos.shape),
        ("q_norm", q_norm, (head_dim,)),
        ("k_norm", k_norm, (head_dim,)),
    ):
        require(tensor.shape == shape, f"{name} must be {list(shape)}, not {list(tensor.shape)}")
    for name, tensor in (("cos", cos), ("sin", sin), ("q_norm", q_norm), ("k_norm", k_norm)):
        fits = tensor.dtype in DTYPES and tensor.is_contiguous()
        require(fits, f"{name} must be contiguous float32, bfloat16 or float16, not {tensor.dtype}")
    others = {"cos": cos, "sin": sin, "keys": keys, "values": values, "start": start, "parked": parked}
    for name, tensor in {**others, "q_norm": q_norm, "k_norm": k_norm}.items():
        require(
            tensor.device == projected.device, f"{name} is on {tensor.device}, and projected on {projected.device}"
        )
    require(window >= 0, f"window must be 0 or more, not {window}")
