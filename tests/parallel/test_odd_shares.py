# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Two ranks of a ZeRO-3 engine with parameters that do not divide evenly, over several steps."""

import deepspeed
import pytest
import torch
from harness import assert_same_answers, prompt
from models import COMMON, GDN, MROPE, Tokenizer, ragged_prompts, solo
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from deepspeed_hybrid import HybridEngineRollout, RolloutRequest, SamplingConfig

pytestmark = pytest.mark.xdist_group("two_ranks")
NEW_TOKENS = 12


def odd_model() -> torch.nn.Module:
    """Some parameters have three elements, which two ranks cannot share evenly."""
    torch.manual_seed(0)
    sizes = {**COMMON, **GDN, "linear_num_key_heads": 3, "linear_num_value_heads": 3}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, rope_parameters=dict(MROPE)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model.eval()


def odd_shares() -> list:
    """Asserts that answers follow every step; how long they were."""
    rank, lengths = torch.distributed.get_rank(), []
    plain, model = odd_model(), odd_model().train()
    engine = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
            "steps_per_print": 10**9,
        },
    )[0]
    assert any(parameter.ds_numel % 2 for parameter in model.parameters())
    rollout = HybridEngineRollout(engine, Tokenizer())
    prompts = ragged_prompts([3, 7], seed=rank)
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, temperature=0.0, stop_token_ids=list(range(rank, 256, 9)))

    for step in range(3):
        if step:
            ids = ragged_prompts([16], seed=10 * step + rank)[0]
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
            engine.step()
        report = rollout.sync_segki_weights()
        assert report.bytes_copied == sum(4 * parameter.ds_numel for parameter in model.parameters())
        for _ in range(1 + 2 * rank):  # unlike the other rank, which would wait for ever if this were collective
            batch = rollout.generate(RolloutRequest(*prompts), sampling)

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        plain.load_state_dict(weights, strict=False)
        stops = set(sampling.stop_token_ids)
        assert_same_answers(batch, [solo(plain, prompt(prompts, row), NEW_TOKENS, stops) for row in range(2)])
        lengths.append(batch.response_lengths.tolist())
    return lengths


def test_two_ranks_answer_their_own_prompts(replicas):
    """Each stops when its rows end, and calls generate() as often as it likes; only a sync is collective."""
    first, second = replicas.run("parallel.test_odd_shares:odd_shares")
    assert first != second, "ranks are to stop at different times"
