# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What prompts of rollouts cost: samples that share a prefill, and the memory of long ones in chunks."""

import statistics
from collections.abc import Callable

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_hybrid.generation.batch import SamplingConfig
from deepspeed_hybrid.rollout import HybridEngineRollout
from deepspeed_hybrid.tools.bench import random_request, seconds_of
from deepspeed_hybrid.tools.device import has_cuda

LEAST_RUNS = 5  # of calls this short


def bench_shared(
    rollout: HybridEngineRollout,
    model: nn.Module,
    shapes: list[tuple[int, int]],
    samples: int,
    runs: int,
    seed: int,
    keep: Callable[[dict], None],
) -> None:
    """One-token calls with one sample a prompt and with ``samples``; a row for each shape goes to ``keep``."""
    print(f"prompts  tokens  first token ms  of {samples} samples ms  ratio")
    for prompts, tokens in shapes:
        request = random_request(prompts, tokens, model, seed)
        ms = []
        for count in (1, samples):
            one = SamplingConfig(max_new_tokens=1, temperature=1.0, seed=seed, n_samples_per_prompt=count)
            seconds = [seconds_of(rollout, request, one) for _ in range(3 + max(LEAST_RUNS, runs))][3:]
            ms.append(1000 * statistics.median(seconds))
        row = {"part": "shared", "n": prompts, "length": tokens, "samples": samples}
        row.update(ms_one=round(ms[0], 2), ms=round(ms[1], 2), ratio=round(ms[1] / ms[0], 3))
        keep(row)
        print(f"{prompts:7}  {tokens:6}  {ms[0]:14.2f}  {ms[1]:18.2f}  {row['ratio']:5}", flush=True)
        rollout.release_memory()
    rollout.shutdown()


def bench_chunks(
    rollout: HybridEngineRollout, model: nn.Module, lengths: list[int], seed: int, keep: Callable[[dict], None]
) -> None:
    """The peak of memory in the prefill of one prompt, over what is there before and stays behind it."""
    print("tokens  first token ms  kept MB  peak beyond MB")
    one = SamplingConfig(max_new_tokens=1, temperature=0.0)
    for tokens in lengths:
        request = random_request(1, tokens, model, seed)
        seconds_of(rollout, request, one)  # kernels are tuned, which takes memory too
        rollout.release_memory()
        peak = Peak()
        seconds = seconds_of(rollout, request, one)
        extra = peak.bytes()
        kept = sum(rollout._arena.bytes_by_kind().values())
        row = {"part": "chunks", "length": tokens, "ms": round(1000 * seconds, 2), "kept_bytes": kept}
        row["extra_bytes"] = None if extra is None else extra - kept
        keep(row)
        beyond = "needs CUDA" if extra is None else f"{(extra - kept) / 1e6:.1f}"
        print(f"{tokens:6}  {row['ms']:14}  {kept / 1e6:7.1f}  {beyond:>14}", flush=True)
        rollout.release_memory()
    rollout.shutdown()


def allocated_bytes() -> int | None:
    """What tensors take on the accelerator now; None where nobody counts it."""
    if not has_cuda():
        return None
    get_accelerator().synchronize()
    return torch.cuda.memory_allocated()


class Peak:
    """The most memory that the accelerator has allocated since, over what it had then; None where nobody counts it."""

    def __init__(self) -> None:
        self.counted = has_cuda()
        if self.counted:
            get_accelerator().synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    def bytes(self) -> int | None:
        if not self.counted:
            return None
        get_accelerator().synchronize()
        return torch.cuda.max_memory_allocated() - self.before
