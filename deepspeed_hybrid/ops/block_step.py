# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The bookkeeping of a block of tokens a lane: what goes into the model, and what of it comes out.

Rows of a block are token by token: row i * B + b is token i of lane b. The arguments that are a lane's are those of
:class:`deepspeed_hybrid.generation.state.DecodeState`, contiguous [B]. On CUDA every op here is one plain launch
without a host sync, behind whose end the next kernel starts; the first call for a length compiles it. On a CPU it is
its reference.
"""

import torch

# Shapes: B lanes, T tokens of a block, N = T * B rows, C columns of the answers' buffers.

WHOLE = ("token", "position", "length", "limit", "seed", "request", "sample", "top_k")  # of a lane, int64
REAL = ("temperature", "top_p_tail", "min_p")  # of a lane, fp32


# ------------------------------------------------------------------------------------------------------- block_inputs


def block_inputs_reference(
    token: torch.Tensor,
    position: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    parked: torch.Tensor,
    drafts: torch.Tensor | None,
    filler: int,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`block_inputs` does, in plain torch on any device."""
    lanes, steps = token.shape[0], torch.arange(tokens, device=token.device)[:, None]
    ids = token.new_full((tokens, lanes), filler)
    ids[0] = token
    if drafts is not None:
        ids[1:] = drafts.t()
    counts = (limit - length).clamp(0, tokens).masked_fill(parked, 0)
    return ids, position + steps, steps >= counts, counts


