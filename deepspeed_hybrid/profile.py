# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Figures of the last call, under DeepSpeed's names and a few more."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed_hybrid.generation.arena import Arena
from deepspeed_hybrid.generation.chrome_trace import write_chrome_trace
from deepspeed_hybrid.generation.loop import LoopStats
from deepspeed_hybrid.generation.trace import Tracer
from deepspeed_hybrid.job import Job


@dataclass
class CallClock:
    """When a call began, and when its stages of the host ended, in seconds of ``time.perf_counter()``."""

    before: dict[str, float]  # what stages of each name had taken until then
    start: float
    checked: float = 0.0
    begun: float | None = None
    done: float = 0.0

    def is_checked(self) -> None:
        """The request is a job now."""
        self.checked = time.perf_counter()

    def is_begun(self) -> None:
        """Somebody asks for rows, perhaps long after the check, and after other calls."""
        self.begun = time.perf_counter()

    def is_done(self) -> None:
        """All rows have ended."""
        self.done = time.perf_counter()


class Figures:
    """What the last call that came to its end took.

    Args:
        profiled: fill in ``profile``, and trace stages for it.
        device: where the rows run.
    """

    def __init__(self, profiled: bool, device: torch.device):
        self.trace = Tracer(profiled, device)
        self.profile: dict | None = None
        self.continuous_stats: dict | None = None

    def clock(self) -> CallClock:
        """Of a call that begins now."""
        return CallClock(dict(self.trace.totals), time.perf_counter())

    def note_end(self, job: Job, clock: CallClock) -> None:
        """All rows are queued. A profile says how long they took; without one only the batch is waited for."""
        if self.trace.on:
            job.answers.ends()
        clock.is_done()

    def export(self, path: str | Path) -> None:
        """All stages so far, as a Chrome trace."""
        if not self.trace.on:
            raise RuntimeError("export_chrome_trace() needs enable_profiling=True in the configuration")
        self.trace.settle()
        write_chrome_trace(path, self.trace.spans)

    def take(self, job: Job, clock: CallClock, arena: Arena, extra: Callable[[], dict]) -> None:
        """Fill in everything; ``extra()`` is what else the profile says."""
        end = time.perf_counter()
        times = {
            "prompt_expansion_ms": (clock.checked - clock.start) * 1000,
            "generation_ms": (clock.done - clock.checked) * 1000,
            "post_processing_ms": (end - clock.done) * 1000,
            "total_ms": (end - clock.start) * 1000,
        }
        lengths, _ = job.answers.ends()
        if job.continuous_slots is not None:
            peak = max(job.prompts.lengths[row // job.plan.samples] + length for row, length in enumerate(lengths))
            self.continuous_stats = continuous_stats(job.stats, arena, lengths, peak, times["total_ms"])
        if self.trace.on:
            self.trace.note("check", clock.start, clock.checked)
            self.trace.note("assemble", clock.done, end)
            begun = clock.start if clock.begun is None else clock.begun
            self.trace.note("generate", begun, end, rows=job.rows, tokens=sum(lengths))
            self.trace.settle()
            spent = {name: total - clock.before.get(name, 0.0) for name, total in self.trace.totals.items()}
            self.profile = profile(
                job.stats,
                lengths,
                len(job.prompts.lengths),
                job.plan.samples,
                job.request.prompt_ids.shape[1],
                {**times, **stage_times(spent)},
                job.continuous_slots,
                extra(),
            )


def stage_times(spent: dict[str, float]) -> dict[str, float]:
    """Times in ms from seconds by the names of stages. A prompt's capture is also part of its prefill."""
    names = {
        "weights_ms": ("weights",),
        "setup_ms": ("setup", "shrink"),
        "prefill_forward_ms": ("prefill", "refill"),
        "refill_forward_ms": ("refill",),
        "decode_forward_ms": ("decode",),
        "capture_ms": ("capture",),
    }
    return {key: 1000 * sum(spent.get(stage, 0.0) for stage in stages) for key, stages in names.items()}


def profile(
    stats: LoopStats,
    lengths: list[int],
    prompts: int,
    samples: int,
    prompt_width: int,
    times: dict[str, float],
    slots: int | None,
    extra: dict,
) -> dict:
    """The dict of ``get_last_profile()``: times in ms, tokens per second over the whole call.

    ``generation_ms`` is ``weights_ms`` (copies of weights made fresh), ``setup_ms`` (room, moves to fewer lanes, and
    captures of steps), ``prefill_forward_ms`` (of that, ``refill_forward_ms`` for slots whose rows had ended),
    ``decode_forward_ms`` and the rest, ``generation_overhead_ms``. ``capture_ms`` is part of setup and of prefills.
    """
    tokens = sum(lengths)
    generation = times["generation_ms"]
    stages = ("weights_ms", "setup_ms", "prefill_forward_ms", "decode_forward_ms")
    result = {
        "prompt_expansion_ms": times["prompt_expansion_ms"],
        "generation_ms": generation,
        **{name: times[name] for name in (*stages, "refill_forward_ms", "capture_ms")},
        "generation_overhead_ms": max(0.0, generation - sum(times[name] for name in stages)),
        "num_prefill_forwards": stats.prefill_forwards,
        "num_prefill_replays": stats.prefill_replays,
        "num_decode_forwards": stats.decode_forwards,
        "num_tail_shrinks": stats.shrinks,
        "post_processing_ms": times["post_processing_ms"],
        "total_ms": times["total_ms"],
        "num_generated_tokens": tokens,
        "tokens_per_second": tokens / (times["total_ms"] / 1000) if times["total_ms"] > 0 else 0.0,
        "batch_size": prompts,
        "num_samples_per_prompt": samples,
        "prompt_length": prompt_width,
        "response_length": max(lengths),
        **extra,
    }
    if slots is not None:
        result.update(
            scheduler_overhead_ms=result["generation_overhead_ms"],
            cache_management_overhead_ms=0.0,
            active_batch_size=max(stats.occupied, default=0),
            continuous_batch_size=slots,
        )
    return result


def continuous_stats(stats: LoopStats, arena: Arena, lengths: list[int], peak_length: int, total_ms: float) -> dict:
    """The dict of ``get_last_continuous_stats()``. Trimming fields are there for DeepSpeed's users and stay zero."""
    tokens = sum(lengths)
    # A row's first token comes from its prefill, and several may come from a speculative step.
    steps = [min(length - 1, stats.retired_at[row] - stats.admitted_at[row]) for row, length in enumerate(lengths)]
    useful_steps = sum(steps)
    behind = [max(0, stats.queued_steps - stats.admitted_at[row]) for row in range(len(lengths))]
    queued = sum(map(min, steps, behind))
    return {
        "cache_capacity": arena.kv_length,
        "peak_cache_length": peak_length,
        "cache_memory_bytes": sum(arena.bytes_by_kind().values()),
        "trim_count": 0,
        "trimmed_columns": 0,
        "trim_latency_ms": 0.0,
        "trim_bytes_moved": 0,
        "trim_frequency": 0.0,
        "decode_steps": stats.decode_forwards,
        "end_to_end_ms": total_ms,
        "tokens_per_second": tokens / (total_ms / 1000) if total_ms > 0 else 0.0,
        "slots": stats.slots,
        "refills": stats.refills,
        "shrinks": stats.shrinks,
        "lane_steps": stats.lane_steps,
        "wasted_lane_steps": stats.lane_steps - useful_steps,
        "occupancy": useful_steps / stats.lane_steps if stats.lane_steps else 1.0,
        "queued_steps": stats.queued_steps,
        "queued_occupancy": queued / (stats.queued_steps * stats.slots) if stats.queued_steps else 1.0,
    }
