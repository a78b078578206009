# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Rollouts as RL has them: many rows of very different lengths over fewer slots, next to the same rows in batches."""

import math
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.generation.batch import RolloutRequest, SamplingConfig
from deepspeed_hybrid.rollout import HybridEngineRollout
from deepspeed_hybrid.tools import results
from deepspeed_hybrid.tools.bench import SAMPLING_CHOICES, StepBytes, random_request, read_bandwidth, step_bytes
from deepspeed_hybrid.tools.bench_prompts import allocated_bytes, bench_chunks, bench_shared
from deepspeed_hybrid.tools.device import has_cuda
from deepspeed_hybrid.tools.models import build_model, load_config
from deepspeed_hybrid.tools.process import quiet

SPREAD = 0.9  # of the logarithm of a length
WARM_UP_SHARE = 8  # the calls that warm up have lengths this many times smaller: they refill and shrink, too
PARTS = ("schedules", "shared", "chunks")
SCHEDULES = {
    "continuous": "slots refilled as rows end",
    "fixed": "as many rows as there are slots, and the next when all have ended; the last of them on fewer lanes",
    "fixed-plain": "the same, on all lanes to the end",
    "at-once": "a slot for every row",
}
HEADINGS = {
    "schedule": "schedule   ",
    "slots": "slots",
    "tokens": "tokens",
    "seconds": "seconds",
    "tok_s": "tok/s",
    "decode_steps": "steps",
    "occupancy_pct": "occupancy %",
    "queued_occupancy_pct": "% while rows wait",
    "captures": "captures",
    "released_to_pct": "released to %",
    "floor_share_pct": "% of bandwidth floor",
}


