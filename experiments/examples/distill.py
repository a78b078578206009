# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""On-policy distillation: a student learns a teacher's distribution on answers that the student itself gives.

Answers come from the student's DeepSpeed engine; DeepSpeed's ResponseTokenBatch says which logits belong to them, and
its generalized_jsd_loss compares the two models there. Both are tiny Qwen3.5 models with random weights.
"""

import argparse

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.rollout import ResponseTokenBatch, generalized_jsd_loss
from torch import nn

from deepspeed_hybrid import HybridEngineRollout, HybridEngineRolloutConfig, RolloutRequest, SamplingConfig
from deepspeed_hybrid.tools.arguments import positive
from deepspeed_hybrid.tools.device import has_cuda
from deepspeed_hybrid.tools.models import build_model, decay_slowly, demo_config
from deepspeed_hybrid.tools.process import quiet, start_distributed, stop_distributed
from deepspeed_hybrid.tools.task import ByteTokenizer, ReverseTask

PROMPTS, NEW_TOKENS = 16, 16  # a step and process
TEACHER_SEED, STUDENT_SEED = 1, 2
CONFIDENCE = 20.0  # of the teacher: random weights alone would choose all tokens alike


def make_model(tokenizer: ByteTokenizer, seed: int, dtype: torch.dtype) -> nn.Module:
    special_ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    model = build_model(demo_config("tiny", tokenizer.vocab_size, **special_ids), seed, dtype=dtype)
    decay_slowly(model)
    return model


def make_teacher(tokenizer: ByteTokenizer, dtype: torch.dtype) -> nn.Module:
    teacher = make_model(tokenizer, TEACHER_SEED, dtype).requires_grad_(False)
    teacher.get_output_embeddings().weight.mul_(CONFIDENCE)
    return teacher


def make_engine(student: nn.Module, stage: int):
    config = {
        "train_micro_batch_size_per_gpu": PROMPTS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": has_cuda()},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    return deepspeed.initialize(model=student.train(), config=config)[0]


def distill(steps: int, use_segki: bool | None = None, stage: int = 1) -> list[float]:
    """The Jensen-Shannon divergence (nats a token) of every step; torch.distributed must have been started."""
    tokenizer = ByteTokenizer()
    task = ReverseTask(tokenizer)
    teacher = make_teacher(tokenizer, torch.bfloat16 if has_cuda() else torch.float32)
    engine = make_engine(make_model(tokenizer, STUDENT_SEED, torch.float32), stage)
    device = get_accelerator().current_device_name()
    generator = torch.Generator().manual_seed(deepspeed.comm.get_rank())
    losses = []
    with HybridEngineRollout(engine, tokenizer, HybridEngineRolloutConfig(use_segki=use_segki)) as rollout:
        for step in range(steps):
            ids, mask = (tensor.to(device) for tensor in tokenizer.pad(task.prompts(PROMPTS, generator)))
            sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, temperature=1.0, seed=step)
            batch = ResponseTokenBatch.from_rollout(rollout.generate(RolloutRequest(ids, mask), sampling))

            inputs = dict(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
            with torch.no_grad():
                teacher_logits = batch.select_causal_logits(teacher(**inputs).logits)
            student_logits = batch.select_causal_logits(engine(**inputs).logits)
            loss = generalized_jsd_loss(student_logits.float(), teacher_logits.float(), batch.response_mask).loss
            engine.backward(loss)
            engine.step()
            rollout.sync_segki_weights()
            losses.append(float(loss.detach()))
            if deepspeed.comm.get_rank() == 0:
                print(f"step {step + 1}: divergence {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--zero-stage", type=int, choices=range(4), default=1, help="default: %(default)s")
    parser.add_argument("--no-segki", action="store_true", help="generate without segment kernels")
    options = parser.parse_args()
    quiet()
    start_distributed()
    distill(options.steps, False if options.no_segki else None, options.zero_stage)
    stop_distributed()


if __name__ == "__main__":
    main()
