# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""TRL's GRPOTrainer with rollouts from the DeepSpeed engine that it trains.

Without arguments a tiny Qwen3.5 learns from nothing to reverse three letters, on a CPU or a GPU. With --model a
checkpoint is asked for sums, and rewarded for right ones. On several GPUs:

    accelerate launch --num_processes 8 experiments/examples/trl_grpo.py --model PATH --zero-stage 3
"""

import argparse
import re
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from deepspeed_hybrid.integrations.trl import TrainerRollout, hybrid_rollout
from deepspeed_hybrid.tools.arguments import positive
from deepspeed_hybrid.tools.device import has_cuda
from deepspeed_hybrid.tools.models import build_model, decay_slowly, demo_config
from deepspeed_hybrid.tools.process import start_distributed, stop_distributed
from deepspeed_hybrid.tools.task import ByteTokenizer, ReverseTask, transformers_tokenizer

PROMPTS, SAMPLES = 12, 16  # a step and process
TASK = ReverseTask(ByteTokenizer())


def config(steps: int, stage: int, seed: int, folder: str, **options) -> GRPOConfig:
    """What all runs share; ``options`` are GRPOConfig's, and take precedence. DeepSpeed reads 'auto' from there."""
    deepspeed = {
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    shared = dict(
        output_dir=folder,
        max_steps=steps,
        seed=seed,
        deepspeed=deepspeed,
        use_cpu=not has_cuda(),
        bf16=has_cuda(),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        loss_type="dr_grpo",
        scale_rewards="none",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    return GRPOConfig(**{**shared, **options})


def tiny_trainer(
    steps: int, stage: int, seed: int, rollout: TrainerRollout | None, folder: str, **options
) -> GRPOTrainer:
    """Reverse letters from nothing. ``rollout`` None: as TRL generates by itself. ``options`` are GRPOConfig's."""
    tokenizer = transformers_tokenizer()
    special_ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    model = build_model(demo_config("tiny", len(tokenizer), **special_ids), seed, dtype=torch.float32).train()
    decay_slowly(model)
    options = {
        "max_completion_length": TASK.answer_width,
        "learning_rate": 2e-3,
        "warmup_steps": 10,
        "adam_beta2": 0.99,
        "entropy_coef": 0.02,
        "gradient_checkpointing": False,
        **options,
    }
    return GRPOTrainer(
        model,
        points,
        config(steps, stage, seed, folder, **options),
        Dataset.from_dict({"prompt": TASK.prompts(PROMPTS * steps, torch.Generator().manual_seed(seed))}),
        processing_class=tokenizer,
        rollout_func=rollout,
    )


def points(prompts: list[str], completion_ids: list[list[int]], **columns) -> list[float]:
    """The tiny task's reward: the share of an answer's positions that are right."""
    width = TASK.answer_width
    answers = torch.tensor([ids + [0] * (width - len(ids)) for ids in completion_ids])
    return TASK.points(prompts, answers, torch.tensor(list(map(len, completion_ids)))).mean(dim=1).tolist()


def sums_trainer(path: str, steps: int, stage: int, seed: int, rollout: TrainerRollout, folder: str) -> GRPOTrainer:
    """A checkpoint adds numbers."""
    numbers = torch.randint(10, 1000, (PROMPTS * steps, 3), generator=torch.Generator().manual_seed(seed)).tolist()
    text = "What is {} + {} + {}? End with the number alone."
    prompts = [[{"role": "user", "content": text.format(*row)}] for row in numbers]
    options = dict(
        per_device_train_batch_size=SAMPLES,
        gradient_accumulation_steps=PROMPTS,
        max_completion_length=256,
        learning_rate=1e-6,
    )
    arguments = config(steps, stage, seed, folder, **options)  # first: under ZeRO stage 3 it shares the loading out
    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(path, dtype="auto"),
        right_sum,
        arguments,
        Dataset.from_dict({"prompt": prompts, "answer": [sum(row) for row in numbers]}),
        processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        rollout_func=rollout,
    )


def right_sum(completions: list, answer: list[int], **columns) -> list[float]:
    """1 where the last number of an answer is the sum."""
    found = [re.findall(r"\d+", messages[0]["content"].replace(",", "")) for messages in completions]
    return [float(numbers[-1:] == [str(wanted)]) for numbers, wanted in zip(found, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="PATH", help="a checkpoint of transformers (default: a tiny model)")
    parser.add_argument("--steps", type=positive, default=260, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--zero-stage", type=int, choices=(1, 2, 3), default=2, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()
    start_distributed()
    rollout = hybrid_rollout()
    with tempfile.TemporaryDirectory() as folder:
        run = options.steps, options.zero_stage, options.seed, rollout, folder
        trainer = sums_trainer(options.model, *run) if options.model else tiny_trainer(*run)
        trainer.train()
    log = [row for row in trainer.state.log_history if "reward" in row]
    gap = max(row["sampling/sampling_logp_difference/max"] for row in log)
    print(
        f"reward {log[0]['reward']:.3f} at the first step, {log[-1]['reward']:.3f} at the last; "
        f"largest difference between logprobs of rollout and training: {gap:.1e}"
    )
    if rollout.rollout is not None:
        print(rollout.rollout.describe())
    stop_distributed()


if __name__ == "__main__":
    main()
