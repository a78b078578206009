# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What two ranks do in the tests of tensor parallelism: each has a share of a model, and a whole one beside it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import deepspeed
import torch
from deepspeed.module_inject.layers import GatherReplacedLayerParams, TensorParallel_Layer
from models import COMMON, GDN, MROPE, Tokenizer, ragged_prompts
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from deepspeed_hybrid import (
    HybridEngineRollout,
    HybridEngineRolloutConfig,
    RolloutBatch,
    RolloutRequest,
    SamplingConfig,
)

PROMPTS = [3, 7, 5]
SAMPLINGS = {
    "greedy": dict(temperature=0.0),
    "greedy, penalised": dict(temperature=0.0, repetition_penalty=1.3),
    "sampled": dict(temperature=1.0),
    "hot": dict(temperature=1.7, logprobs_mode="raw"),
    "top_k": dict(temperature=1.0, top_k=5),
    "top_p": dict(temperature=1.0, top_p=0.8),
    "min_p": dict(temperature=1.0, min_p=0.05),
    "all at once": dict(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
}


def hybrid(tied: bool = False, **sizes) -> torch.nn.Module:
    """A tiny Qwen3.5; ``sizes`` are the configuration's."""
    config = {**COMMON, **GDN, **sizes, "tie_word_embeddings": tied}
    return _ready(lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config, rope_parameters=dict(MROPE))))


def plain(tied: bool = False, **sizes) -> torch.nn.Module:
    """A tiny Qwen3: attention alone."""
    return _ready(
        lambda: Qwen3ForCausalLM(Qwen3Config(**{**COMMON, **sizes}, num_hidden_layers=2, tie_word_embeddings=tied))
    )


def _ready(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Weights and decay as ``models.tiny_model`` has them, the same on every rank."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.01, 0.5).log())
        model.get_input_embeddings().weight[0].normal_()
    return model.eval()


FAMILIES = {"hybrid": hybrid, "plain": plain}


def engine_over(model: torch.nn.Module, stage: int = 1, shared: bool = True, **tensor_parallel):
    """A DeepSpeed engine; ``shared``: over a model whose layers the two ranks share."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }
    if shared:
        config["tensor_parallel"] = {"autotp_size": 2, **tensor_parallel}
    return deepspeed.initialize(model=model, config=config)[0]


def rollout_over(engine, **options) -> HybridEngineRollout:
    return HybridEngineRollout(engine, Tokenizer(), HybridEngineRolloutConfig(**options))


def answer(rollout: HybridEngineRollout, new_tokens: int, vocab: int = 256, **sampling) -> RolloutBatch:
    ids, mask = ragged_prompts(PROMPTS)
    return rollout.generate(
        RolloutRequest(ids % vocab, mask), SamplingConfig(max_new_tokens=new_tokens, seed=11, **sampling)
    )


def train(engine, step: int) -> float:
    """The loss of one step, on a batch that depends on the step alone."""
    ids = ragged_prompts([20], seed=40 + step)[0].to(next(engine.module.parameters()).device)
    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state of the model that the ranks share. A collective operation."""
    weights = {}
    for path, module in model.named_modules():
        shards = [one for one in module.parameters(recurse=False)]
        partitioned = any(hasattr(shard, "ds_id") for shard in shards)
        with (
            deepspeed.zero.GatheredParameters(shards, enabled=partitioned),
            GatherReplacedLayerParams(shards, module, enabled=isinstance(module, TensorParallel_Layer)),
        ):
            for name, parameter in module.named_parameters(recurse=False):
                weights[f"{path}.{name}" if path else name] = parameter.detach().clone()
    return weights


def first_difference(batch: RolloutBatch, expected: RolloutBatch) -> str:
    row, column = (batch.input_ids != expected.input_ids).nonzero()[0].tolist()
    return f"row {row} differs first at column {column} of {batch.input_ids.shape[1]}"


class Collectives(TorchDispatchMode):
    """Counts what goes between ranks inside, by the kind of operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.name().removeprefix("c10d::")
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Collectives]:
    with Collectives() as collectives:
        yield collectives
