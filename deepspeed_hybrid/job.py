# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One checked call: the prompts, the options, and how many rows run at a time."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from deepspeed.runtime.rollout.base import RolloutRequest, SamplingConfig

from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.generation.arena import Arena
from deepspeed_hybrid.generation.batch import AUTO
from deepspeed_hybrid.generation.capacity import ANSWER_BYTES, readable
from deepspeed_hybrid.generation.loop import Answers, LoopStats
from deepspeed_hybrid.generation.requests import (
    Prompts,
    SamplingPlan,
    check_positions,
    check_prompts,
    check_sampling,
    check_size,
    fresh_seed,
    needed_tokens,
    pad_id,
    with_limits,
)
from deepspeed_hybrid.paths import Paths

AUTO_SHARE = 0.9  # of free memory; the rest is for activations


@dataclass(frozen=True)
class Job:
    """What a call runs on, and where its rows go."""

    request: RolloutRequest
    prompts: Prompts
    plan: SamplingPlan
    rows: int
    slots: int  # most rows in flight
    tokens: int  # a slot has room for
    continuous_slots: int | None  # as asked for
    answers: Answers
    seed_drawn: bool = False  # nobody asked for this one
    keeps: bool = True  # prompts for samples that wait for a slot
    anew: bool = False  # buffers and graphs, since ranks that share the model have unlike ones
    stats: LoopStats = field(default_factory=LoopStats)


def check_job(
    request: RolloutRequest,
    sampling: SamplingConfig,
    paths: Paths,
    cfg: HybridEngineRolloutConfig,
    tokenizer,
    arena: Arena,
) -> Job:
    """Check everything, change nothing.

    Raises:
        ValueError: bad input, named; or more rows at once than the device has memory for.
        RuntimeError: ``batch_invariant`` cannot be honoured for the model as it is now.
    """
    call = paths.call
    prompts = check_prompts(request.prompt_ids, request.prompt_attention_mask, call.known_ids, paths.device)
    plan = check_sampling(sampling, call.config.vocab_size, getattr(call.model, "generation_config", None), tokenizer)
    if cfg.speculative is not None:
        paths.require_chains(f"speculative={cfg.speculative!r}")
    if cfg.batch_invariant:
        paths.require_chains()
        plan = replace(plan, kind=replace(plan.kind, invariant=True))
    pad_id(tokenizer)
    plan = with_limits(plan, getattr(sampling, "max_new_tokens_per_row", None), len(prompts.lengths))
    check_positions(prompts.lengths, plan, getattr(call.config, "max_position_embeddings", None))
    capacity, needed = cfg.continuous_cache_capacity, needed_tokens(prompts.lengths, plan)
    if capacity is not None and capacity < needed:
        raise ValueError(
            f"continuous_cache_capacity={capacity} is too small: the longest prompt and max_new_tokens need {needed}"
        )
    rows = len(prompts.lengths) * plan.samples
    check_size(rows, capacity or needed, plan)
    asked = getattr(sampling, "continuous_batch_size", None)
    # On a CPU even an elementwise function goes by where in its vectors a number stands.
    alone = cfg.batch_invariant and paths.device.type == "cpu"
    slots = 1 if alone else min(rows, rows if asked in (None, AUTO) else asked)
    slots, keeps = fitting_slots(
        arena, paths, rows, slots, capacity or needed, plan, asked, cfg.use_shared_prefill is not False
    )
    seed_drawn = plan.seed is None
    if seed_drawn:
        plan = replace(plan, seed=fresh_seed())
    return Job(
        request=request,
        prompts=prompts,
        plan=plan,
        rows=rows,
        slots=slots,
        tokens=capacity or needed,
        continuous_slots=slots if asked == AUTO else asked,
        answers=Answers.empty(rows, plan.max_new_tokens, paths.device),
        seed_drawn=seed_drawn,
        keeps=keeps,
    )


def fitting_slots(
    arena: Arena,
    paths: Paths,
    rows: int,
    slots: int,
    tokens: int,
    plan: SamplingPlan,
    asked: int | str | None,
    shared_prefill: bool,
) -> tuple[int, bool]:
    """``slots``, or with a ``continuous_batch_size`` of 'auto' as many of them as there is memory for; and whether
    there is some for a prompt that samples wait for, who else run it again.

    Activations are not estimated: what is refused cannot fit, and what is not may still be too much.

    Raises:
        ValueError: more than fits was asked for, or nothing fits.
    """
    fast = asked == AUTO
    if not arena.needed(slots, tokens, plan.kind, fast):
        return slots, True
    free = arena.free()
    if free is None:
        return slots, True
    others = rows * plan.max_new_tokens * ANSWER_BYTES + paths.injection.missing_bytes

    def wanted(count: int, keeps: bool = False) -> int:
        """Bytes to be made, with those of a prompt that some of its samples wait for."""
        waits = keeps and shared_prefill and plan.samples > 1 and count < rows
        kept = arena.slot_bytes(tokens) if waits else 0
        return arena.needed(count, tokens, plan.kind, fast) + others + kept

    def fits(count: int, share: float, keeps: bool = True) -> bool:
        return not arena.needed(count, tokens, plan.kind, fast) or wanted(count, keeps) <= share * free

    if fits(slots, AUTO_SHARE if asked == AUTO else 1.0):
        return slots, True
    if asked != AUTO and fits(slots, 1.0, keeps=False):
        return slots, False
    fitting: int | None = most_slots(slots - 1, lambda count: fits(count, AUTO_SHARE)) or None
    if asked == AUTO and fitting:
        return fitting, True
    if fitting is None and fits(1, 1.0, keeps=False):
        fitting = 1
    if asked == AUTO and fitting:
        return fitting, fits(1, 1.0)
    what = f"continuous_batch_size={asked!r}"
    if asked is None:
        what = f"{rows} rows at once ({rows // plan.samples} prompts, n_samples_per_prompt={plan.samples})"
    advice = f"a continuous_batch_size of {fitting} would fit" if fitting else "not even one would fit"
    needed = wanted(1 if asked == AUTO else slots)
    raise ValueError(
        f"{what} needs {readable(needed)} for slots of {tokens} tokens, and {readable(free)} are free on "
        f"{paths.device}; {advice}"
    )


def most_slots(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number of slots up to ``most`` that fits, where all smaller ones do; 0 where none does."""
    return bisect_left(range(1, most + 1), True, key=lambda count: not fits(count))
