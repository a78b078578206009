# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Rollouts for TRL's GRPOTrainer, from the DeepSpeed engine that it trains: ``rollout_func=hybrid_rollout()``."""

import hashlib
import importlib.util
import inspect
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from torch import nn

from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.generation.batch import RolloutRequest, SamplingConfig
from deepspeed_hybrid.rollout import HybridEngineRollout

if importlib.util.find_spec("trl") is None:
    raise ImportError(
        "deepspeed_hybrid.integrations.trl needs trl, which is not installed: pip install 'deepspeed_hybrid[trl]'"
    )

if TYPE_CHECKING:
    from trl import GRPOTrainer

# Beyond the public options. A release that lacks one of them would otherwise fail late, or drop logprobs in silence.
TRAINER_PARTS = ("_tokenize_prompts", "_tokenizer", "eos_token_ids", "use_vllm", "vllm_importance_sampling_correction")
# GRPOConfig's options for other ways to generate, each with the value that asks for nothing.
OTHER_WAYS = {
    "cache_implementation": None,
    "use_transformers_continuous_batching": False,
    "use_vllm": False,
    "vllm_structured_outputs_regex": None,
}
GENERATION_KWARGS = (
    "continuous_batch_size",
    "do_sample",
    "max_new_tokens",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
)
VESPO_MODES = ("token_truncate", "token_mask")


def hybrid_rollout(cfg: HybridEngineRolloutConfig | None = None) -> "TrainerRollout":
    """What GRPOTrainer takes as ``rollout_func``, so that it generates with the engine that it trains.

    The engine is DeepSpeed's, ZeRO stage 1, 2 or 3, as accelerate makes it from ``GRPOConfig(deepspeed=...)``. How to
    sample is read from GRPOConfig: ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``,
    ``max_completion_length``, and ``generation_kwargs`` with ``GENERATION_KWARGS``. The trainer's
    ``vllm_importance_sampling_*`` options and its ``sampling/*`` metrics compare the rollout's logprobs with those of
    the training forward; tokens that top_p, top_k or min_p left out, and penalties, are in the former alone.

    Args:
        cfg: of the :class:`HybridEngineRollout`; None takes the defaults.

    Raises:
        ValueError: a field of ``cfg`` is not accepted; at the first generation also an option of GRPOConfig.
    """
    return TrainerRollout(HybridEngineRolloutConfig.from_object(cfg))


