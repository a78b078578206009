# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The gated delta rule over the tokens of a prompt, chunk by chunk, with its state where the slots have it."""

from typing import NamedTuple

import torch

from deepspeed_hybrid.ops.gdn_decode import STATE_DTYPES, WEIGHT_DTYPES
from deepspeed_hybrid.ops.gdn_gates import gdn_gates_reference
from deepspeed_hybrid.ops.inference import refuse_recording

CHUNK = 64  # tokens
CHUNK_DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (16, 32, 64, 128)

# Shapes: B rows, T tokens, S slots, HK/HV key/value heads, DK/DV their dims.


class GdnChunkSizes(NamedTuple):
    rows: int
    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


def gdn_chunks_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    first: bool,
    key_heads: int,
) -> torch.Tensor:
    """What :func:`gdn_chunks` does, token by token in plain torch on any device; fp32 will do too."""
    sizes = checked_sizes(query, key, value, b, a, A_log, dt_bias, state, slots, key_heads)
    beta, g = gdn_gates_reference(b, a, A_log, dt_bias, None)
    heads = (sizes.rows, sizes.tokens, key_heads, sizes.key_dim)
    groups = sizes.value_heads // key_heads
    queries, keys = (part.float().view(heads).repeat_interleave(groups, dim=2) for part in (query, key))
    values = value.float().view(sizes.rows, sizes.tokens, sizes.value_heads, sizes.value_dim)
    memory = torch.zeros(sizes.rows, *state.shape[1:], device=state.device) if first else state[slots].float()
    core = torch.empty_like(values)
    for token in range(sizes.tokens):
        memory = memory * g[:, token, :, None, None].exp()
        known = (memory * keys[:, token, :, :, None]).sum(-2)
        delta = (values[:, token] - known) * beta[:, token, :, None]
        memory = memory + keys[:, token, :, :, None] * delta[:, :, None, :]
        core[:, token] = (memory * queries[:, token, :, :, None]).sum(-2) * sizes.key_dim**-0.5
    state.index_copy_(0, slots, memory.to(state.dtype))
    return core.to(value.dtype)


@torch.library.custom_op("deepspeed_hybrid::gdn_chunks", mutates_args=("state",), device_types="cuda")
def _gdn_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    first: bool,
    key_heads: int,
) -> torch.Tensor:
    sizes = checked_sizes(query, key, value, b, a, A_log, dt_bias, state, slots, key_heads)
    reason = obstacle(query.dtype, sizes.key_dim, sizes.value_dim)
    if reason is not None:
        raise RuntimeError(reason)
    from deepspeed_hybrid.ops.triton.gdn_chunks import launch  # here, because a torch for CPUs has no Triton

    return launch(query, key, value, b, a, A_log, dt_bias, state, slots, first, sizes)


@_gdn_chunks.register_fake
def _(query, key, value, b, a, A_log, dt_bias, state, slots, first, key_heads):
    return value.new_empty(*value.shape[:2], b.shape[2], value.shape[2] // b.shape[2])


_gdn_chunks.register_kernel("cpu")(gdn_chunks_reference)


def gdn_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    first: bool,
    key_heads: int,
) -> torch.Tensor:
    """Gates, and the gated delta rule over all tokens of every row.

    On CUDA these are two launches without a host sync, for bf16 and fp16 and heads of 16, 32, 64 or 128 dimensions;
    the first call for a set of sizes compiles them. Products are of the inputs' dtype, but for the inverse of a
    chunk's triangle; sums, gates and the state are fp32. All are rounded where flash-linear-attention's kernels round,
    which a training forward runs: where keys of a chunk are all alike, beta is near 1 and nothing decays, theirs adds
    up to 1.4%. A row has the same bits in any batch of as many columns. On a CPU it is
    :func:`gdn_chunks_reference`. There is no gradient.

    Args:
        query, key: [B, T, HK * DK] in one dtype, contiguous, each head of length 1 or 0. At least one token.
        value: [B, T, HV * DV] in their dtype, contiguous.
        b, a: [B, T, HV] of any float dtype, contiguous in the last dimension; columns of a wider tensor will do.
        A_log, dt_bias: [HV] of any float dtype.
        state: [S, HV, DK, DV] fp32, bf16 or fp16, contiguous; written to, and unless ``first`` read.
        slots: [B] int64, the slot of each row. Rows may share one whose state nobody wants.
        first: these are the first tokens of their sequences, whose state before is zeros.
        key_heads: HK, a divisor of HV; value head h goes with key head h // (HV / HK).

    Returns:
        [B, T, HV, DV] in value's dtype, contiguous.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    refuse_recording("gdn_chunks", query, key, value, b, a, A_log, dt_bias, state)
    return _gdn_chunks(query, key, value, b, a, A_log, dt_bias, state, slots, first, key_heads)


def obstacle(dtype: torch.dtype, key_dim: int, value_dim: int) -> str | None:
    """Why the kernels do not take such a layer, or None."""
    if dtype not in CHUNK_DTYPES:
        return f"query must be bfloat16 or float16 on this device, got {dtype}"
    if key_dim not in HEAD_DIMS or value_dim not in HEAD_DIMS:
        return f"heads must have 16, 32, 64 or 128 dimensions, got {key_dim} and {value_dim}"
    return None


def checked_sizes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    key_heads: int,
) -> GdnChunkSizes:
    """The sizes, from arguments that fit each other; otherwise a RuntimeError that names one."""
    for name, tensor, dims in (("query", query, 3), ("state", state, 4)):
        if tensor.dim() != dims:
            raise RuntimeError(f"{name} must have {dims} dimensions, got shape {tuple(tensor.shape)}")
    rows, tokens, _ = query.shape
    _, value_heads, key_dim, value_dim = state.shape
    if tokens < 1:
        raise RuntimeError("query must have at least one token")
    if key_heads < 1 or value_heads % key_heads:
        raise RuntimeError(f"key_heads must divide the {value_heads} heads of state, got {key_heads}")
    heads = (rows, tokens, value_heads)
    expected = {
        "query": (query, (rows, tokens, key_heads * key_dim), (*CHUNK_DTYPES, torch.float32)),
        "key": (key, (rows, tokens, key_heads * key_dim), (query.dtype,)),
        "value": (value, (rows, tokens, value_heads * value_dim), (query.dtype,)),
        "b": (b, heads, WEIGHT_DTYPES),
        "a": (a, heads, WEIGHT_DTYPES),
        "A_log": (A_log, (value_heads,), WEIGHT_DTYPES),
        "dt_bias": (dt_bias, (value_heads,), WEIGHT_DTYPES),
        "state": (state, tuple(state.shape), STATE_DTYPES),
        "slots": (slots, (rows,), (torch.int64,)),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor.dtype not in dtypes:
            accepted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise RuntimeError(f"{name} must be {accepted}, got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise RuntimeError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if name in ("b", "a"):
            if tensor.stride(2) != 1 and value_heads > 1:
                raise RuntimeError(f"the last dimension of {name} must be contiguous, got strides {tensor.stride()}")
        elif not tensor.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous, got strides {tensor.stride()}")
        if tensor.device != query.device:
            raise RuntimeError(f"{name} is on {tensor.device}, query on {query.device}")
    return GdnChunkSizes(rows, tokens, key_heads, value_heads, key_dim, value_dim)