@torch.library.custom_op("deepspeed_hybrid::block_inputs", mutates_args=(), device_types="cuda")
def block_inputs(
    token: torch.Tensor,
    position: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    parked: torch.Tensor,
    drafts: torch.Tensor | None,
    filler: int,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a block's forward reads: each lane's last token, and what is drafted behind it.

    Args:
        token, position, length, limit, parked: of the lanes.
        drafts: [B, T - 1] int64 of any strides; None: ``filler`` in all its places.
        filler: a token.
        tokens: T.

    Returns:
        ids and positions [T, B] int64; idle [T, B] bool, tokens that are none: of parked lanes, or beyond a lane's
        limit; counts [B] int64, tokens of a lane that are some.
    """
    from deepspeed_hybrid.ops.triton.block_step import inputs  # here, because a torch for CPUs has no Triton

    return inputs(token, position, length, limit, parked, drafts, filler, tokens)


@block_inputs.register_fake
def _(token, position, length, limit, parked, drafts, filler, tokens):
    shape = (tokens, token.shape[0])
    ids, positions = (token.new_empty(shape) for _ in range(2))
    return ids, positions, parked.new_empty(shape), torch.empty_like(token)


# ------------------------------------------------------------------------------------------------------- block_rows


def block_rows_reference(
    whole: list[torch.Tensor], real: list[torch.Tensor], parked: torch.Tensor, finish: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`block_rows` does, in plain torch on any device."""
    lanes = dict(zip(WHOLE, whole, strict=True))
    steps = torch.arange(tokens, device=parked.device)[:, None]
    stepping = ("position", "length")
    rows = [(lanes[name] + steps).flatten() if name in stepping else lanes[name].repeat(tokens) for name in WHOLE]
    idle = parked | (steps >= lanes["limit"] - lanes["length"])
    return (
        torch.stack(rows),
        torch.stack([part.repeat(tokens) for part in real]),
        idle.flatten(),
        finish.repeat(tokens),
    )


@torch.library.custom_op("deepspeed_hybrid::block_rows", mutates_args=(), device_types="cuda")
def block_rows(
    whole: list[torch.Tensor], real: list[torch.Tensor], parked: torch.Tensor, finish: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every token of a block as a row of its own, as if all before it had come out.

    Args:
        whole, real: of the lanes, as ``WHOLE`` and ``REAL`` name them.
        parked, finish: of the lanes.
        tokens: T.

    Returns:
        whole [8, N] int64 and real [3, N] fp32 in the same order, parked [N] bool and finish [N] uint8.
    """
    from deepspeed_hybrid.ops.triton.block_step import rows  # here, because a torch for CPUs has no Triton

    return rows(whole, real, parked, finish, tokens)


@block_rows.register_fake
def _(whole, real, parked, finish, tokens):
    count = tokens * parked.shape[0]
    rows, others = whole[0].new_empty(len(WHOLE), count), real[0].new_empty(len(REAL), count)
    return rows, others, parked.new_empty(count), finish.new_empty(count)


# ------------------------------------------------------------------------------------------------------ block_accept


def block_accept_reference(
    chosen: torch.Tensor,
    chosen_logprobs: torch.Tensor,
    ends: torch.Tensor,
    ended: torch.Tensor,
    drafts: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    length: torch.Tensor,
    parked: torch.Tensor,
    finish: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
) -> torch.Tensor:
    """What :func:`block_accept` does, in plain torch on any device."""
    lanes = token.shape[0]
    chosen, chosen_logprobs, ends, ended = (part.view(-1, lanes) for part in (chosen, chosen_logprobs, ends, ended))
    right = (chosen[:-1] == drafts.t()) & ~ended[:-1]
    counts = (1 + right.long().cumprod(dim=0).sum(dim=0)).masked_fill(parked, 0)
    last = (counts - 1).clamp(min=0)[None]
    # Behind the last that came out it comes again, to the same place.
    taken = torch.minimum(torch.arange(len(chosen), device=chosen.device)[:, None], last)
    columns = (length + taken).clamp(max=tokens.shape[1] - 1).t()
    for buffer, values in ((tokens, chosen), (logprobs, chosen_logprobs)):
        kept = buffer.gather(1, columns)
        buffer.scatter_(1, columns, torch.where(parked[:, None], kept, values.gather(0, taken).t()))
    for buffer, values in ((token, chosen), (finish, ends)):
        buffer.copy_(torch.where(parked, buffer, values.gather(0, last)[0]))
    position.add_(counts)
    length.add_(counts)
    parked.logical_or_(ended.gather(0, last)[0])
    return counts


@torch.library.custom_op(
    "deepspeed_hybrid::block_accept",
    mutates_args=("token", "position", "length", "parked", "finish", "tokens", "logprobs"),
    device_types="cuda",
)
def block_accept(
    chosen: torch.Tensor,
    chosen_logprobs: torch.Tensor,
    ends: torch.Tensor,
    ended: torch.Tensor,
    drafts: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    length: torch.Tensor,
    parked: torch.Tensor,
    finish: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
) -> torch.Tensor:
    """Advance every lane by the choices that are certain: up to the first that is not what was drafted, or an end.

    Args:
        chosen: [N] int64, of every row of the block.
        chosen_logprobs: [N] or [N, 1] fp32.
        ends: [N] uint8, what ``finish`` is after that choice.
        ended: [N] bool, whether ``parked`` is.
        drafts: [B, T - 1] int64 of any strides.
        token, position, length, parked, finish: of the lanes, updated. Nothing of a parked lane changes.
        tokens, logprobs: [B, C] int64 and fp32, updated from each lane's ``length`` on.

    Returns:
        [B] int64: choices that came out; 0 for parked lanes.
    """
    from deepspeed_hybrid.ops.triton.block_step import accept  # here, because a torch for CPUs has no Triton

    lanes = token, position, length, parked, finish, tokens, logprobs
    return accept(chosen, chosen_logprobs, ends, ended, drafts, *lanes)


@block_accept.register_fake
def _(chosen, chosen_logprobs, ends, ended, drafts, token, *_):
    return torch.empty_like(token)


# ------------------------------------------------------------------------------------------------------ count_reached


def count_reached_reference(counts: torch.Tensor, reached: torch.Tensor) -> None:
    """What :func:`count_reached` does, in plain torch on any device."""
    places = torch.arange(reached.shape[0], device=counts.device)[:, None]
    reached.add_((counts > places).sum(dim=1))


@torch.library.custom_op("deepspeed_hybrid::count_reached", mutates_args=("reached",), device_types="cuda")
def count_reached(counts: torch.Tensor, reached: torch.Tensor) -> None:
    """Add to ``reached`` [T] int64 at i how many of ``counts`` [B] int64 are more than i."""
    from deepspeed_hybrid.ops.triton.block_step import count  # here, because a torch for CPUs has no Triton

    count(counts, reached)


@count_reached.register_fake
def _(counts, reached) -> None:
    """Nothing is returned; everything happens in the buffer."""


block_inputs.register_kernel("cpu")(block_inputs_reference)
block_rows.register_kernel("cpu")(block_rows_reference)
block_accept.register_kernel("cpu")(block_accept_reference)
count_reached.register_kernel("cpu")(count_reached_reference)
