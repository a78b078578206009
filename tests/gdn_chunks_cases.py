# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments for gdn_chunks, and a float64 oracle written from the recurrence."""

from typing import NamedTuple

import torch
from glue_cases import gates_oracle, slice_of_poison


class Heads(NamedTuple):
    keys: int
    values: int
    key_dim: int
    value_dim: int


REAL = Heads(16, 32, 128, 128)
RELATIVE = {torch.bfloat16: 1.2e-2, torch.float16: 5e-3, torch.float32: 2e-3}  # root mean square; TF32 is in it


def unit(tensor: torch.Tensor) -> torch.Tensor:
    return tensor / tensor.norm(dim=-1, keepdim=True)


def arguments_of(
    heads: Heads,
    rows: int,
    tokens: int,
    *,
    dtype: torch.dtype = torch.float16,
    state_dtype: torch.dtype = torch.float32,
    first: bool = False,
    seed: int = 0,
) -> dict:
    """Keyword arguments on the CPU; b and a are columns of wider tensors, and slots nobody uses are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def projection(skipped: int) -> torch.Tensor:
        return slice_of_poison((2 * normal(rows, tokens, heads.values)).to(dtype), 2 * heads.values + 5, skipped)

    state = torch.full((rows + 2, heads.values, heads.key_dim, heads.value_dim), float("nan"), dtype=state_dtype)
    slots = torch.arange(rows).flip(0) + 1
    if not first:
        state[slots] = normal(rows, *state.shape[1:]).to(state_dtype)
    return {
        "query": unit(normal(rows, tokens, heads.keys, heads.key_dim)).flatten(2).to(dtype),
        "key": unit(normal(rows, tokens, heads.keys, heads.key_dim)).flatten(2).to(dtype),
        "value": normal(rows, tokens, heads.values * heads.value_dim).to(dtype),
        "b": projection(2),
        "a": projection(heads.values + 1),
        "A_log": (4 * torch.rand(heads.values, generator=generator) - 5),  # from hardly any decay to a fast one
        "dt_bias": normal(heads.values),
        "state": state,
        "slots": slots,
        "first": first,
        "key_heads": heads.keys,
    }


def oracle(
    query, key, value, b, a, A_log, dt_bias, state, slots, first, key_heads
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read, [B, T, HV, DV], and the rows' states behind it, in float64."""
    beta, g = gates_oracle(b, a, A_log, dt_bias, None)
    _, heads, key_dim, value_dim = state.shape
    rows, tokens, _ = query.shape
    memory = state.cpu().double()[slots.cpu()]
    memory = torch.zeros_like(memory) if first else memory
    queries, keys = (
        part.cpu().double().view(rows, tokens, key_heads, key_dim).repeat_interleave(heads // key_heads, dim=2)
        for part in (query, key)
    )
    values = value.cpu().double().view(rows, tokens, heads, value_dim)
    core = []
    for at in range(tokens):
        memory = memory * g[:, at, :, None, None].exp()
        new = values[:, at] - torch.einsum("bhkv,bhk->bhv", memory, keys[:, at])
        memory = memory + torch.einsum("bhk,bhv->bhkv", keys[:, at], new * beta[:, at, :, None])
        core.append(torch.einsum("bhkv,bhk->bhv", memory, queries[:, at]) / key_dim**0.5)
    return torch.stack(core, dim=1), memory


def as_training_rounds(
    query, key, value, b, a, A_log, dt_bias, state, slots, first, key_heads
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`oracle`, but chunk by chunk and rounded where flash-linear-attention's kernels round."""
    beta, g = (part.transpose(1, 2) for part in gates_oracle(b, a, A_log, dt_bias, None))
    _, heads, key_dim, value_dim = state.shape
    rows, tokens, _ = query.shape

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return values.to(value.dtype).double()

    def of_heads(part: torch.Tensor, count: int) -> torch.Tensor:
        split = part.cpu().double().view(rows, tokens, count, -1).repeat_interleave(heads // count, dim=2)
        return split.transpose(1, 2)

    queries, keys, values = of_heads(query, key_heads), of_heads(key, key_heads), of_heads(value, heads)
    memory = state.cpu().double()[slots.cpu()]
    memory = torch.zeros_like(memory) if first else memory
    core = []
    for start in range(0, tokens, 64):
        q, k, v, learned, log = (part[:, :, start : start + 64] for part in (queries, keys, values, beta, g))
        log = log.cumsum(-1)
        decay, last = log.exp()[..., None], log[..., -1:, None]
        between = torch.tril(log[..., :, None] - log[..., None, :]).exp()
        inverse = rounded(_inverse_as_training_rounds(torch.tril(k @ k.mT * between * learned[..., None], -1)))
        factors = rounded(inverse @ rounded(rounded(k * learned[..., None]) * decay))
        before = rounded(memory)
        new = rounded(inverse @ rounded(v * learned[..., None])) - factors @ before
        seen = rounded(torch.tril(q @ k.mT * between))
        core.append((q @ before * decay + seen @ rounded(new)) / key_dim**0.5)
        memory = memory * last.exp() + k.mT @ rounded(new * (last - log[..., None]).exp())
    return torch.cat(core, dim=2).transpose(1, 2), memory


def _inverse_as_training_rounds(lower: torch.Tensor, block: int = 16) -> torch.Tensor:
    """(1 + lower)^-1 of strictly lower triangles: exact on the diagonal of blocks, products of TF32 below."""

    def tf32(values: torch.Tensor) -> torch.Tensor:
        return (values.float().view(torch.int32) & ~0x1FFF).view(torch.float32).double()

    size = lower.shape[-1]
    at = torch.arange(size) // block
    later = at[:, None] - at[None, :]
    inverse = torch.linalg.inv(torch.eye(size).double() + lower.where(later == 0, 0.0))
    own, below = tf32(inverse), tf32(lower.where(later > 0, 0.0))
    inverse = inverse - tf32((own @ below).where(later == 1, 0.0)) @ own
    for blocks in range(2, int(at[-1]) + 1):
        inverse = inverse - own @ tf32((below @ tf32(inverse)).where(later == blocks, 0.0))
    return inverse


def assert_same_roundings(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """But for sums in another order, which tip few roundings: where others are made, half of all bits differ."""
    assert (actual.cpu() == expected.to(actual.dtype)).double().mean() > 0.9


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """By the root mean square, row by row: products are of ``dtype``, so that an error goes by what is summed."""
    actual, expected = actual.cpu().double().flatten(1), expected.flatten(1)
    assert actual.isfinite().all()
    error, size = (actual - expected).square().mean(1).sqrt(), expected.square().mean(1).sqrt()
    assert (error <= RELATIVE[dtype] * size + 1e-7).all(), (error / size).tolist()
