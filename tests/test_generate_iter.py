# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Rows as they complete, with the model free in between; and what ends a rollout's life."""

from types import SimpleNamespace

import pytest
import torch
from harness import answers, greedy, rollout_of
from models import PAD, ragged_prompts, tiny_model

from deepspeed_hybrid import RolloutRequest, SamplingConfig

LENGTHS = [3, 7, 5, 1]
SAMPLING = SamplingConfig(
    max_new_tokens=12, temperature=1.2, seed=4, n_samples_per_prompt=2, stop_token_ids=list(range(60, 85))
)


@pytest.fixture(scope="module", params=["qwen3_5", "qwen2_5"])
def bench(request):
    model = tiny_model(request.param).train()
    rollout, prompts = rollout_of(model), RolloutRequest(*ragged_prompts(LENGTHS))
    batch = rollout.generate(prompts, SAMPLING)
    assert len(set(batch.response_lengths.tolist())) > 3
    return SimpleNamespace(model=model, rollout=rollout, request=prompts, batch=batch)


def bound(model) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


@pytest.mark.parametrize("slots", [None, 1, 3])
def test_every_row_once_and_the_same(bench, slots):
    sampling = SamplingConfig(**{**vars(SAMPLING), "continuous_batch_size": slots})
    rows = list(bench.rollout.generate_iter(bench.request, sampling))
    assert sorted(row.index for row in rows) == list(range(8))
    for row in rows:
        length = len(row.tokens)
        assert length == int(bench.batch.response_lengths[row.index])
        assert row.tokens.tolist() == answers(bench.batch)[row.index].tolist()
        assert row.finish_reason == bench.batch.finish_reasons[row.index]
        torch.testing.assert_close(row.logprobs, bench.batch.logprobs[row.index, :length], atol=5e-5, rtol=0)
        assert row.tokens.dtype == torch.long and row.logprobs.dtype == torch.float32


