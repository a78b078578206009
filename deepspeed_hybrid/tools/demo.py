# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The main job as an RL user writes it: a tiny Qwen3.5 in a DeepSpeed engine learns a task by GRPO, from scratch."""

import time
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch.nn.functional import pad
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from deepspeed_hybrid.generation.batch import RolloutBatch, RolloutRequest, SamplingConfig
from deepspeed_hybrid.rollout import HybridEngineRollout
from deepspeed_hybrid.tools import results
from deepspeed_hybrid.tools.checks import training_obstacle
from deepspeed_hybrid.tools.device import gpu_name, has_cuda
from deepspeed_hybrid.tools.grpo import group_advantages, masked_mean, policy_loss
from deepspeed_hybrid.tools.models import build_model, decay_slowly, demo_config
from deepspeed_hybrid.tools.process import (
    mean_over_ranks,
    quiet,
    sharing_obstacle,
    start_distributed,
    stop_distributed,
)
from deepspeed_hybrid.tools.task import ByteTokenizer, ReverseTask

STEPS = 220
PROMPTS, SAMPLES = 24, 8  # a step and process
LEARNING_RATE, WARMUP_STEPS = 2e-3, 10
CLIP = 0.2
ENTROPY_WEIGHT = 0.1
LEARNED, LAST = 0.8, 5  # the mean reward over the last steps that counts as learned


@dataclass
class StepResult:
    """One row of the demo's JSON; rates and times are of this process."""

    step: int
    reward: float
    exact: float  # share of answers that are right to the last position
    tok_s: float
    logprob_gap: float  # mean abs(rollout logprob - training logprob)
    generate_ms: float
    train_ms: float

    def line(self) -> str:
        return (
            f"step {self.step:4d}  reward {self.reward:.3f}  exact {self.exact:.3f}  {self.tok_s:6.0f} tokens/s  "
            f"|logprob gap| {self.logprob_gap:.1e}  generate {self.generate_ms:4.0f} ms  train {self.train_ms:4.0f} ms"
        )


def demo(
    steps: int | None, out: Path, seed: int, model_size: str, zero_stage: int = 1, tensor_parallel: int = 1
) -> int:
    """Train, print a line a step, write ``demo.json`` and ``reward.png`` in ``out``; returns the exit code.

    Args:
        steps: optimizer steps; None takes ``STEPS``. With fewer, the reward at the end is not judged.
        out: a folder, made if needed.
        seed: of weights, prompts and sampling.
        model_size: a key of ``DEMO_SIZES``.
        zero_stage: of the engine.
        tensor_parallel: how many of the launcher's processes share a model; the others train models of their own on
            prompts of their own.
    """
    quiet()
    obstacle = training_obstacle() or sharing_obstacle(tensor_parallel)
    if obstacle:
        print(f"the demo cannot train here: {obstacle}")
        return 1
    if not has_cuda():
        torch.set_num_threads(1)  # the tensors are small: more threads would only wait for each other
    start_distributed()
    try:
        trainer = Trainer(STEPS if steps is None else steps, seed, model_size, zero_stage, tensor_parallel)
        rows = trainer.run()
        return _conclude(rows, out) if deepspeed.comm.get_rank() == 0 else 0
    finally:
        stop_distributed()


