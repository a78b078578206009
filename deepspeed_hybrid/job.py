# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One checked call: the prompts, the options, and how many rows run at a time."""

from dataclasses import dataclass, field, replace

from deepspeed.runtime.rollout.base import RolloutRequest, SamplingConfig

from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.generation.loop import Answers, LoopStats
from deepspeed_hybrid.generation.requests import (
    Prompts,
    SamplingPlan,
    check_positions,
    check_prompts,
    check_sampling,
    fresh_seed,
    pad_id,
)
from deepspeed_hybrid.paths import Paths


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
    stats: LoopStats = field(default_factory=LoopStats)


def check_job(
    request: RolloutRequest,
    sampling: SamplingConfig,
    paths: Paths,
    cfg: HybridEngineRolloutConfig,
    tokenizer,
) -> Job:
    """Check everything, change nothing.

    Raises:
        ValueError: bad input, named.
        RuntimeError: ``batch_invariant`` cannot be honoured for the model as it is now.
    """
    call = paths.call
    prompts = check_prompts(request.prompt_ids, request.prompt_attention_mask, call.known_ids, paths.device)
    plan = check_sampling(sampling, call.config.vocab_size, getattr(call.model, "generation_config", None), tokenizer)
    if cfg.batch_invariant:
        paths.require_chains()
        plan = replace(plan, kind=replace(plan.kind, invariant=True))
    pad_id(tokenizer)
    check_positions(prompts.lengths, plan.max_new_tokens, getattr(call.config, "max_position_embeddings", None))
    capacity, needed = cfg.continuous_cache_capacity, max(prompts.lengths) + plan.max_new_tokens
    if capacity is not None and capacity < needed:
        raise ValueError(
            f"continuous_cache_capacity={capacity} is too small: the longest prompt and max_new_tokens need {needed}"
        )
    rows = len(prompts.lengths) * plan.samples
    slots = getattr(sampling, "continuous_batch_size", None)
    # On a CPU even an elementwise function goes by where in its vectors a number stands.
    alone = cfg.batch_invariant and paths.device.type == "cpu"
    if plan.seed is None:
        plan = replace(plan, seed=fresh_seed())
    return Job(
        request=request,
        prompts=prompts,
        plan=plan,
        rows=rows,
        slots=1 if alone else min(rows, slots or rows),
        tokens=capacity or needed,
        continuous_slots=slots,
        answers=Answers.empty(rows, plan.max_new_tokens, paths.device),
    )
