# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments for the ops of a draft model, over poison, and float64 oracles written head by head."""

import torch
from glue_cases import slice_of_poison

FP8 = torch.float8_e4m3fn


def stored_exactly(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As a cache of ``dtype`` holds them."""
    return (values.clamp(-448, 448) if dtype == FP8 else values).to(dtype)


def draft_attention_arguments(
    starts: list[int],
    tokens: int,
    *,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    rotary: int = 32,
    places: int = 48,
    causal: bool = False,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    parked: tuple[int, ...] = (),
    device: str = "cpu",
    seed: int = 0,
) -> dict:
    """Keyword arguments of draft_attention. The cache is one of three layers', and what no lane may read is NaN.

    Args:
        parked: lanes without a valid start, whose projections are NaN.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    lanes = len(starts)
    start = torch.tensor(starts, dtype=torch.int64, device=device)
    caches = []
    for _ in range(2):
        cache = normal(lanes + 1, places, 3, kv_heads, head_dim)
        cache[-1] = float("nan")
        cache[:-1][torch.arange(places, device=device) >= start[:, None]] = float("nan")
        caches.append(stored_exactly(cache, cache_dtype or dtype)[:, :, 1])
    projected = normal(tokens, lanes, (query_heads + 2 * kv_heads) * head_dim).to(dtype)
    idle = torch.zeros(lanes, dtype=torch.bool, device=device)
    for lane in parked:
        idle[lane], start[lane], projected[:, lane] = True, 2**40, float("nan")
    projected = projected.flatten(0, 1)
    angles = (10 * normal(tokens * lanes, rotary // 2)).repeat(1, 2)
    return {
        "projected": slice_of_poison(projected, projected.shape[1] + 16, skipped=8),
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        "keys": caches[0],
        "values": caches[1],
        "start": start,
        "parked": idle,
        "q_norm": (0.3 * normal(head_dim) + 1).to(dtype),
        "k_norm": (0.3 * normal(head_dim) + 1).to(dtype),
        "eps": 1e-6,
        "query_heads": query_heads,
        "scaling": head_dim**-0.5,
        "causal": causal,
        "window": window,
    }


def turned(heads: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor):
    """Heads [N, E] of one token, normalised and rotated, in float64."""
    heads, half = heads.double(), cos.shape[0] // 2
    heads = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    first, second, rest = heads[:, :half], heads[:, half : 2 * half], heads[:, 2 * half :]
    cos, sin = cos.double(), sin.double()
    return torch.cat(
        [first * cos[:half] - second * sin[:half], second * cos[half:] + first * sin[half:], rest], dim=-1
    )


def draft_attention_oracle(
    projected, cos, sin, keys, values, start, parked, q_norm, k_norm, eps, query_heads, scaling, causal, window
) -> torch.Tensor:
    """In float64, query by query."""
    lanes, (_, _, kv_heads, head_dim) = len(start), keys.shape
    tokens, shared = len(projected) // lanes, query_heads // kv_heads
    out = torch.zeros(len(projected), query_heads, head_dim, dtype=torch.float64)
    for lane in range(lanes):
        if parked[lane]:
            continue
        known, rows = int(start[lane]), [token * lanes + lane for token in range(tokens)]
        heads = [projected[row].unflatten(-1, (-1, head_dim)) for row in rows]
        new_keys = [
            turned(part[query_heads:-kv_heads], k_norm, eps, cos[row], sin[row])
            for part, row in zip(heads, rows, strict=True)
        ]
        new_keys = torch.stack(new_keys).to(projected.dtype).double()
        new_values = torch.stack([part[-kv_heads:] for part in heads]).double()
        all_keys = torch.cat([keys[lane, :known].double(), new_keys])
        all_values = torch.cat([values[lane, :known].double(), new_values])
        for token, row in enumerate(rows):
            query = turned(heads[token][:query_heads], q_norm, eps, cos[row], sin[row]).to(projected.dtype).double()
            last = known + token if causal else known + tokens - 1
            first = max(0, known + token - window + 1) if window else 0
            for head in range(query_heads):
                seen = slice(first, last + 1), head // shared
                out[row, head] = (all_keys[seen] @ query[head] * scaling).softmax(0) @ all_values[seen]
    return out.flatten(1)


def draft_context_arguments(
    positions: list[int],
    *,
    lanes: int = 0,
    idle: tuple[int, ...] | None = None,
    layers: int = 3,
    heads: int = 2,
    head_dim: int = 24,
    rotary: int = 24,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> dict:
    """Keyword arguments of draft_context over a cache of NaN.

    Args:
        lanes: of rows token by token; 0: rows have slots of their own.
        idle: rows that are NaN, at no valid position.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    count = len(positions)
    product = normal(count, layers * 2 * heads * head_dim).to(dtype)
    product[0, -3], product[-1, -2] = 1000.0, -1000.0  # more than fp8 holds
    angles = (10 * normal(count, rotary // 2)).repeat(1, 2)
    shape = ((lanes or count) + 1, 20, layers, heads, head_dim)
    keys, values = (torch.full(shape, float("nan"), device=device).to(cache_dtype or dtype) for _ in range(2))
    position, nobody = torch.tensor(positions, device=device), None
    if idle is not None:
        nobody = torch.zeros(count, dtype=torch.bool, device=device)
        for row in idle:
            nobody[row], position[row], product[row] = True, -(2**40), float("nan")
    return {
        "product": product,
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        "key_norms": (0.3 * normal(layers, head_dim) + 1).to(dtype),
        "keys": keys,
        "values": values,
        "slots": None if lanes else torch.arange(count, device=device).flip(0),
        "position": position,
        "idle": nobody,
        "lanes": lanes,
        "eps": 1e-6,
    }


def draft_context_oracle(
    product, cos, sin, key_norms, keys, values, slots, position, idle, lanes, eps
) -> tuple[torch.Tensor, torch.Tensor]:
    """What keys and values become, in float64 but for fp8, token by token and layer by layer."""
    _, _, layers, heads, head_dim = keys.shape
    results = keys.double(), values.double()
    for row in range(len(product)):
        if idle is not None and idle[row]:
            continue
        place = (row % lanes if slots is None else int(slots[row])), int(position[row])
        for layer, part in enumerate(product[row].unflatten(-1, (layers, 2, heads, head_dim))):
            new = turned(part[0], key_norms[layer], eps, cos[row], sin[row]), part[1].double()
            for cache, rows in zip(results, new, strict=True):
                cache[place][layer] = rows.clamp(-448, 448) if keys.dtype == FP8 else rows
    return results


def lanes_of(count: int, tokens: int, columns: int = 48, seed: int = 0, device: str = "cpu") -> dict:
    """Lanes of a decode state, by its names: some parked, some with less room than a block, buffers of poison."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(high: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    length = drawn(columns - 2 * tokens)
    lanes = {
        "token": drawn(100),
        "position": length + drawn(1000),
        "length": length,
        "limit": (length + drawn(2 * tokens, low=1)).clamp(max=columns),
        "parked": drawn(4) == 0,
        "finish": drawn(2).to(torch.uint8) * 0,
        "seed": drawn(2**40),
        "request": drawn(2**33),
        "sample": drawn(8),
        "temperature": torch.rand(count, generator=generator),
        "top_k": drawn(50),
        "top_p_tail": torch.rand(count, generator=generator),
        "min_p": torch.rand(count, generator=generator),
        "tokens": torch.full((count, columns), -5),
        "logprobs": torch.full((count, columns), float("nan")),
    }
    lanes["limit"][lanes["parked"]] = 0
    return {name: tensor.to(device) for name, tensor in lanes.items()}


def accept_arguments(count: int, tokens: int, seed: int = 0, device: str = "cpu") -> dict:
    """Keyword arguments of block_accept. Drafts are right up to a place drawn for each lane, and some choices end."""
    generator = torch.Generator().manual_seed(seed + 1)
    lanes = lanes_of(count, tokens, seed=seed)
    chosen = torch.randint(0, 100, (tokens, count), generator=generator)
    right = torch.arange(tokens - 1)[:, None] < torch.randint(0, tokens, (count,), generator=generator)
    step = torch.arange(tokens)[:, None]
    stops = torch.rand(tokens, count, generator=generator) < 0.15
    ended = stops | (step >= lanes["limit"] - lanes["length"] - 1) | lanes["parked"]
    rows = {
        "chosen": chosen.flatten(),
        "chosen_logprobs": torch.randn(tokens * count, 1, generator=generator),
        "ends": (stops.to(torch.uint8) + 2 * (ended & ~stops).to(torch.uint8)).flatten(),
        "ended": ended.flatten(),
        "drafts": torch.where(right, chosen[:-1], chosen[:-1] + 1).t(),
    }
    names = ("token", "position", "length", "parked", "finish", "tokens", "logprobs")
    rows |= {name: lanes[name] for name in names}
    return {name: tensor.to(device) for name, tensor in rows.items()}


def accept_oracle(arguments: dict) -> torch.Tensor:
    """The counts; what the lanes become is put in their place. Choice by choice, as decode steps make them."""
    lane = {name: tensor.tolist() for name, tensor in arguments.items()}
    lanes, counts = len(lane["token"]), []
    for at in range(lanes):
        step = 0
        while not lane["parked"][at]:
            row = step * lanes + at
            column = lane["length"][at]
            arguments["tokens"][at, column] = lane["token"][at] = lane["chosen"][row]
            arguments["logprobs"][at, column] = lane["chosen_logprobs"][row][0]
            lane["length"][at], lane["position"][at] = column + 1, lane["position"][at] + 1
            lane["finish"][at], lane["parked"][at] = lane["ends"][row], lane["ended"][row]
            step += 1
            if step > len(lane["drafts"][at]) or lane["drafts"][at][step - 1] != lane["chosen"][row]:
                break
        counts.append(step)
    for name in ("token", "position", "length", "parked", "finish"):
        arguments[name].copy_(torch.tensor(lane[name]))
    return torch.tensor(counts)