class Trainer:
    """Engine, rollout and task of one run."""

    def __init__(self, steps: int, seed: int, model_size: str, zero_stage: int, tensor_parallel: int):
        self.steps, self.seed, self.rank = steps, seed, deepspeed.comm.get_rank()
        self.zero_stage, self.tensor_parallel = zero_stage, tensor_parallel
        self.tokenizer = ByteTokenizer()
        self.task = ReverseTask(self.tokenizer)
        replica = self.rank // tensor_parallel  # processes that share a model see the same prompts
        self.prompt_seed = torch.Generator().manual_seed(seed * 1000003 + replica)
        self.engine = self._make_engine(model_size)
        self.rollout = HybridEngineRollout(self.engine, self.tokenizer)

    def _make_engine(self, model_size: str):
        special_ids = {
            name: getattr(self.tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")
        }
        config = demo_config(model_size, self.tokenizer.vocab_size, **special_ids)
        model = build_model(config, self.seed, dtype=torch.float32).train()
        decay_slowly(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
        return deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lambda optimizer: LambdaLR(optimizer, self._learning_rate_factor),
            config={
                "train_micro_batch_size_per_gpu": PROMPTS * SAMPLES,
                "zero_optimization": {"stage": self.zero_stage},
                "tensor_parallel": {"autotp_size": self.tensor_parallel if self.tensor_parallel > 1 else 0},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": has_cuda()},  # with fp32 master weights
                "gradient_clipping": 1.0,
                "steps_per_print": 10**9,
            },
        )[0]

    def _learning_rate_factor(self, step: int) -> float:
        """Warm up, hold, and come down over the last third."""
        return min(1.0, (step + 1) / WARMUP_STEPS, max(0.1, 3 * (self.steps - step) / self.steps))

    def run(self) -> list[StepResult]:
        rows = []
        if self.rank == 0:
            print(
                f"reverse three letters, {PROMPTS} prompts x {SAMPLES} samples a step, on "
                f"{gpu_name() or 'CPU'} in {'bf16' if has_cuda() else 'fp32'}; processes: "
                f"{deepspeed.comm.get_world_size()}, of which {self.tensor_parallel} to a model, ZeRO stage "
                f"{self.zero_stage}\n{self.rollout.describe()}"
            )
        with self.rollout, tqdm(range(1, self.steps + 1), disable=self.rank != 0, unit="step") as progress:
            for step in progress:
                row = self.step(step)
                rows.append(row)
                progress.set_postfix(reward=f"{row.reward:.3f}")
                if self.rank == 0:
                    tqdm.write(row.line())
        return rows

    def step(self, step: int) -> StepResult:
        """generate -> reward -> advantages -> loss -> backward -> step -> sync."""
        start = _now()
        prompts = self.task.prompts(PROMPTS, self.prompt_seed)
        request = self._request(prompts)
        batch = self.rollout.generate(request, self._sampling(step))
        generated = _now()

        answers, rollout_logprobs, real = self._answers(batch)
        lengths = batch.response_lengths
        points = self.task.points([prompt for prompt in prompts for _ in range(SAMPLES)], answers.cpu(), lengths.cpu())
        advantages = group_advantages(points, SAMPLES).to(answers.device)

        prompt_ids = request.prompt_ids.repeat_interleave(SAMPLES, dim=0)
        input_ids = torch.cat([prompt_ids, answers], dim=1)
        logits = self.engine(input_ids=input_ids, use_cache=False, logits_to_keep=answers.shape[1] + 1).logits[:, :-1]
        loss, logprobs = policy_loss(
            logits, answers, rollout_logprobs, advantages, real, CLIP, self._entropy_weight(step)
        )
        self.engine.backward(loss)
        self.engine.step()
        self.rollout.sync_segki_weights()
        trained = _now()

        gap = masked_mean((logprobs - rollout_logprobs).abs(), real)
        exact = (points.sum(dim=1) > self.task.answer_width - 1e-3).float().mean()
        reward, exact, gap = mean_over_ranks([float(points.mean()), float(exact), float(gap)])
        return StepResult(
            step=step,
            reward=reward,
            exact=exact,
            tok_s=int(lengths.sum()) / (generated - start),
            logprob_gap=gap,
            generate_ms=(generated - start) * 1000,
            train_ms=(trained - generated) * 1000,
        )

    def _request(self, prompts: list[str]) -> RolloutRequest:
        device = get_accelerator().current_device_name()
        ids, mask = self.tokenizer.pad(prompts)
        return RolloutRequest(ids.to(device), mask.to(device))

    def _sampling(self, step: int) -> SamplingConfig:
        seed = (self.seed * 1000003 + step) * 1009  # every model's rollout has noise of its own under it
        return SamplingConfig(
            max_new_tokens=self.task.answer_width, temperature=1.0, n_samples_per_prompt=SAMPLES, seed=seed
        )

    def _answers(self, batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, logprobs and which of them are real, [R, answer_width] whatever the longest response was.

        One width for every step, so that no kernel has to be tuned again.
        """
        assert batch.logprobs is not None and batch.response_lengths is not None  # DeepSpeed's own class has neither
        longest = batch.logprobs.shape[1]
        missing = (0, self.task.answer_width - longest)
        answers = pad(batch.input_ids[:, -longest:], missing, value=self.tokenizer.pad_token_id)
        logprobs = pad(batch.logprobs, missing)
        real = torch.arange(self.task.answer_width, device=answers.device) < batch.response_lengths[:, None]
        return answers, logprobs, real

    def _entropy_weight(self, step: int) -> float:
        """Explore for the first half, then less and less."""
        return ENTROPY_WEIGHT * min(1.0, max(0.05, (0.9 - step / self.steps) / 0.4))


def _now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()


def _conclude(rows: list[StepResult], out: Path) -> int:
    """Write the files, say how it went, and judge it."""
    steps, reward = [row.step for row in rows], [row.reward for row in rows]
    results.write_json(out / "demo.json", results.measurement("GRPO on a tiny Qwen3.5", [vars(row) for row in rows]))
    drawn = results.draw(
        out / "reward.png",
        steps,
        {"mean reward": reward, "exact": [row.exact for row in rows]},
        "optimizer step",
        "mean over a step's answers",
    )
    last = sum(reward[-LAST:]) / len(reward[-LAST:])
    written = [str(out / "demo.json"), *([str(out / "reward.png")] if drawn else [])]
    print(
        f"reward {reward[0]:.3f} at the first step, {last:.3f} over the last {len(reward[-LAST:])}; "
        f"wrote {' and '.join(written)}"
    )
    if len(rows) < STEPS:
        print(f"fewer than {STEPS} steps: the last reward is not judged")
        return 0
    if last < LEARNED:
        print(f"the task was not learned: the reward is under {LEARNED}")
        return 1
    return 0