class TrainerRollout:
    """A rollout function for one GRPOTrainer at a time; :func:`hybrid_rollout` makes it.

    ``rollout`` is the :class:`HybridEngineRollout` of the trainer's engine, None before the first generation.
    """

    def __init__(self, cfg: HybridEngineRolloutConfig):
        self.cfg = cfg
        self.rollout: HybridEngineRollout | None = None
        self._trainer: Any = None
        self._synced: tuple[int, int] | None = None  # steps of the trainer and of the engine
        self._calls: Counter[tuple[int, str]] = Counter()  # at the trainer's step

    def __call__(self, prompts: list, trainer: "GRPOTrainer") -> dict[str, list]:
        """One completion for each prompt; the trainer repeats a prompt as often as it wants completions of it.

        Args:
            prompts: of this process: texts or conversations, without images.

        Returns:
            ``prompt_ids`` and ``completion_ids``, lists of token ids, and ``logprobs``, one for each id of a
            completion, in fp32 and of the distribution sampled from.

        Raises:
            ValueError: an option of GRPOConfig that would not be honoured, or prompts with images.
            RuntimeError: the trainer does not train a DeepSpeed engine, or is of another release of TRL.
        """
        self._attach(trainer)
        from trl.extras.profiling import profiling_context

        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        refuse_images(images)
        with profiling_context(trainer, "deepspeed_hybrid.generate"):
            completion_ids, logprobs = self._generate(prompt_ids)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    # --------------------------------------------------------------------- what GRPOTrainer calls its vllm_generation

    def sync_weights(self) -> None:
        """Make derived weights follow, once after an optimizer step."""
        self._current()

    def generate(
        self,
        prompts: list[list[int]],
        images: list | None,
        num_generations: int,
        profiler: AbstractContextManager | None = None,
    ) -> tuple:
        """Later turns, behind tools: ids of prompts and completions, logprobs [rows][tokens][1], None."""
        refuse_images(images)
        with profiler or nullcontext():
            completion_ids, logprobs = self._generate(prompts)
        return prompts, completion_ids, [[[logprob] for logprob in row] for row in logprobs], None

    # ----------------------------------------------------------------------------------------------------------------

    def _attach(self, trainer: "GRPOTrainer") -> None:
        """Be the trainer's sampler. It looks at a sampler's logprobs only if ``use_vllm`` says that it has one; that
        also sends later turns here, and has weights synced by the trainer."""
        if trainer is self._trainer:
            return
        refuse_trainer(trainer)
        sampling_of(trainer, samples=1, seed=0)
        self._trainer = trainer
        self._trainer.use_vllm, self._trainer.vllm_mode = True, HybridEngineRollout.name
        self._trainer.vllm_generation = self
        self._trainer._last_loaded_step = trainer.state.global_step

    def _current(self) -> HybridEngineRollout:
        """The rollout of the engine that the trainer has now, with the weights of its last step."""
        trainer = self._trainer
        engine = trainer.model_wrapped
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            raise RuntimeError(
                f"hybrid_rollout needs a DeepSpeed engine, and the trainer has a {type(engine).__name__}; give "
                "GRPOConfig a deepspeed configuration, or launch with accelerate's"
            )
        step = (trainer.state.global_step, engine.global_steps)
        with without_fused_head(engine.module):
            if self.rollout is None or self.rollout.engine is not engine:
                if self.rollout is not None:
                    self.rollout.shutdown()
                self.rollout = HybridEngineRollout(engine, trainer._tokenizer, self.cfg)
            elif step != self._synced:
                self.rollout.sync_segki_weights()
        self._synced = step
        return self.rollout

    def _generate(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        rollout = self._current()
        prompts, samples = without_repeats(prompt_ids)
        sampling = sampling_of(self._trainer, samples, self._seed())
        with without_fused_head(rollout.engine.module):
            batch = rollout.generate(padded(prompts, self._trainer.accelerator.device), sampling)
        start, lengths = int(batch.response_start_idx[0]), batch.response_lengths.tolist()
        tokens, logprobs = batch.input_ids[:, start:].tolist(), batch.logprobs.tolist()
        return (
            [row[:length] for row, length in zip(tokens, lengths, strict=True)],
            [row[:length] for row, length in zip(logprobs, lengths, strict=True)],
        )

    def _seed(self) -> int:
        """A seed for every call; ranks draw noise of their own under it. A run that is resumed draws no old noise."""
        trainer = self._trainer
        moment = (trainer.state.global_step, "train" if trainer.model.training else "eval")
        if any(step != moment[0] for step, _ in self._calls):
            self._calls.clear()
        self._calls[moment] += 1
        key = repr((trainer.args.seed, *moment, self._calls[moment]))
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


@contextmanager
def without_fused_head(model: nn.Module) -> Iterator[None]:
    """The model's own forward while generating, instead of the trainer's around it, which computes logprobs of labels
    in training and else only hands on: a rollout leaves a model alone whose forward it does not know."""
    fused = [module for module in model.modules() if is_fused_head(module)]
    forwards = [module.__dict__.pop("forward") for module in fused]
    try:
        yield
    finally:
        for module, forward in zip(fused, forwards, strict=True):
            module.__dict__["forward"] = forward


def is_fused_head(module: nn.Module) -> bool:
    """Whether a module has TRL's forward, around that of its class and not around yet another one."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    if not inspect.isfunction(function) or function.__globals__.get("__name__") != "trl.trainer.utils":
        return False
    inner = inspect.getclosurevars(function).nonlocals.get("original_forward")
    return getattr(inner, "__func__", None) is type(module).forward


def refuse_trainer(trainer: "GRPOTrainer") -> None:
    """Raise where ``trainer`` or its GRPOConfig asks for something that a hybrid rollout does not do."""
    missing = [name for name in TRAINER_PARTS if not hasattr(trainer, name)]
    if missing:
        raise RuntimeError(
            f"this {type(trainer).__name__} has no {', '.join(missing)}: hybrid_rollout is written for the "
            "GRPOTrainer of the trl releases that pip install 'deepspeed_hybrid[trl]' accepts"
        )
    for name, neutral in OTHER_WAYS.items():
        value = getattr(trainer.args, name, neutral)
        if value != neutral:
            raise ValueError(f"{name} must be {neutral!r} with hybrid_rollout, which generates itself; got {value!r}")
    mode = trainer.args.vllm_importance_sampling_mode
    if trainer.args.loss_type == "vespo" and trainer.vllm_importance_sampling_correction and mode not in VESPO_MODES:
        raise ValueError(
            f"vllm_importance_sampling_mode must be one of {VESPO_MODES} with loss_type='vespo'; got {mode!r}"
        )


def refuse_images(images: list | None) -> None:
    if images is not None and any(images):
        raise ValueError("prompts must be text with hybrid_rollout; got images")


def sampling_of(trainer: "GRPOTrainer", samples: int, seed: int) -> SamplingConfig:
    """What GRPOConfig asks for.

    Raises:
        ValueError: no ``max_completion_length``, or a key of ``generation_kwargs`` that is none of
            ``GENERATION_KWARGS``.
    """
    options = {
        "max_new_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        "stop_token_ids": trainer.eos_token_ids,
    }
    given = dict(trainer.args.generation_kwargs or {})
    unknown = sorted(set(given) - set(GENERATION_KWARGS))
    if unknown:
        raise ValueError(
            f"generation_kwargs must be among {GENERATION_KWARGS} with hybrid_rollout; got {', '.join(unknown)}"
        )
    if not given.pop("do_sample", True):
        options["temperature"] = 0.0
        given.pop("temperature", None)
    options.update(given)
    if options["max_new_tokens"] is None:
        raise ValueError("max_completion_length must be an integer with hybrid_rollout; got None")
    return SamplingConfig(**options, n_samples_per_prompt=samples, seed=seed)


def without_repeats(prompt_ids: list[list[int]]) -> tuple[list[list[int]], int]:
    """Fewer prompts, and how many samples of each give the rows again: a prompt's samples share one prefill."""
    samples = math.gcd(*(len(list(run)) for _, run in itertools.groupby(prompt_ids)))
    return prompt_ids[::samples], samples


def padded(prompts: list[list[int]], device: torch.device) -> RolloutRequest:
    """Prompts padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    return RolloutRequest(ids.to(device), mask.to(device))
