# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The end of a decode step: choose a token, take its logprob, and do all the bookkeeping on the device."""

import math

import torch

from deepspeed_hybrid.ops.loader import load
from deepspeed_hybrid.ops.philox import gumbel_noise

RUNNING, STOPPED, LENGTH = 0, 1, 2

CHUNK = 1024  # consecutive vocabulary entries; the CUDA op's kChunk
CHUNK_NOISE = 2**33  # chunk c draws as this entry + c would, which no vocabulary reaches


def choose_token(
    scores: torch.Tensor,
    raw_logits: torch.Tensor | None,
    temperature: torch.Tensor | None,
    seed: torch.Tensor,
    request: torch.Tensor,
    sample: torch.Tensor,
    position: torch.Tensor,
    sampled: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Argmax, or an exact sample (:func:`sample_token`), with the fp32 logprob of the choice.

    Args:
        scores: [B, V] fp32, bf16 or fp16. Entries at -inf cannot be chosen.
        raw_logits: [B, V] to take the logprob from, or None for the distribution chosen from.
        temperature: [B] fp32 divisor of ``scores`` when sampling, or None where the scores are final.
        seed, request, sample, position: [B] int64, the key of the noise; ``position`` is the chosen token's own.
        sampled: False for argmax, in which case temperature and noise are not used.

    Returns:
        token [B] int64, logprob [B] fp32.
    """
    final = scores.float()
    if sampled and temperature is not None:
        final = final / temperature[:, None]
    token = sample_token(final, (seed, request, sample, position)) if sampled else final.argmax(dim=-1)
    source = final if raw_logits is None else raw_logits.float()
    logprob = source.gather(1, token[:, None])[:, 0] - source.logsumexp(dim=-1)
    return token, logprob


def sample_token(
    scores: torch.Tensor, key: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """An exact sample of softmax(scores) for every row: of a chunk by its whole weight, then of an entry within it.

    Both are argmaxima under Gumbel noise. The largest of a chunk's noisy scores is distributed as logsumexp(chunk)
    plus one Gumbel variable, whichever entry attains it (Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014). So
    one variable a chunk finds the chunk of the row's largest noisy score without the noise of its entries, and noise
    of its own then finds the entry. A row draws for V / 1024 chunks and 1024 entries instead of V entries.

    Args:
        scores: [B, V] fp32.
        key: seed, request, sample and position of the noise, [B] int64 each.

    Returns:
        [B] int64.
    """
    vocab = scores.shape[1]
    if vocab <= CHUNK:
        return (scores + gumbel_noise(*key, vocab)).argmax(dim=-1)
    filling = -vocab % CHUNK
    if filling:
        scores = torch.nn.functional.pad(scores, (0, filling), value=-math.inf)
    chunks = scores.unflatten(1, (-1, CHUNK))
    weight = chunks.logsumexp(dim=-1)
    chunk = (weight + gumbel_noise(*key, weight.shape[1], first=CHUNK_NOISE)).argmax(dim=-1)
    entries = chunks.gather(1, chunk[:, None, None].expand(-1, 1, CHUNK))[:, 0]
    entry = (entries + gumbel_noise(*key, CHUNK, first=chunk * CHUNK)).argmax(dim=-1)
    return chunk * CHUNK + entry


def decode_step_reference(
    scores: torch.Tensor,
    raw_logits: torch.Tensor | None,
    temperature: torch.Tensor | None,
    seed: torch.Tensor,
    request: torch.Tensor,
    sample: torch.Tensor,
    limit: torch.Tensor,
    stop_ids: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    length: torch.Tensor,
    parked: torch.Tensor,
    finish: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    sampled: bool,
) -> None:
    """What :func:`decode_step` does, in plain torch on any device."""
    own_position = position + (~parked).long()
    choice, logprob = choose_token(scores, raw_logits, temperature, seed, request, sample, own_position, sampled)
    record_choice(choice, logprob, limit, stop_ids, token, position, length, parked, finish, tokens, logprobs)


def record_choice(
    choice: torch.Tensor,
    logprob: torch.Tensor,
    limit: torch.Tensor,
    stop_ids: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    length: torch.Tensor,
    parked: torch.Tensor,
    finish: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
) -> None:
    """Everything that :func:`decode_step` does once tokens [B] and logprobs [B] are chosen."""
    active = ~parked
    advance = active.long()
    position.add_(advance)
    choice = torch.where(active, choice, token)
    token.copy_(choice)

    column = length.clamp(max=tokens.shape[1] - 1)[:, None]
    tokens.scatter_(1, column, torch.where(active[:, None], choice[:, None], tokens.gather(1, column)))
    logprobs.scatter_(1, column, torch.where(active[:, None], logprob[:, None], logprobs.gather(1, column)))
    length.add_(advance)

    stopped = active & (choice[:, None] == stop_ids[None, :]).any(dim=-1)
    out_of_length = active & ~stopped & (length >= limit)
    finish.masked_fill_(stopped, STOPPED).masked_fill_(out_of_length, LENGTH)
    parked.logical_or_(stopped | out_of_length)


@torch.library.custom_op(
    "deepspeed_hybrid::decode_step",
    mutates_args=("token", "position", "length", "parked", "finish", "tokens", "logprobs"),
    device_types="cuda",
)
def decode_step(
    scores: torch.Tensor,
    raw_logits: torch.Tensor | None,
    temperature: torch.Tensor | None,
    seed: torch.Tensor,
    request: torch.Tensor,
    sample: torch.Tensor,
    limit: torch.Tensor,
    stop_ids: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    length: torch.Tensor,
    parked: torch.Tensor,
    finish: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    sampled: bool,
) -> None:
    """Choose the next token of every row that is not parked and record it, in place.

    A row's position and length advance by one, its token and logprob are written at column ``length`` of the output
    buffers, and it is parked at a stop id (STOPPED) or at its limit (LENGTH; a stop id on the last allowed token is
    STOPPED). Nothing of a parked row changes.

    On CUDA this is one pass over the scores, one over ``raw_logits`` if given, and a look at one chunk a row, without
    a host sync; the first call builds it. A row's token and logprob are bit-equal in any batch. On a CPU it is
    :func:`decode_step_reference`.

    Args:
        scores, raw_logits, temperature, seed, request, sample, sampled: as in :func:`choose_token`.
        limit: [B] int64, the most tokens a row may produce.
        stop_ids: [N] int64, padded with -1.
        token, position, length: [B] int64, updated.
        parked: [B] bool, updated.
        finish: [B] uint8 of RUNNING, STOPPED or LENGTH, updated.
        tokens: [B, C] int64, updated.
        logprobs: [B, C] fp32, updated.
    """
    load("decode_step").decode_step(
        scores,
        raw_logits,
        temperature,
        seed,
        request,
        sample,
        limit,
        stop_ids,
        token,
        position,
        length,
        parked,
        finish,
        tokens,
        logprobs,
        sampled,
    )


@decode_step.register_fake
def _(*args) -> None:
    """Nothing is returned; everything happens in the buffers."""


decode_step.register_kernel("cpu")(decode_step_reference)
