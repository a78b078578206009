# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Figures of the last call, under DeepSpeed's names and a few more."""

from deepspeed_hybrid.generation.arena import Arena
from deepspeed_hybrid.generation.loop import LoopStats


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
    """The dict of ``get_last_profile()``: times in ms, tokens per second over the whole call."""
    tokens = sum(lengths)
    generation = times["generation_ms"]
    result = {
        "prompt_expansion_ms": times["prompt_expansion_ms"],
        "generation_ms": generation,
        "prefill_forward_ms": stats.prefill_ms,
        "decode_forward_ms": stats.decode_ms,
        "generation_overhead_ms": max(0.0, generation - stats.prefill_ms - stats.decode_ms),
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
