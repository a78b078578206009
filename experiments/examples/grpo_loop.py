# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""GRPO as a loop of one's own: a tiny Qwen3.5 in a DeepSpeed engine learns from nothing to reverse three letters."""

import argparse

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_hybrid import HybridEngineRollout, RolloutRequest, SamplingConfig
from deepspeed_hybrid.tools.arguments import positive
from deepspeed_hybrid.tools.device import has_cuda
from deepspeed_hybrid.tools.grpo import group_advantages, policy_loss
from deepspeed_hybrid.tools.models import build_model, decay_slowly, demo_config
from deepspeed_hybrid.tools.process import quiet, start_distributed, stop_distributed
from deepspeed_hybrid.tools.task import ByteTokenizer, ReverseTask

PROMPTS, SAMPLES = 24, 8  # a step and process
CLIP, ENTROPY_WEIGHT = 0.2, 0.05


def make_engine(tokenizer: ByteTokenizer, stage: int, seed: int):
    special_ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    model = build_model(demo_config("tiny", tokenizer.vocab_size, **special_ids), seed, dtype=torch.float32).train()
    decay_slowly(model)
    config = {
        "train_micro_batch_size_per_gpu": PROMPTS * SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.99], "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": has_cuda()},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def train(steps: int, stage: int = 1, seed: int = 0) -> list[float]:
    """The mean reward of every step; torch.distributed must have been started."""
    tokenizer = ByteTokenizer()
    task = ReverseTask(tokenizer)
    engine = make_engine(tokenizer, stage, seed)
    device = get_accelerator().current_device_name()
    generator = torch.Generator().manual_seed(seed * 1009 + deepspeed.comm.get_rank())
    rewards = []
    with HybridEngineRollout(engine, tokenizer) as rollout:
        for step in range(steps):
            prompts = task.prompts(PROMPTS, generator)
            ids, mask = (tensor.to(device) for tensor in tokenizer.pad(prompts))
            batch = rollout.generate(
                RolloutRequest(ids, mask),
                SamplingConfig(max_new_tokens=task.answer_width, n_samples_per_prompt=SAMPLES, seed=seed + step),
            )

            width = batch.logprobs.shape[1]  # of the longest answer
            answers, lengths = batch.input_ids[:, -width:], batch.response_lengths
            padded = torch.nn.functional.pad(answers, (0, task.answer_width - width)).cpu()
            repeated = [prompt for prompt in prompts for _ in range(SAMPLES)]
            points = task.points(repeated, padded, lengths.cpu())
            advantages = group_advantages(points, SAMPLES)[:, :width].to(device)

            logits = engine(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
            real = torch.arange(width, device=device) < lengths[:, None]
            loss, _ = policy_loss(
                logits[:, -width - 1 : -1], answers, batch.logprobs, advantages, real, CLIP, ENTROPY_WEIGHT
            )
            engine.backward(loss)
            engine.step()
            rollout.sync_segki_weights()
            rewards.append(float(points.mean()))
            if deepspeed.comm.get_rank() == 0:
                print(f"step {step + 1}: reward {rewards[-1]:.3f}", flush=True)
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=positive, default=200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--zero-stage", type=int, choices=range(4), default=1, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()
    quiet()
    start_distributed()
    train(options.steps, options.zero_stage, options.seed)
    stop_distributed()


if __name__ == "__main__":
    main()
