# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How long do sync_segki_weights() and a decode step take for each ZeRO stage, and how much memory is held?

One process; the model has random weights. "ms" is the median over calls, on the host's clock, until the device is
idle. "copy_ms" is the same number of bytes copied on the device, tensor to tensor, in pieces of 1 GiB, on the same
clock; "ratio" is ms / copy_ms. Where fused weights are views of the parameters (stages 0 and 1) there is nothing to
copy. Before stage 3 is timed, its partitions are changed and the copies compared with them, to the bit.

"ms_step_N" is a decode step of N rows: generate() for many tokens less generate() for one. "peak_gb" is the most that
was allocated from the engine's first sync to the last step, "model_gb" what the engine alone holds before.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_hybrid.generation.batch import SamplingConfig
from deepspeed_hybrid.rollout import HybridEngineRollout
from deepspeed_hybrid.tools import results
from deepspeed_hybrid.tools.bench import SAMPLING_CHOICES, random_request, seconds_of
from deepspeed_hybrid.tools.device import has_cuda
from deepspeed_hybrid.tools.models import PRESETS, build_model, load_config
from deepspeed_hybrid.tools.process import quiet, start_distributed, stop_distributed

PIECE_BYTES = 2**30
WARM_UPS = 2
PROMPT, NEW = 128, 129  # tokens of the timed calls


def make_engine(preset: str, stage: int):
    """With an optimizer that keeps no state of its own."""
    model = build_model(load_config(preset), seed=0).train()
    return deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": has_cuda()},
            "steps_per_print": 10**9,
        },
    )[0]


def timed(call: Callable[[], object], runs: int) -> list[float]:
    """Milliseconds of each run."""
    accelerator, times = get_accelerator(), []
    for run in range(WARM_UPS + runs):
        accelerator.synchronize()
        start = time.perf_counter()
        call()
        accelerator.synchronize()
        if run >= WARM_UPS:
            times.append((time.perf_counter() - start) * 1000)
    return times


def copy_times(size: int, runs: int) -> list[float]:
    """Of copying ``size`` bytes on the device."""
    device = get_accelerator().current_device_name()
    pieces = [min(PIECE_BYTES, size - start) for start in range(0, size, PIECE_BYTES)]
    source = [torch.ones(piece, dtype=torch.uint8, device=device) for piece in pieces]
    target = [torch.empty_like(piece) for piece in source]

    def copy() -> None:
        for to, piece in zip(target, source, strict=True):
            to.copy_(piece, non_blocking=True)

    return timed(copy, runs)


def check_copies(engine, rollout: HybridEngineRollout) -> None:
    """Change every partition, sync, and compare."""
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.ds_tensor.mul_(1.5)
    rollout.sync_segki_weights()
    with rollout._injection.bound():
        copies = list(engine.module.parameters())
    for parameter, copy in zip(engine.module.parameters(), copies, strict=True):
        assert torch.equal(copy.view(-1), parameter.ds_tensor) and copy.data_ptr() != parameter.ds_tensor.data_ptr()


def step_times(engine, rollout: HybridEngineRollout, batch: int, runs: int) -> list[float]:
    """Milliseconds of a decode step of ``batch`` rows."""
    request = random_request(batch, PROMPT, engine.module, seed=0)
    whole, one = (SamplingConfig(max_new_tokens=tokens, **SAMPLING_CHOICES["greedy"]) for tokens in (NEW, 1))
    for sampling in (whole, one):
        rollout.generate(request, sampling)  # captures
    return [
        (seconds_of(rollout, request, whole) - seconds_of(rollout, request, one)) / (NEW - 1) * 1000
        for _ in range(runs)
    ]


def measure(preset: str, stage: int, runs: int, batches: list[int]) -> dict:
    engine = make_engine(preset, stage)
    accelerator = get_accelerator()
    held = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    with HybridEngineRollout(engine, SimpleNamespace(pad_token_id=0, eos_token_id=None)) as rollout:
        if stage == 3:
            check_copies(engine, rollout)
        report = rollout.sync_segki_weights()
        modes = "+".join(sorted(set(report.modes.values())))
        times = timed(rollout.sync_segki_weights, runs)
        steps = {batch: step_times(engine, rollout, batch, runs) for batch in batches}
    peak = accelerator.max_memory_allocated()
    row = {"stage": stage, "mode": modes, "bytes": report.bytes_copied, **milliseconds("ms", times)}
    if report.bytes_copied:
        copies = copy_times(report.bytes_copied, runs)
        row |= milliseconds("copy_ms", copies)
        row["ratio"] = round(statistics.median(times) / statistics.median(copies), 3)
    for batch, of_batch in steps.items():
        row |= milliseconds(f"ms_step_{batch}", of_batch)
    row |= {"model_gb": round(held / 1e9, 3), "peak_gb": round(peak / 1e9, 3)}
    engine.destroy()
    return row


def milliseconds(name: str, times: list[float]) -> dict[str, float]:
    median = statistics.median(times)
    spread = 100 * (max(times) - min(times)) / median
    return {name: round(median, 3), name.replace("ms", "spread_pct", 1): round(spread, 1)}


def show(rows: list[dict]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([str(row.get(name, "-")) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen3.5-4b")
    parser.add_argument("--stages", type=int, nargs="+", choices=[0, 1, 2, 3], default=[0, 1, 3])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="*", default=[], help="rows of the decode steps to time")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs must be at least 1; got {options.runs}")

    quiet()
    start_distributed()
    try:
        rows = []
        for stage in options.stages:
            rows.append(measure(options.preset, stage, options.runs, options.batches))
            gc.collect()  # an engine is full of cycles
            get_accelerator().empty_cache()
    finally:
        stop_distributed()
    show(rows)
    if options.out:
        what = f"sync_segki_weights(), {options.preset}, next to copying as many bytes on the device"
        results.write_json(options.out, results.measurement(what, rows))


if __name__ == "__main__":
    main()
