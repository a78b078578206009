# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Tokens through gdn_deferred step by step, and the states that its kept tokens stand for."""

from collections.abc import Callable

import torch
from gdn_block_cases import block_of
from gdn_decode_cases import Shape
from glue_cases import slice_of_poison

from deepspeed_hybrid.ops.gdn_deferred import BLOCK, PLACES

RINGS = "keys", "deltas", "decays"
NAMES = "window", "conv_weight", "conv_bias", "A_log", "dt_bias", "key_heads"


def deferred_block(shape: Shape, counts: list[int], tokens: int, rounded: bool = False, **options) -> dict:
    """:func:`block_of`, and rings full of poison, of which nothing may be read."""
    arguments = block_of(shape, counts, tokens, **options)
    slots, heads = arguments["state"].shape[0], arguments["projected"].dtype if rounded else torch.float32
    keys = torch.full((slots, shape.key_heads, PLACES, shape.key_dim), float("nan"), dtype=heads)
    deltas = torch.full((slots, shape.value_heads, PLACES, shape.value_dim), float("nan"))
    rings = {"keys": keys, "deltas": deltas, "decays": torch.full(deltas.shape[:3], float("nan"))}
    return arguments | rings | {"rounded_heads": rounded}


def aligned(arguments: dict) -> dict:
    """With projections whose rows begin on boundaries of 16 bytes, as products leave them, still beside poison."""
    columns = arguments["projected"].shape[1]
    return arguments | {"projected": slice_of_poison(arguments["projected"], -(-columns // 8) * 8 + 8, 8)}


def one_by_one(deferred: Callable, arguments: dict) -> torch.Tensor:
    """Outputs [T * B, HV * DV] of the counted tokens of every row; the slots go on."""
    counts, out = arguments["counts"], []
    named = {name: arguments[name] for name in (*NAMES, *RINGS, "rounded_heads", "state", "norm_weight", "eps")}
    for index, rows in enumerate(arguments["projected"].split(len(counts))):
        where = {"position": arguments["position"] + index, "counts": (counts > index).long()}
        out.append(deferred(rows, **named, **where, answered=torch.full_like(counts, index + 1)))
    return torch.cat(out)


def without_rings(arguments: dict) -> dict:
    return {name: value for name, value in arguments.items() if name not in RINGS}


def settled(arguments: dict) -> torch.Tensor:
    """The states behind all tokens, fp32, of which :func:`one_by_one` has left some beside them."""
    state, counts = arguments["state"].float().clone(), arguments["counts"].tolist()
    group = state.shape[1] // arguments["keys"].shape[1]
    for row, (count, position) in enumerate(zip(counts, arguments["position"].tolist(), strict=True)):
        end = position + count
        for place in range(max(position, (end - 1) // BLOCK * BLOCK), end):
            key = arguments["keys"][row, :, place % PLACES].float().repeat_interleave(group, dim=0)
            delta, decay = (arguments[name][row, :, place % PLACES] for name in ("deltas", "decays"))
            state[row] = state[row] * decay[:, None, None] + key[..., None] * delta[:, None]
    return state
