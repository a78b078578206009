# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Speculative steps on a GPU, eager and captured: the plain path's tokens in fp32, one capture a length, no sync."""

import pytest
import torch
from harness import greedy, rollout_of
from models import ragged_prompts, tiny_model
from speculative_cases import DeviceScript, Schedule, figures, script_of, speculative_rollout, tiny_draft

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import tail

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_fp32"),
]

KINDS = {
    "greedy": dict(temperature=0.0),
    "seeded": dict(temperature=1.0, seed=1, top_p=0.9),
    "penalised": dict(temperature=0.8, seed=2, repetition_penalty=1.2),
}
LENGTHS = [5, 1, 17, 2]


def run(rollout, prompts, new_tokens: int = 32, **options):
    return rollout.generate(RolloutRequest(*prompts), SamplingConfig(max_new_tokens=new_tokens, **options))


def script(batch, samples: int = 1) -> DeviceScript:
    return DeviceScript(script_of(batch, samples), lambda *key: sum(key) % 8, "cuda")


def committed(rollout) -> list[torch.Tensor]:
    """What the slots hold of rows of LENGTHS, whose last token of 32 nobody has read yet."""
    cache, parts = rollout._arena.cache, []
    for layer in (*cache.layers, *cache.companions):
        for name, buffer in layer.tensors().items():
            for row, known in enumerate(length + 31 for length in LENGTHS):
                kept = {"kv": (row, slice(None), slice(known)), "dr": (row, slice(known))}
                parts.append(buffer[kept.get(name[:2], row)])
    return parts


def assert_same(one, other, atol: float = 1e-3) -> None:
    assert torch.equal(one.input_ids, other.input_ids)
    assert one.finish_reasons == other.finish_reasons
    torch.testing.assert_close(one.logprobs, other.logprobs, atol=atol, rtol=0)


@pytest.mark.parametrize(
    "family, proposes, captured",
    [("qwen3_5", "model", True), ("qwen3_5", "script", True), ("qwen3_5", "script", False), ("llama", "script", True)],
)
def test_fp32_tokens_are_the_plain_paths(family, proposes, captured):
    target, prompts = tiny_model(family).cuda(), ragged_prompts(LENGTHS)
    plain = greedy(rollout_of(target), prompts, 32)
    draft = script(plain) if proposes == "script" else tiny_draft(target).cuda()
    rollout = speculative_rollout(target, draft, use_graph_capture=captured)
    for _ in range(2):
        assert_same(greedy(rollout, prompts, 32), plain)
    if captured:
        assert rollout._graphs.captures == 1
    assert f"graph capture: {'on' if captured else 'off'}" in rollout.describe()
    if proposes == "script":
        assert figures(rollout)["tokens_per_step"] > 2


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_blocks_of_changing_length(kind):
    """Captured is eager, and both are plain: tokens, counts, and what is left in the slots of target and draft."""
    target, prompts = tiny_model().cuda(), ragged_prompts(LENGTHS)
    plain = run(rollout_of(target), prompts, **kind)
    for draft in (tiny_draft(target, block_size=16).cuda(), script(plain)):
        rollouts = []
        for captured in (True, False):
            rollout = speculative_rollout(target, draft, Schedule(1, 16, 4, 8), use_graph_capture=captured)
            assert_same(run(rollout, prompts, **kind), plain)
            rollouts.append(rollout)
        one, other = rollouts
        assert figures(one) == figures(other) and one._graphs.captures == 4
        for mine, theirs in zip(committed(one), committed(other), strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_a_context_on_a_side_stream(captured):
    """Tokens, and the bits of every slot, are those of one stream, over graphs of several lengths."""
    target, prompts = tiny_model().cuda(), ragged_prompts(LENGTHS)
    draft, outcomes = tiny_draft(target, block_size=16).cuda(), []
    for aside in (True, False):
        schedule = Schedule(16, 1, 4, 8)
        rollout = speculative_rollout(target, draft, schedule, use_graph_capture=captured, draft_side_stream=aside)
        for _ in range(3):
            batch = run(rollout, prompts, **KINDS["seeded"])
        outcomes.append((batch, committed(rollout)))
    (one, mine), (other, theirs) = outcomes
    assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.logprobs, other.logprobs)
    assert all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))


