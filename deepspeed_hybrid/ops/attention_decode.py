# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Attention for one new token per row: from the fused q|k|v projection to the input of the output projection."""

import torch
import torch.nn.functional as F

from deepspeed_hybrid.ops import attention_streamed
from deepspeed_hybrid.ops.inference import refuse_recording
from deepspeed_hybrid.ops.rounding import normed, rounded, rounded_product

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM, MAX_SPLITS = 256, 64


def attention_decode(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    parked: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    query_heads: int,
    gated: bool,
    scaling: float,
    splits: int = 0,
) -> torch.Tensor:
    """Norm and rotate the row's query and key, write key and value to its slot, attend, and apply the output gate.

    Row b has slot b of the cache. It attends to positions 0 to ``position[b]``, the last of which is the new token;
    what lies beyond does not matter. Math is in fp32, and roundings are those of transformers' code: of a head behind
    its norm and behind each product of its rotation (where the tables have its dtype), of weights relative to their
    peak, of what they mix, of the gate's sigmoid, and of the output.

    On CUDA these are one or two launches without a host sync, in time that follows the rows' lengths and not the
    capacity: of :mod:`deepspeed_hybrid.ops.attention_streamed` for what it takes, and else of Triton's kernels. The
    first call compiles them. On a CPU it is :func:`attention_decode_reference`. There is no gradient.

    Args:
        projected: [B, N] fp32, bf16 or fp16, contiguous in the last dimension. Columns are q | k | v of all heads;
            with ``gated``, each head's q is followed by its gate.
        cos, sin: [B, R] fp32, bf16 or fp16 of the new tokens' positions. The first R dimensions of a head are rotated,
            the first half of them against the second; the rest pass.
        keys, values: [S, KV heads, capacity, D] in the dtype of ``projected``, contiguous, S >= B. Updated. All but a
            row's latest 64 positions may be read ahead of the end of kernels that let their successors start, as
            keep_tokens does, up to the last plain launch.
        position: [B] int64, where the new key and value go. They must be below the capacity: no kernel looks. They and
            ``parked`` are read ahead likewise.
        parked: [B] bool, rows that change nothing in the cache, whatever they hold, and whose output is 0.
        q_norm, k_norm: [D] weights of an RMSNorm over each head, or None for none.
        norm_offset: is added to these weights: 1.0 for norms that store them around zero.
        eps: of these norms.
        query_heads: a multiple of the KV heads; neighbours share one.
        gated: multiply the output with the sigmoid of the gate.
        scaling: of the scores.
        splits: how many programs share a row's positions on CUDA, 1 to 64; 0 chooses by batch
            size and capacity. A row's output has the same bits in any batch only for the same number.

    Returns:
        [B, query_heads * D] in the dtype of ``projected``.
    """
    # The op cannot do this itself: torch registers no autograd for an op that changes its arguments.
    refuse_recording("attention_decode", projected, cos, sin, keys, values, q_norm, k_norm)
    return attention_decode_op(
        projected,
        cos,
        sin,
        keys,
        values,
        position,
        parked,
        q_norm,
        k_norm,
        norm_offset,
        eps,
        query_heads,
        gated,
        scaling,
        splits,
    )


def attention_decode_reference(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    parked: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    query_heads: int,
    gated: bool,
    scaling: float,
    splits: int = 0,
) -> torch.Tensor:
    """What :func:`attention_decode` does, in plain torch on any device; it reads the whole capacity."""
    batch, (_, kv_heads, capacity, head_dim) = projected.shape[0], keys.shape
    kv_width = kv_heads * head_dim
    query, key, value = projected.split([projected.shape[1] - 2 * kv_width, kv_width, kv_width], dim=-1)
    query = query.unflatten(-1, (query_heads, -1))
    if gated:
        query, gate = query.chunk(2, dim=-1)
    query = rotated_heads(normed_heads(query, q_norm, norm_offset, eps), cos, sin)
    key = rotated_heads(normed_heads(key.unflatten(-1, (kv_heads, -1)), k_norm, norm_offset, eps), cos, sin)
    value = value.unflatten(-1, (kv_heads, -1))

    rows = torch.arange(batch, device=keys.device)
    idle = parked[:, None, None]
    place = position.masked_fill(parked, 0)  # theirs may be anything
    for cache, new in ((keys, key), (values, value)):
        cache[rows, :, place] = torch.where(idle, cache[rows, :, place], new)

    seen = torch.arange(capacity, device=keys.device) <= place[:, None]
    # A weight of zero would not hide a NaN or an infinity.
    seen_keys, seen_values = (cache[:batch].masked_fill(~seen[:, None, :, None], 0.0) for cache in (keys, values))
    mixed = F.scaled_dot_product_attention(
        query[:, :, None], seen_keys, seen_values, seen[:, None, None], scale=scaling, enable_gqa=True
    )[:, :, 0]
    if gated:
        mixed = (mixed.float() * rounded(gate.float().sigmoid(), gate.dtype)).to(gate.dtype)
    return mixed.masked_fill(idle, 0.0).flatten(1)


def normed_heads(heads: torch.Tensor, weight: torch.Tensor | None, offset: float, eps: float) -> torch.Tensor:
    """In the dtype of ``heads``."""
    return heads if weight is None else normed(heads, weight, offset, eps)


