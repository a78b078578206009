# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Trains with TRL in a process of its own, and writes what happened as JSON into the file that its argument names.

A trainer leaves its mark on a process: environment variables, accelerate's state, the seeds of all generators.
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from deepspeed_hybrid import HybridEngineRollout
from deepspeed_hybrid.integrations.trl import hybrid_rollout

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
from examples import trl_grpo  # noqa: E402


class Watched(HybridEngineRollout):
    """Notes every call, and every sync with the engine's steps so far."""

    calls: list[dict] = []
    syncs: list[int] = []

    def generate(self, request, sampling):
        batch = HybridEngineRollout.generate(self, request, sampling)
        start = int(batch.response_start_idx[0])
        rows = zip(batch.input_ids[:, start:].tolist(), batch.response_lengths.tolist(), strict=True)
        call = dict(
            seed=sampling.seed, prompts=len(request.prompt_ids), answers=[row[:length] for row, length in rows]
        )
        Watched.calls.append({**call, "samples": sampling.n_samples_per_prompt})
        return batch

    def sync_segki_weights(self):
        Watched.syncs.append(self.engine.global_steps)
        return HybridEngineRollout.sync_segki_weights(self)


def trained(steps: int, **options) -> tuple:
    """The trainer, the rollout function, and what was seen under ZeRO stage 2."""
    AcceleratorState._reset_state(True)
    Watched.calls, Watched.syncs = [], []
    rewarded: list[list[int]] = []

    def points(prompts, completion_ids, **columns):
        rewarded.extend(completion_ids)
        return trl_grpo.points(prompts, completion_ids, **columns)

    rollout = hybrid_rollout()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl_grpo.tiny_trainer(steps, 2, 0, rollout, folder, **options)
        trainer.reward_funcs = [points]
        trainer.train()
    log = [row for row in trainer.state.log_history if "reward" in row]
    return trainer, rollout, {"log": log, "calls": Watched.calls, "syncs": Watched.syncs, "rewarded": rewarded}


def learning() -> dict:
    """With activation checkpointing, as TRL has it unless told otherwise."""
    trainer, rollout, seen = trained(
        12,
        per_device_train_batch_size=128,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        warmup_steps=0,
        entropy_coef=0.0,
        gradient_checkpointing=True,
    )
    seen["stage"] = trainer.model_wrapped.zero_optimization_stage()
    seen["plan"] = rollout.rollout.describe()
    seen["changes"] = rollout.rollout._changes
    seen["fused_head"] = "forward" in trainer.model.__dict__
    Watched.calls, Watched.syncs = [], []  # the next is none of the trainer's
    seen["turn"] = rollout.generate([[1, 5, 6], [1, 7]], None, 1)
    return seen


def accumulating() -> dict:
    """Two generations an optimizer step, and an evaluation after two steps."""
    trainer, _, seen = trained(
        2,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        steps_per_generation=1,
        num_generations_eval=4,
    )
    trainer.evaluate(trainer.train_dataset.select(range(2)))
    return seen


def repeating() -> dict:
    """Two optimizer steps a generation."""
    return trained(4, per_device_train_batch_size=16, num_iterations=2)[2]


def uncorrected() -> dict:
    return trained(1, per_device_train_batch_size=16, vllm_importance_sampling_correction=False)[2]


def example() -> None:
    """The command line, under ZeRO stage 3; it ends torch.distributed."""
    AcceleratorState._reset_state(True)
    trl_grpo.PROMPTS = 1
    sys.argv = ["trl_grpo.py", "--steps", "2", "--zero-stage", "3"]
    trl_grpo.main()


def main(out: Path) -> None:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # it warns that rollout_func may change
    warnings.simplefilter("ignore")  # those of other packages
    torch.set_num_threads(1)
    trl_grpo.start_distributed()
    import deepspeed_hybrid.integrations.trl as integration

    integration.HybridEngineRollout = Watched
    runs = [learning, accumulating, repeating, uncorrected]
    out.write_text(json.dumps({run.__name__: run() for run in runs}))
    example()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