def test_optimizer_steps_need_one_capture_a_length():
    """Both models are trained in place; a rollout made anew has the same tokens and the same draft context."""
    target, prompts = tiny_model().cuda(), ragged_prompts([3, 7, 5])
    draft = tiny_draft(target, block_size=16).cuda()
    rollout = speculative_rollout(target, draft, Schedule(1, 4, 8, 16))
    optimizer = torch.optim.AdamW([*target.parameters(), *draft.parameters()], lr=1e-2)
    generator, before = torch.Generator("cuda").manual_seed(0), None
    for step in range(4):
        batch = greedy(rollout, prompts, 24)
        assert_same(batch, greedy(rollout_of(target), prompts, 24))
        assert before is None or not torch.equal(batch.input_ids, before)
        before = batch.input_ids
        fresh = speculative_rollout(target, draft, Schedule(1, 4, 8, 16), use_graph_capture=False)
        greedy(fresh, prompts, 24)
        for row, length in enumerate([3, 7, 5]):  # behind them are the last block's
            mine, theirs = (one._speculation.drafter.cache.keys[row, : length + 23] for one in (rollout, fresh))
            torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=1e-3)
        for parameter in (*target.parameters(), *draft.parameters()):
            parameter.grad = torch.randn(parameter.shape, device="cuda", generator=generator)
        optimizer.step()
        rollout.sync_weights(step)
    assert rollout._graphs.captures == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_context_in_fp8(dtype):
    """Its guesses are almost those of the model's own dtype, and tokens are the plain path's."""
    target, prompts = tiny_model().cuda().to(dtype), ragged_prompts(LENGTHS)
    plain, draft = greedy(rollout_of(target), prompts, 32), tiny_draft(target).cuda()
    caches = []
    for option in ({}, {"draft_kv_cache_dtype": "fp8_e4m3"}):
        rollout = speculative_rollout(target, draft, use_graph_capture=True, **option)
        batch = greedy(rollout, prompts, 32)
        if dtype == torch.float32:  # in 16 bits a block's products round otherwise than a single row's
            assert_same(batch, plain)
        caches.append(rollout._speculation.drafter.cache)
    own, fp8 = caches
    assert fp8.keys.dtype == torch.float8_e4m3fn and own.keys.dtype == dtype
    for row, length in enumerate(LENGTHS):  # of prompts, which both have alike
        for exact, rounded in ((own.keys, fp8.keys), (own.values, fp8.values)):
            exact, rounded = exact[row, :length].float(), rounded[row, :length].float()
            torch.testing.assert_close(rounded, exact, rtol=2**-3, atol=2**-6)


def test_slots_that_are_taken_again_and_fewer_lanes(monkeypatch):
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)
    target, prompts = tiny_model().cuda(), ragged_prompts(LENGTHS)
    options = dict(n_samples_per_prompt=2, temperature=1.0, seed=3)
    free = run(rollout_of(target), prompts, **options)
    options["max_new_tokens_per_row"] = [4, 9, 3, 8, 1, 32, 5, 2]
    plain = run(rollout_of(target), prompts, **options)
    for draft in (tiny_draft(target).cuda(), script(free, 2)):
        rollout = speculative_rollout(target, draft, poll_every=3)
        for _ in range(3):
            assert_same(run(rollout, prompts, continuous_batch_size=2, **options), plain)
        assert rollout._graphs.captures <= 2


def test_lengths_that_pay_are_found_over_graphs():
    target, prompts = tiny_model().cuda(), ragged_prompts([5, 2])
    plain = greedy(rollout_of(target), prompts, 200)
    rollout = speculative_rollout(target, tiny_draft(target, block_size=16).cuda(), draft_block_size="auto")
    for _ in range(2):
        assert_same(greedy(rollout, prompts, 200), plain)
    controller = rollout._speculation.controller
    assert set(controller.seconds) == {(2, length) for length in (1, 4, 8, 16)}
    assert max(controller.seconds.values()) < 1, "a capture was taken for a step"
    assert rollout._graphs.captures == 4


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_steps_do_not_wait_for_the_device(captured):
    target, prompts = tiny_model().cuda(), ragged_prompts([5, 2])
    rollout = speculative_rollout(
        target, tiny_draft(target, block_size=16).cuda(), Schedule(1, 4, 8, 16), use_graph_capture=captured
    )
    kind = KINDS["seeded"]
    expected, steps = run(rollout, prompts, **kind), rollout._speculation.steps
    guarded = []

    def watched(*args):
        step = steps(*args)

        def run_step() -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            guarded.append(1)

        return run_step

    rollout._speculation.steps = watched
    assert_same(run(rollout, prompts, **kind), expected)
    assert len(guarded) == sum(figures(rollout)["steps"].values()) >= 8