def rotated_heads(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """In the dtype of ``heads``, which each product is rounded to as well where the tables have it."""
    width = cos.shape[-1]
    turned, passed = heads[..., :width].float(), heads[..., width:]
    first, second = turned.chunk(2, dim=-1)
    by_cos = rounded_product(turned, cos[:, None], heads.dtype)
    by_sin = rounded_product(torch.cat([-second, first], dim=-1), sin[:, None], heads.dtype)
    return torch.cat([(by_cos + by_sin).to(heads.dtype), passed], dim=-1)


def check_attention(
    op: str,
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    parked: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    query_heads: int,
    gated: bool,
    scaling: float,
    splits: int = 0,
) -> None:
    """Raise before anything is written, in the name of ``op``."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise RuntimeError(f"{op}: {message}")

    tensors = {
        "projected": projected,
        "cos": cos,
        "sin": sin,
        "keys": keys,
        "values": values,
        "position": position,
        "parked": parked,
        "q_norm": q_norm,
        "k_norm": k_norm,
    }
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        require(
            tensor.device == projected.device, f"{name} is on {tensor.device}, and projected on {projected.device}"
        )
        if name not in ("position", "parked"):
            require(tensor.dtype in DTYPES, f"{name} must be float32, bfloat16 or float16, not {tensor.dtype}")
        stride = tensor.stride(-1) if tensor.dim() and tensor.shape[-1] > 1 else 1
        require(stride == 1, f"the last dimension of {name} must be contiguous, but its stride is {stride}")

    require(keys.dim() == 4, f"keys must be [slots, heads, capacity, head_dim], not {list(keys.shape)}")
    slots, kv_heads, capacity, head_dim = keys.shape
    require(
        min(kv_heads, capacity) > 0 and 0 < head_dim <= MAX_HEAD_DIM,
        f"keys must have heads of 1 to {MAX_HEAD_DIM} dimensions and room for a token, not {list(keys.shape)}",
    )
    require(
        query_heads > 0 and query_heads % kv_heads == 0,
        f"query_heads must be a multiple of the {kv_heads} heads of keys, not {query_heads}",
    )
    width = (query_heads * (2 if gated else 1) + 2 * kv_heads) * head_dim
    require(
        projected.dim() == 2 and projected.shape[1] == width,
        f"projected must be [batch, {width}] for these heads, not {list(projected.shape)}",
    )
    batch = projected.shape[0]
    require(batch <= slots, f"keys must have a slot for each of the {batch} rows of projected, not {slots}")
    for name, cache in (("keys", keys), ("values", values)):
        require(cache.dtype == projected.dtype, f"{name} must be {projected.dtype} as projected, not {cache.dtype}")
        require(cache.shape == keys.shape, f"{name} must be {list(keys.shape)} as keys, not {list(cache.shape)}")
        require(cache.is_contiguous(), f"{name} must be contiguous, but its strides are {cache.stride()}")
    require(
        cos.dim() == 2 and cos.shape[0] == batch and cos.shape[1] % 2 == 0 and cos.shape[1] <= head_dim,
        f"cos must be [{batch}, an even number up to {head_dim}], not {list(cos.shape)}",
    )
    require(sin.shape == cos.shape, f"sin must be {list(cos.shape)} as cos, not {list(sin.shape)}")
    for name, tensor, dtype in (("position", position, torch.int64), ("parked", parked, torch.bool)):
        require(tensor.dtype == dtype, f"{name} must be {dtype}, not {tensor.dtype}")
        require(tensor.shape == (batch,), f"{name} must be [{batch}], not {list(tensor.shape)}")
    for name in ("q_norm", "k_norm"):
        if name in given:
            shape = list(given[name].shape)
            require(shape == [head_dim], f"{name} must be [{head_dim}], not {shape}")
    require(0 <= splits <= MAX_SPLITS, f"splits must be 0 to {MAX_SPLITS}, not {splits}")


@torch.library.custom_op("deepspeed_hybrid::attention_decode", mutates_args=("keys", "values"), device_types="cuda")
def attention_decode_op(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    parked: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    query_heads: int,
    gated: bool,
    scaling: float,
    splits: int = 0,
) -> torch.Tensor:
    """:func:`attention_decode` as torch's dispatcher knows it."""
    arguments = (projected, cos, sin, keys, values, position, parked, q_norm, k_norm)
    settings = (norm_offset, eps, query_heads, gated, scaling, splits)
    check_attention("attention_decode", *arguments, *settings)
    if attention_streamed.takes(*arguments, *settings):
        return attention_streamed.launch(*arguments, *settings)
    # Not at the top: a torch built for CPUs only comes without Triton.
    from deepspeed_hybrid.ops.triton.attention_decode import launch

    return launch(*arguments, *settings)


@attention_decode_op.register_kernel("cpu")
def _(*arguments) -> torch.Tensor:
    check_attention("attention_decode", *arguments)
    return attention_decode_reference(*arguments)


@attention_decode_op.register_fake
def _(projected, cos, sin, keys, values, position, parked, q_norm, k_norm, norm_offset, eps, query_heads, *_):
    return projected.new_empty(projected.shape[0], query_heads * keys.shape[3])
