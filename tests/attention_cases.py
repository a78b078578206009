# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments for attention_decode, a float64 oracle from Hugging Face's pieces, and checks of output and cache."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from decode_cases import same_bits
from glue_cases import moved, poisoned_outputs, slice_of_poison
from tolerances import assert_close, assert_close_when_turned
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, apply_rotary_pos_emb

PARKED_POSITIONS = (-7, 2**40)  # reading or writing there would fail


def attention_arguments(
    lengths: list[int],
    *,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    rotary: int = 8,
    capacity: int = 48,
    gated: bool = True,
    normed: bool = True,
    norm_offset: float = 1.0,
    dtype: torch.dtype = torch.float32,
    cos_dtype: torch.dtype = torch.float32,
    norm_dtype: torch.dtype | None = None,
    parked: bool = False,
    poison: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> dict:
    """Keyword arguments of attention_decode; the projection is columns of a wider tensor.

    Args:
        lengths: how many tokens each row attends to, the new one included.
        parked: every third row is parked, and has NaN in its projection and no valid position.
        poison: what a row must not read is NaN: cache positions from its own on, and slots of no row.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    batch = len(lengths)
    position = torch.tensor(lengths, dtype=torch.int64, device=device) - 1
    width = (query_heads * (2 if gated else 1) + 2 * kv_heads) * head_dim
    angles = (10 * normal(batch, rotary // 2)).repeat(1, 2)
    keys, values = (normal(batch + 1, kv_heads, capacity, head_dim).to(dtype) for _ in range(2))
    if poison:
        hidden = torch.arange(capacity, device=device) >= position[:, None]
        for cache in (keys, values):
            cache[-1] = float("nan")
            cache[:-1].masked_fill_(hidden[:, None, :, None], float("nan"))
    projected = normal(batch, width).to(dtype)
    idle = torch.arange(batch, device=device) % 3 == 1 if parked else torch.zeros_like(position, dtype=torch.bool)
    projected[idle] = float("nan")
    for row in idle.nonzero()[:, 0].tolist():
        position[row] = PARKED_POSITIONS[row // 3 % 2]
    norms = [(0.3 * normal(head_dim) + 1 - norm_offset).to(norm_dtype or dtype) for _ in range(2)]
    return {
        "projected": slice_of_poison(projected, width + 16, skipped=8),
        "cos": angles.cos().to(cos_dtype),
        "sin": angles.sin().to(cos_dtype),
        "keys": keys,
        "values": values,
        "position": position,
        "parked": idle,
        "q_norm": norms[0] if normed else None,
        "k_norm": norms[1] if normed else None,
        "norm_offset": norm_offset,
        "eps": 1e-6,
        "query_heads": query_heads,
        "gated": gated,
        "scaling": head_dim**-0.5,
    }


def only_row(arguments: dict, row: int) -> dict:
    """A deep copy of one row alone, in slot 0."""
    per_row = ("projected", "cos", "sin", "keys", "values", "position", "parked")
    picked = moved(arguments, arguments["keys"].device)
    return picked | {name: picked[name][row : row + 1] for name in per_row}


def _normed(heads: torch.Tensor, weight: torch.Tensor | None, offset: float, eps: float) -> torch.Tensor:
    if weight is None:
        return heads
    norm = (Qwen3_5RMSNorm if offset else Qwen3RMSNorm)(heads.shape[-1], eps).to(heads)
    with torch.no_grad():
        norm.weight.copy_(weight)
        return norm(heads)


def attention_oracle(
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
    splits=0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output in float64, and what keys and values become, row by row. Hugging Face's norms are fp32 inside."""
    _, kv_heads, _, head_dim = keys.shape
    out = torch.zeros(projected.shape[0], query_heads * head_dim, dtype=torch.float64, device=projected.device)
    keys, values = keys.clone(), values.clone()
    for row in (~parked).nonzero()[:, 0].tolist():
        heads = projected[row].double().unflatten(-1, (-1, head_dim))
        query, key, value = heads.split([len(heads) - 2 * kv_heads, kv_heads, kv_heads])
        query = query.reshape(query_heads, -1)
        if gated:
            query, gate = query.chunk(2, dim=-1)
        query, key = _normed(query, q_norm, norm_offset, eps), _normed(key, k_norm, norm_offset, eps)
        query, key = apply_rotary_pos_emb(query, key, cos[row].double(), sin[row].double(), unsqueeze_dim=0)
        place = int(position[row])
        keys[row, :, place], values[row, :, place] = key.to(keys.dtype), value.to(values.dtype)
        mixed = F.scaled_dot_product_attention(
            query.to(keys.dtype).double()[None, :, None],
            keys[row : row + 1, :, : place + 1].double(),
            values[row : row + 1, :, : place + 1].double(),
            scale=scaling,
            enable_gqa=True,
        )[0, :, 0]
        out[row] = (mixed * gate.sigmoid() if gated else mixed).flatten()
    return out, keys, values


def run_attention(run: Callable[..., torch.Tensor], arguments: dict) -> torch.Tensor:
    """``run`` over poison; output and cache must agree with the oracle, and nothing else may change."""
    before = moved(arguments, arguments["keys"].device)
    with poisoned_outputs():
        out = run(**arguments)
    exact, *caches = attention_oracle(**before)
    active, projected = ~arguments["parked"], arguments["projected"]
    assert out.dtype == projected.dtype and out.is_contiguous() and out.shape == exact.shape
    assert_close(out, exact)
    assert (out[~active] == 0).all()

    rows, places = active.nonzero()[:, 0], arguments["position"][active]
    for name, expected in zip(("keys", "values"), caches, strict=True):
        cache, written = arguments[name].clone(), (rows, slice(None), places)
        width = arguments["cos"].shape[1] if name == "keys" else 0
        assert_close_when_turned(cache[written], expected[written], width)
        cache[written] = before[name][written]
        assert same_bits(cache, before[name]), f"{name} changed where no new token is"
    others = [name for name in before if name not in ("keys", "values") and isinstance(before[name], torch.Tensor)]
    assert all(same_bits(arguments[name], before[name]) for name in others)
    return out