def test_rows_come_when_they_end(bench):
    lengths = [len(row.tokens) for row in bench.rollout.generate_iter(bench.request, SAMPLING)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    bench.model.zero_grad()
    seen = []
    hook = bench.model.register_forward_pre_hook(lambda *args: seen.append(1))
    try:
        next(bench.rollout.generate_iter(bench.request, SAMPLING))
    finally:
        hook.remove()
    assert len(seen) == lengths[0]


def test_the_model_is_free_between_rows(bench):
    ids = ragged_prompts([9, 9], seed=3)[0]
    wanted = bench.model(input_ids=ids).logits
    modes = [module.training for module in bench.model.modules()]
    for count, _ in enumerate(bench.rollout.generate_iter(bench.request, SAMPLING)):
        assert bound(bench.model) == []
        assert [module.training for module in bench.model.modules()] == modes
        assert torch.is_grad_enabled()
        logits = bench.model(input_ids=ids).logits
        assert torch.equal(logits, wanted)
        if count == 2:
            logits.sum().backward()
            assert bench.model.lm_head.weight.grad is not None
            bench.model.zero_grad()


def test_a_mode_set_between_rows_stays(bench):
    rows = bench.rollout.generate_iter(bench.request, SAMPLING)
    next(rows)
    bench.model.eval()
    try:
        list(rows)
        assert not any(module.training for module in bench.model.modules())
    finally:
        bench.model.train()


def test_rows_are_the_callers_to_keep(bench):
    rows = []
    for row in bench.rollout.generate_iter(bench.request, SAMPLING):
        row.tokens.fill_(PAD)
        rows.append(row)
    again = bench.rollout.generate(bench.request, SAMPLING)
    assert torch.equal(again.input_ids, bench.batch.input_ids)
    assert all(bool((row.tokens == PAD).all()) for row in rows)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_abandoned_half_way(bench, taken):
    rows = bench.rollout.generate_iter(bench.request, SAMPLING)
    for _ in range(taken):
        next(rows)
    rows.close()
    assert bound(bench.model) == []
    again = bench.rollout.generate(bench.request, SAMPLING)
    assert torch.equal(again.input_ids, bench.batch.input_ids)


@pytest.mark.parametrize("intruder", ["generate", "generate_iter", "release_memory"])
def test_an_overtaken_iterator_says_so(bench, intruder):
    rows = bench.rollout.generate_iter(bench.request, SAMPLING)
    next(rows)
    if intruder == "generate":
        overtaking = bench.rollout.generate(bench.request, SAMPLING)
    elif intruder == "generate_iter":
        other = bench.rollout.generate_iter(bench.request, SAMPLING)
        next(other)
    else:
        bench.rollout.release_memory()

    with pytest.raises(RuntimeError, match="generate_iter"):
        list(rows)

    if intruder == "generate":
        assert torch.equal(overtaking.input_ids, bench.batch.input_ids)
    if intruder == "generate_iter":
        assert len(list(other)) == 7
    assert torch.equal(bench.rollout.generate(bench.request, SAMPLING).input_ids, bench.batch.input_ids)


def test_a_refused_call_disturbs_no_open_iterator(bench):
    rows = bench.rollout.generate_iter(bench.request, SAMPLING)
    first = next(rows)
    with pytest.raises(ValueError, match="temperature"):
        bench.rollout.generate(bench.request, SamplingConfig(max_new_tokens=2, temperature=-1.0))
    rest = {row.index: row.tokens.tolist() for row in rows}
    wanted = {index: row.tolist() for index, row in enumerate(answers(bench.batch)) if index != first.index}
    assert rest == wanted


def test_shutdown_and_context_manager():
    model, prompts = tiny_model("qwen2_5"), ragged_prompts(LENGTHS)
    with rollout_of(model) as rollout:
        open_rows = rollout.generate_iter(RolloutRequest(*prompts), SAMPLING)
        next(open_rows)
        assert rollout.memory_report()["kv_keys"] > 0
    with pytest.raises(RuntimeError, match="shutdown"):
        greedy(rollout, prompts, 2)
    with pytest.raises(RuntimeError, match="shutdown|generate_iter"):
        next(open_rows)
    rollout.shutdown()
    assert bound(model) == []
    assert {kind: size for kind, size in rollout.memory_report().items() if size and kind != "state_dtype"} == {}


def test_an_exception_inside_the_context_manager_passes_through():
    with pytest.raises(KeyError, match="own"):
        with rollout_of(tiny_model("qwen2_5")) as rollout:
            raise KeyError("own")
    with pytest.raises(RuntimeError, match="shutdown"):
        greedy(rollout, ragged_prompts([2]), 1)


def test_released_memory_comes_back(bench):
    bench.rollout.release_memory()
    report = bench.rollout.memory_report()
    assert report.pop("state_dtype") == torch.float32
    assert set(report.values()) == {0}
    assert torch.equal(bench.rollout.generate(bench.request, SAMPLING).input_ids, bench.batch.input_ids)
    assert bench.rollout.memory_report()["decode_state"] > 0


def test_figures_are_of_a_run_that_came_to_its_end():
    model = tiny_model("qwen2_5")
    rollout = rollout_of(model, enable_profiling=True)
    request = RolloutRequest(*ragged_prompts(LENGTHS))
    sampling = SamplingConfig(max_new_tokens=4, temperature=0.0, continuous_batch_size=2)
    rows = rollout.generate_iter(request, sampling)
    next(rows)
    assert rollout.get_last_profile() is None and rollout.get_last_continuous_stats() is None
    list(rows)
    profile, stats = rollout.get_last_profile(), rollout.get_last_continuous_stats()
    rollout.generate(request, sampling)
    assert profile is not None and set(profile) == set(rollout.get_last_profile())
    assert stats is not None and set(stats) == set(rollout.get_last_continuous_stats())


@pytest.mark.parametrize("shared", [None, False])
def test_rows_that_wait_start_from_the_weights_of_their_time(shared):
    """Also where a prompt was prefilled for an earlier sample, before the caller wrote to the weights."""
    model, other = tiny_model(), tiny_model(seed=1)
    ids, mask = ragged_prompts([6])
    rollout = rollout_of(model, use_shared_prefill=shared)
    sampling = SamplingConfig(max_new_tokens=6, temperature=0.0, n_samples_per_prompt=3, continuous_batch_size=1)
    rows = rollout.generate_iter(RolloutRequest(ids, mask), sampling)
    first = next(rows).tokens.tolist()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
            parameter.copy_(value)
    rollout.sync_segki_weights()
    wanted = answers(greedy(rollout_of(other), (ids, mask), 6))[0].tolist()
    assert first != wanted and [row.tokens.tolist() for row in rows] == [wanted, wanted]
