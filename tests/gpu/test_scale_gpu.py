# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Rollouts of many rows on a GPU: the last rows on fewer lanes, memory that is planned, reported and given back."""

import pytest
import torch
from harness import answers, rollout_of
from models import ragged_prompts, tiny_model

from deepspeed_hybrid import HybridEngineRollout, RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import tail
from deepspeed_hybrid.generation.capacity import free_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_fp32"),
]

LENGTHS, SAMPLES, NEW_TOKENS = [3, 11, 1, 7, 5, 2, 9, 40], 4, 160
STOPS = list(range(30, 34))  # about one token in sixty: a long tail


def sample(rollout: HybridEngineRollout, **changes):
    usual = dict(
        max_new_tokens=NEW_TOKENS, temperature=1.3, n_samples_per_prompt=SAMPLES, seed=12, stop_token_ids=STOPS
    )
    return rollout.generate(RolloutRequest(*ragged_prompts(LENGTHS)), SamplingConfig(**{**usual, **changes}))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
@pytest.mark.parametrize("slots", [7, 32])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "by the rule"])
def test_fewer_lanes_give_the_same_tokens(family, slots, at_once, monkeypatch):
    """Captured in the midst of a run, and replayed in the next one."""
    if at_once:
        monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)
    model = tiny_model(family).cuda()
    wanted = sample(rollout_of(model, use_graph_capture=True, shrink_tail=False), continuous_batch_size=slots)
    rollout = rollout_of(model, use_graph_capture=True)
    captures, shrinks = [], []
    for _ in range(3):
        batch = sample(rollout, continuous_batch_size=slots)
        assert [row.tolist() for row in answers(batch)] == [row.tolist() for row in answers(wanted)]
        torch.testing.assert_close(batch.logprobs, wanted.logprobs, atol=1e-4, rtol=0)
        captures.append(rollout._graphs.captures)
        shrinks.append(rollout.get_last_continuous_stats()["shrinks"])
    assert shrinks[0] > 0 and len(set(shrinks)) == 1
    assert captures == [1 + shrinks[0]] * 3


def test_a_call_repeated_has_the_same_bits():
    model = tiny_model().cuda().bfloat16()
    rollout = rollout_of(model, use_graph_capture=True)
    first, *others = (sample(rollout, continuous_batch_size=16) for _ in range(4))
    assert rollout.get_last_continuous_stats()["shrinks"] > 0
    for other in others[1:]:  # the first two differ in eager and captured prompt forwards at most
        assert torch.equal(other.input_ids, others[0].input_ids) and torch.equal(other.logprobs, others[0].logprobs)
    assert first.logprobs is not None


def test_the_pool_is_reported_and_given_back():
    model = tiny_model().cuda()
    rollout = rollout_of(model, use_graph_capture=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        sample(rollout)
    report = rollout.memory_report()
    assert report["graph_pool"] > 0 and report["prompt_logits"] > 0
    held = sum(size for kind, size in report.items() if kind != "state_dtype")
    torch.cuda.empty_cache()
    grown = torch.cuda.memory_reserved() - before
    # Blocks are reserved in whole segments, and libraries keep workspaces.
    assert held <= grown + 2**20 and grown - held < 128 * 2**20
    rollout.release_memory()
    assert sum(size for kind, size in rollout.memory_report().items() if kind not in ("state_dtype",)) == 0
    assert torch.cuda.memory_reserved() - before < 64 * 2**20


def test_free_memory_is_the_drivers():
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert free_bytes(torch.device("cuda", torch.cuda.current_device())) == pytest.approx(free + kept, abs=2**30)


def test_what_cannot_fit_is_refused_and_auto_fits():
    rollout = rollout_of(tiny_model().cuda(), continuous_cache_capacity=2**18)
    with pytest.raises(ValueError, match="continuous_batch_size=4096 needs .*GB.* would fit"):
        sample(rollout, n_samples_per_prompt=512, max_new_tokens=4, continuous_batch_size=4096)
    assert rollout._arena.cache is None
    batch = sample(rollout, n_samples_per_prompt=512, max_new_tokens=4, continuous_batch_size="auto")
    assert len(answers(batch)) == 8 * 512
    assert 1 <= rollout.get_last_continuous_stats()["slots"] < 4096
    rollout.release_memory()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's word on a capture that was cut short
def test_out_of_memory_in_a_capture_of_the_tail(monkeypatch):
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)
    rollout = rollout_of(tiny_model().cuda(), use_graph_capture=True)
    wanted = sample(rollout)
    rollout.release_memory()
    logits, calls = rollout._paths.call.logits, []

    def short(*arguments):
        if torch.cuda.is_current_stream_capturing():
            calls.append(1)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("cut")
        return logits(*arguments)

    rollout._paths.call.logits = short
    with pytest.raises(torch.OutOfMemoryError, match="cut"):
        sample(rollout)
    assert rollout._arena.cache is None and len(rollout._graphs) == 0
    rollout._paths.call.logits = logits
    again = sample(rollout)
    assert [row.tolist() for row in answers(again)] == [row.tolist() for row in answers(wanted)]
