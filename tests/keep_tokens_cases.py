# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments for keep_tokens, and what must be in the slots behind it, token by token."""

import torch


def arguments_of(rows: int, heads: int, tokens: int, size: int, dtype: torch.dtype = torch.float32) -> dict:
    """Keyword arguments on the CPU: slots of NaN, keys as they lie behind prompt_heads, values as in a product."""
    generator = torch.Generator().manual_seed(0)
    product = torch.randn(rows, tokens, (heads + 1) * size, generator=generator).to(dtype)
    capacity = tokens + 7
    buffers = {name: torch.full((rows + 2, heads, capacity, size), float("nan"), dtype=dtype) for name in "kv"}
    first = torch.arange(rows) % 7
    return {
        "keys": buffers["k"],
        "values": buffers["v"],
        "key": torch.randn(rows, tokens, heads, size, generator=generator).to(dtype).transpose(1, 2),
        "value": product[..., size:].unflatten(-1, (heads, size)).transpose(1, 2),
        "slots": torch.arange(rows).flip(0) + 1,
        "positions": first[:, None] + torch.arange(tokens),
    }


def entering(arguments: dict) -> dict:
    """The same for rows that enter their slots, left-padded: of different lengths, one without padding, one empty.

    Two rows of padding alone share a slot, as those do that fill a shape.
    """
    rows, tokens = arguments["positions"].shape
    lengths = torch.tensor([tokens, 0, tokens // 2, 0, 1])[:rows]
    positions = torch.arange(tokens) - (tokens - lengths)[:, None]
    last = arguments["keys"].shape[2] - 1
    slots = arguments["slots"].clone()
    slots[3:4] = slots[1:2]
    return {
        **arguments,
        "slots": slots,
        "positions": positions.masked_fill(positions < 0, last),
        "lengths": lengths,
    }


def kept(keys, values, key, value, slots, positions, lengths=None) -> dict[str, torch.Tensor]:
    buffers = {"keys": keys.clone(), "values": values.clone()}
    for buffer, part in zip(buffers.values(), (key, value), strict=True):
        for row, slot in enumerate(slots.tolist()):
            if lengths is not None:
                buffer[slot, :, lengths[row] :] = 0.0
            for token, position in enumerate(positions[row].tolist()):
                if lengths is None or position < lengths[row]:
                    buffer[slot, :, position] = part[row, :, token]
    return buffers
