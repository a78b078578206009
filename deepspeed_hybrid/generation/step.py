# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One decode step: forward, choice, logprob and every buffer update. It runs eagerly anywhere, and in a graph."""

from collections.abc import Callable

import torch

from deepspeed_hybrid.cache.layers import StepPlan
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall
from deepspeed_hybrid.generation.sampling import SamplingKind, penalise_repetition, truncate_alone
from deepspeed_hybrid.generation.state import DecodeState
from deepspeed_hybrid.ops.vocab_shard import VocabShard


def decode_step(
    model: ModelCall,
    cache: SlotCache,
    state: DecodeState,
    kind: SamplingKind,
    kv_length: int,
    masked: bool,
    choose: Callable,
    truncate: Callable,
) -> None:
    """Feed every lane's last token and choose its next one, in place and without a host sync.

    Args:
        model: the model's forward.
        cache: holds the lanes' slots 0..B-1.
        state: B rows.
        kind: what to compute.
        kv_length: cache positions attention reads; no row in flight may stand beyond it.
        masked: whether attention wants a mask over them; not where it goes by the rows' own positions.
        choose: the ``decode_step`` op, or its torch reference.
        truncate: the ``truncate_scores`` op, or its torch reference.
    """
    lanes = state.token.numel()
    position = state.position[:, None]
    plan = StepPlan(
        lanes=lanes,
        slots=None,
        kv_length=kv_length,
        parked=state.parked,
        write_positions=position,
        before=state.position,
        ids=state.token[:, None],
        answered=state.length,
        stepped=state.stepped,
    )
    mask = None
    if masked:
        mask = torch.arange(kv_length, device=position.device)[None, None, None, :] <= position[:, :, None, None]
    with cache.planned(plan):
        logits = model.logits(state.token[:, None], position, mask, cache)
    advance(state, logits, kind, choose, truncate, model.shard)


def advance(
    state: DecodeState,
    logits: torch.Tensor,
    kind: SamplingKind,
    choose: Callable,
    truncate: Callable,
    shard: VocabShard | None,
) -> None:
    """Turn logits [B, V], or this rank's share of them, into the next token of every row in flight, with its logprob
    and the row's bookkeeping."""
    scores, temperature = logits, state.temperature
    if kind.penalised:
        seen = state.seen if shard is None else shard.own(state.seen)
        scores = penalise_repetition(scores, seen, state.penalty)
    if kind.truncated:
        alone = kind.invariant or len(scores) == 1
        arguments = (scores.float() / temperature[:, None], state.top_k, state.top_p_tail, state.min_p)
        scores = truncate_alone(truncate, *arguments) if alone else truncate(*arguments)
    choose(
        scores,
        logits if kind.raw_logprobs else None,
        None if kind.truncated or not kind.sampled else temperature,
        state.seed,
        state.request,
        state.sample,
        state.limit,
        state.stop_ids,
        state.token,
        state.position,
        state.length,
        state.parked,
        state.finish,
        state.tokens,
        state.logprobs,
        kind.sampled,
    )
    if kind.penalised:
        state.seen.scatter_(1, state.token[:, None], True)
