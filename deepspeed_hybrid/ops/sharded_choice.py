# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The choice of a token where each rank has the scores of some ids: candidates meet, the scores stay where they are.

The tokens are those that :func:`~deepspeed_hybrid.ops.decode_step.choose_token` takes from the whole scores: noise
belongs to an id, and a chunk's weight is a sum over the ranks that have a part of it.
"""

import math

import torch

from deepspeed_hybrid.ops.decode_step import CHUNK, CHUNK_NOISE, LENGTH, STOPPED, record_choice
from deepspeed_hybrid.ops.philox import gumbel_noise
from deepspeed_hybrid.ops.vocab_shard import VocabShard

Key = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def choose_token_on_shards(
    shard: VocabShard,
    scores: torch.Tensor,
    raw_logits: torch.Tensor | None,
    temperature: torch.Tensor | None,
    key: Key,
    sampled: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Argmax in one small gather, a sample in one, or in two where the vocabulary has several chunks.

    Args:
        scores, raw_logits: [B, shard.size], this rank's.
        temperature: as in ``choose_token``.
        key: seed, request, sample and position of the noise, [B] int64 each.

    Returns:
        token [B] int64 and logprob [B] fp32, the same on every rank.
    """
    final = scores.float()
    if sampled and temperature is not None:
        final = final / temperature[:, None]
    source = final if raw_logits is None else raw_logits.float()
    if not sampled:
        entry = final.argmax(dim=-1)
        merit = final.gather(1, entry[:, None])[:, 0]
    elif shard.total <= CHUNK:
        noisy = final + shard.own(gumbel_noise(*key, shard.total))
        entry = noisy.argmax(dim=-1)
        merit = noisy.gather(1, entry[:, None])[:, 0]
    else:
        entry, merit = _best_of_chunk(shard, final, key)
    score = source.gather(1, entry[:, None])[:, 0]
    mine = torch.stack([merit, (entry + shard.start).float(), score, source.logsumexp(dim=-1)], dim=-1)
    merits, ids, scored, totals = shard.everyones(mine).unbind(dim=-1)  # [ranks, B] each
    best = merits.argmax(dim=0, keepdim=True)
    return ids.gather(0, best)[0].long(), scored.gather(0, best)[0] - totals.logsumexp(dim=0)


def _best_of_chunk(shard: VocabShard, final: torch.Tensor, key: Key) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's best entry [B] in the chunk that is drawn, and its noisy score [B]: -inf where it has none."""
    first = shard.start // CHUNK
    ahead = shard.start - first * CHUNK  # ids of the first chunk that another rank has
    filling = -(ahead + shard.size) % CHUNK
    chunks = torch.nn.functional.pad(final, (ahead, filling), value=-math.inf).unflatten(1, (-1, CHUNK))

    count = -(-shard.total // CHUNK)
    mine = final.new_full((len(final), count), -math.inf)
    mine[:, first : first + chunks.shape[1]] = chunks.logsumexp(dim=-1)
    weight = shard.everyones(mine).logsumexp(dim=0)
    chunk = (weight + gumbel_noise(*key, count, first=CHUNK_NOISE)).argmax(dim=-1)

    local = (chunk - first).clamp(0, chunks.shape[1] - 1)
    entries = chunks.gather(1, local[:, None, None].expand(-1, 1, CHUNK))[:, 0]
    noisy = entries + gumbel_noise(*key, CHUNK, first=chunk * CHUNK)
    noisy = noisy.masked_fill((chunk != local + first)[:, None], -math.inf)
    entry = noisy.argmax(dim=-1)
    merit = noisy.gather(1, entry[:, None])[:, 0]
    return (local * CHUNK + entry - ahead).clamp(0, shard.size - 1), merit


def decode_step_on_shards(
    shard: VocabShard,
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
    fused: bool = False,
) -> None:
    """``decode_step`` with ``scores`` and ``raw_logits`` [B, shard.size]; all else is the same on every rank.

    Args:
        fused: by Triton kernels, of which an argmax takes three; a sample is still chosen by torch.
    """
    state = token, position, length, parked, finish, tokens, logprobs
    if fused and not sampled:
        candidates = shard.everyones(kernels().nominate(scores, raw_logits, shard.start))
        kernels().record(candidates, limit, stop_ids, *state, STOPPED, LENGTH)
        return
    key = (seed, request, sample, position + (~parked).long())
    choice, logprob = choose_token_on_shards(shard, scores, raw_logits, temperature, key, sampled)
    if fused:
        none = torch.zeros_like(logprob)  # one candidate, whose score is its logprob
        candidates = torch.stack([none, choice.float(), logprob, none], dim=-1)[None]
        kernels().record(candidates, limit, stop_ids, *state, STOPPED, LENGTH)
        return
    record_choice(choice, logprob, limit, stop_ids, *state)


def kernels():
    """The module of Triton kernels: a torch for CPUs has no Triton."""
    from deepspeed_hybrid.ops.triton import sharded_choice

    return sharded_choice
