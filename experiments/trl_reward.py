# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Does TRL's GRPOTrainer learn alike from rollouts of ours and from its own generation?

The tiny task of examples/trl_grpo.py under ZeRO stage 2, from several seeds each; on a CPU in fp32. "reward" is a
step's mean, "logp_difference" TRL's sampling_logp_difference/max, None where it generates by itself and compares
nothing. It ends with the means over the last steps, and fails where they differ by more than seeds make them differ.
"""

import argparse
import math
import multiprocessing
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import torch
from examples.trl_grpo import tiny_trainer

from deepspeed_hybrid.integrations.trl import hybrid_rollout
from deepspeed_hybrid.tools import results
from deepspeed_hybrid.tools.device import has_cuda
from deepspeed_hybrid.tools.process import quiet, start_distributed, stop_distributed

PATHS = ("deepspeed_hybrid", "transformers")
STAGE = 2
LAST = 10  # steps whose mean is the reward that was reached
MOST_DIFFERENCE = 1e-3  # of logprobs, in fp32


def run(seed: int, path: str, steps: int) -> list[dict]:
    """One training run in a process of its own; a row a step."""
    torch.set_num_threads(1)
    quiet()
    start_distributed()
    rollout = hybrid_rollout() if path == "deepspeed_hybrid" else None
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny_trainer(steps, STAGE, seed, rollout, folder)
        trainer.train()
    stop_distributed()
    return [
        {
            "path": path,
            "seed": seed,
            "step": row["step"],
            "reward": row["reward"],
            "logp_difference": row.get("sampling/sampling_logp_difference/max"),
            "step_s": row["step_time"],
        }
        for row in trainer.state.log_history
        if "reward" in row
    ]


def reached(rows: list[dict], path: str, seed: int) -> float:
    rewards = [row["reward"] for row in rows if (row["path"], row["seed"]) == (path, seed)]
    return statistics.fmean(rewards[-LAST:])


def conclude(rows: list[dict], seeds: list[int]) -> None:
    """Print what was reached.

    Raises:
        RuntimeError: the paths' means differ by more than two standard errors, or logprobs by too much.
    """
    ends = {path: [reached(rows, path, seed) for seed in seeds] for path in PATHS}
    for path, values in ends.items():
        print(f"{path}: {', '.join(f'{value:.3f}' for value in values)}; mean {statistics.fmean(values):.3f}")
    difference = statistics.fmean(ends[PATHS[0]]) - statistics.fmean(ends[PATHS[1]])
    gap = max(row["logp_difference"] for row in rows if row["logp_difference"] is not None)
    noise = math.sqrt(sum(statistics.variance(values) / len(values) for values in ends.values()))
    print(f"difference of means {difference:+.3f}, standard error {noise:.3f}; largest logp difference {gap:.1e}")
    if abs(difference) > 2 * noise:
        raise RuntimeError("the two ways to generate do not reach the same reward")
    if not has_cuda() and gap >= MOST_DIFFERENCE:
        raise RuntimeError(f"logprobs of rollouts and training differ by {gap:.1e}")


def draw(rows: list[dict], seeds: list[int], steps: int, path: Path) -> None:
    lines = {}
    for way in PATHS:
        of_step = [[row["reward"] for row in rows if (row["path"], row["step"]) == (way, n + 1)] for n in range(steps)]
        lines[f"{way}, mean of {len(seeds)} seeds"] = [statistics.fmean(values) for values in of_step]
    results.draw(path, range(1, steps + 1), lines, "optimizer step", "mean reward of a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=260)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("experiments/results/trl_cpu.json"))
    options = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, processes, max_tasks_per_child=1) as pool:
        asked = [pool.submit(run, seed, path, options.steps) for seed, path in product(options.seeds, PATHS)]
        rows = [row for one in asked for row in one.result()]
    what = "TRL's GRPOTrainer, ZeRO stage 2, tiny Qwen3.5 in fp32: rollouts of deepspeed_hybrid and TRL's own generate"
    result = results.measurement(what, rows)
    result["versions"].update({name: results.distribution_version(name) for name in ("trl", "accelerate")})
    results.write_json(options.out, result)
    draw(rows, options.seeds, options.steps, options.out.with_suffix(".png"))
    conclude(rows, options.seeds)


if __name__ == "__main__":
    main()