@dataclass(frozen=True)
class Load:
    """Rows to generate, and what one of their calls needs."""

    request: RolloutRequest
    lengths: list[int]  # of every row's answer, prompt-major
    samples: int
    sampling: dict

    def part(self, first: int, count: int) -> "Load":
        """So many of the prompts."""
        some, rows = slice(first, first + count), slice(first * self.samples, (first + count) * self.samples)
        request = RolloutRequest(self.request.prompt_ids[some], self.request.prompt_attention_mask[some])
        return Load(request, self.lengths[rows], self.samples, self.sampling)

    def shorter(self, share: int) -> "Load":
        return Load(self.request, [max(1, length // share) for length in self.lengths], self.samples, self.sampling)


def bench_rollouts(
    model_config: str,
    parts: list[str],
    schedules: list[str],
    prompts: int,
    samples: int,
    prompt: int,
    median: int,
    longest: int,
    slots: int,
    shared: list[tuple[int, int]],
    chunks: list[int],
    runs: int,
    seed: int,
    sampling: str,
    out: Path | None,
) -> int:
    """Time rollouts of random weights and prompts; print tables, write rows.

    Args:
        model_config: a preset or the path of a config.json.
        parts: of PARTS.
        schedules: of SCHEDULES.
        prompts, samples, prompt: of the rows; ``prompt`` tokens each.
        median, longest: of the answers' lengths.
        slots: rows at a time, a multiple of ``samples``.
        shared: prompts and their tokens for the part of that name.
        chunks: tokens of a prompt for the part of that name.
        runs: timed calls a measurement; the median counts.
        seed: of weights, prompts, lengths and samples.
        sampling: a key of SAMPLING_CHOICES.
        out: a file to write, or None.

    Returns:
        1 if a row had another length than it should, else 0.

    Raises:
        ValueError: ``slots`` is no multiple of ``samples``, so that fixed batches could not have as many rows.
    """
    if slots % samples:
        raise ValueError(f"slots must be a multiple of the {samples} samples of a prompt; got {slots}")
    quiet()
    config = load_config(model_config)
    config.eos_token_id = None  # limits end the rows
    needed = 1 + max([prompt + longest, *chunks, *(tokens for _, tokens in shared)])
    config.max_position_embeddings = max(config.max_position_embeddings, needed)
    model = build_model(config, seed)
    rows: list[dict] = []

    def keep(row: dict) -> None:
        rows.append(row)
        if out is not None:  # at once: a run that is cut short leaves what it has
            results.write_json(out, results.measurement(f"rollouts, {model_config}", rows))

    if "schedules" in parts:
        lengths = long_tailed(prompts * samples, median, longest, seed)
        options = {"seed": seed, **SAMPLING_CHOICES[sampling]}
        load = Load(random_request(prompts, prompt, model, seed), lengths, samples, options)
        if not _bench_schedules(model, load, schedules, slots, prompt, runs, keep):
            return 1
    if "shared" in parts:
        bench_shared(new_rollout(model), model, shared, samples, runs, seed, keep)
    if "chunks" in parts:
        bench_chunks(new_rollout(model), model, chunks, seed, keep)
    return 0


def long_tailed(rows: int, median: int, longest: int, seed: int) -> list[int]:
    """Lengths whose logarithms are spread evenly over a normal distribution, cut at ``longest`` and shuffled."""
    normal = statistics.NormalDist(math.log(median), SPREAD)
    lengths = [round(math.exp(normal.inv_cdf((row + 0.5) / rows))) for row in range(rows)]
    lengths = [min(longest, max(1, length)) for length in lengths]
    random.Random(seed).shuffle(lengths)
    return lengths


def new_rollout(model: nn.Module, **options) -> HybridEngineRollout:
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    return HybridEngineRollout(SimpleNamespace(module=model), tokenizer, HybridEngineRolloutConfig(**options))


def _bench_schedules(
    model: nn.Module, load: Load, schedules: list[str], slots: int, prompt: int, runs: int, keep
) -> bool:
    """A row for each schedule; False where an answer has not the length that it should have."""
    bandwidth = read_bandwidth() if has_cuda() else None
    print(
        f"{len(load.lengths)} rows, {load.samples} a prompt of {prompt} tokens; answers of "
        f"{min(load.lengths)} to {max(load.lengths)} tokens, median {statistics.median(load.lengths):g}, "
        f"mean {statistics.mean(load.lengths):.0f}"
    )
    print("  ".join(HEADINGS[name] for name in HEADINGS if bandwidth or not name.startswith("floor")))
    seconds: dict[str, float] = {}
    before = allocated_bytes()
    for schedule in schedules:
        rollout = new_rollout(
            model,
            shrink_tail=schedule != "fixed-plain",
            progress=sys.stderr.isatty(),
            continuous_cache_capacity=prompt + max(load.lengths),  # of the calls that warm up, too
        )
        for _ in range(2):  # the first of a shape is eager, the second is captured
            _run(rollout, load.shorter(WARM_UP_SHARE), schedule, slots)
        captures = _captures(rollout)
        taken = [_run(rollout, load, schedule, slots) for _ in range(runs)]
        if any(lengths != load.lengths for _, _, lengths in taken):
            print(f"{schedule}: rows have other lengths than they should, so nothing more is timed")
            return False
        taken.sort(key=lambda one: one[0])
        seconds[schedule], stats, _ = taken[len(taken) // 2]
        row = schedule_row(schedule, load, slots, seconds[schedule], stats)
        row["captures"] = _captures(rollout) - captures
        if bandwidth:
            floor = floor_bytes(step_bytes(model), load.lengths, prompt, row["decode_steps"]) / bandwidth
            row.update(floor_seconds=round(floor, 3), floor_share_pct=round(100 * floor / row["seconds"], 1))
        row["times_the_first"] = round(seconds[schedule] / seconds[schedules[0]], 3)
        rollout.shutdown()
        after = allocated_bytes()
        row["released_to_pct"] = round(100 * after / before, 2) if before and after else None  # of what there was
        keep(row)
        cells = [str(row[name]).rjust(len(heading)) for name, heading in HEADINGS.items() if name in row]
        print("  ".join(cells), flush=True)
    if {"continuous", "fixed"} <= seconds.keys():
        print(f"continuous is {seconds['fixed'] / seconds['continuous']:.2f} times as fast as fixed")
    return True


def _captures(rollout: HybridEngineRollout) -> int:
    steps = 0 if rollout._graphs is None else rollout._graphs.captures
    return steps + rollout._arena.prefill_captures


def _run(rollout: HybridEngineRollout, load: Load, schedule: str, slots: int) -> tuple[float, list[dict], list[int]]:
    """Seconds of all calls that a schedule makes, the figures of each, and the rows' lengths."""
    accelerator = get_accelerator()
    lengths: list[int] = []
    stats: list[dict] = []
    prompts = len(load.request.prompt_ids)
    size = slots // load.samples if schedule.startswith("fixed") else prompts
    at_a_time = size * load.samples if schedule == "at-once" else slots
    accelerator.synchronize()
    start = time.perf_counter()
    for first in range(0, prompts, size):
        part = load.part(first, size)
        sampling = SamplingConfig(
            max_new_tokens=max(load.lengths),
            max_new_tokens_per_row=part.lengths,
            n_samples_per_prompt=load.samples,
            continuous_batch_size=at_a_time,
            **load.sampling,
        )
        batch = rollout.generate(part.request, sampling)
        lengths += batch.response_lengths.tolist()
        stats.append(rollout.get_last_continuous_stats() or {})
    accelerator.synchronize()
    return time.perf_counter() - start, stats, lengths


def schedule_row(schedule: str, load: Load, slots: int, seconds: float, stats: list[dict]) -> dict:
    """One row of the result, from the figures of the schedule's calls."""
    tokens = sum(load.lengths)
    lane_steps = sum(one["lane_steps"] for one in stats)
    wasted = sum(one["wasted_lane_steps"] for one in stats)
    return {
        "part": "schedules",
        "schedule": schedule,
        "rows": len(load.lengths),
        "slots": max(one["slots"] for one in stats),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tok_s": round(tokens / seconds, 1),
        "calls": len(stats),
        "decode_steps": sum(one["decode_steps"] for one in stats),
        "refills": sum(one["refills"] for one in stats),
        "shrinks": sum(one["shrinks"] for one in stats),
        "wasted_lane_steps": wasted,
        "occupancy_pct": round(100 * (1 - wasted / lane_steps), 1) if lane_steps else 100.0,
        "queued_occupancy_pct": round(100 * stats[0]["queued_occupancy"], 1) if len(stats) == 1 else None,
        "cache_gb": round(max(one["cache_memory_bytes"] for one in stats) / 1e9, 2),
    }


def floor_bytes(sizes: StepBytes, lengths: list[int], prompt: int, steps: int) -> float:
    """What ``steps`` decode steps that make rows of these lengths have to move: weights once a step, and for every
    token but a row's first, which comes from its prefill, the state and the keys and values so far."""
    fed = [length - 1 for length in lengths]
    seen = sum(count * prompt + count * (count + 1) // 2 for count in fed)
    return steps * sizes.weights + sum(fed) * sizes.state_per_row + seen * sizes.kv_per_token
