# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Captured prompt forwards: the eager numbers, whatever their buffers held, of the weights and the model of now.

Captures are recorded and replayed on the CPU; tests/gpu/test_prompt_graphs_gpu.py holds the same on a GPU.
"""

from types import SimpleNamespace

import pytest
import torch
from harness import answers, assert_same_answers, by_hand, greedy, new_cache, prompt, rollout_of
from models import FAMILIES, VOCAB, Tokenizer, ragged_prompts, solo, tiny_model
from recorded_graph import capture_prompts, capture_steps, recording_accelerator

from deepspeed_hybrid import HybridEngineRollout, RolloutBatch, RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation.graph import GraphRunner
from deepspeed_hybrid.generation.prefill import prefill
from deepspeed_hybrid.generation.prompt_graphs import PATIENCE, PromptGraphs

pytestmark = pytest.mark.core

CAPTURED = ["qwen3_5", "qwen3_5_conditional", "gdn_only", "qwen2_5", "qwen3", "llama"]
RAGGED = [3, 40, 5]  # one shape of 3 rows and 64 columns


@pytest.fixture
def accelerator():
    with recording_accelerator() as recorder:
        yield recorder


def bench(model: torch.nn.Module, max_graphs: int = 8, **options) -> SimpleNamespace:
    rollout = rollout_of(model, **options)
    return SimpleNamespace(rollout=rollout, graphs=capture_prompts(rollout, max_graphs))


def counts(graphs: PromptGraphs) -> tuple[int, int]:
    return graphs.captures, graphs.replays


def padded_eager(model: torch.nn.Module) -> HybridEngineRollout:
    """The same shapes, never captured: what a GPU does without graphs."""
    rollout = rollout_of(model)
    rollout._arena.prompts = PromptGraphs(rollout._paths.call, None, lambda: None)
    return rollout


def assert_equal(batch: RolloutBatch, expected: RolloutBatch) -> None:
    assert torch.equal(batch.input_ids, expected.input_ids)
    assert torch.equal(batch.logprobs, expected.logprobs)


def oracles(model: torch.nn.Module, prompts, steps: int) -> list:
    return [solo(model, prompt(prompts, row), steps) for row in range(len(prompts[0]))]


# ------------------------------------------------------------------------------------------------- captured == eager


@pytest.mark.parametrize(
    "family, lengths",
    [(family, lengths) for family in CAPTURED for lengths in ([3, 40, 5], [1, 9, 2, 33, 70])]
    + [(family, lengths) for family in ("qwen3_5", "qwen3") for lengths in ([3], [32], [64, 64], [31, 32])],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_replays_are_the_eager_forward(accelerator, family, lengths):
    """Bit by bit, and Hugging Face's tokens. Recording fails at any value that is read on the host."""
    model = tiny_model(family)
    prompts = ragged_prompts(lengths)
    it = bench(model)
    expected, seen = greedy(padded_eager(model), prompts, 10), []
    for _ in range(4):
        assert_equal(greedy(it.rollout, prompts, 10), expected)
        seen.append(counts(it.graphs))
    assert seen == [(0, 0), (1, 1), (1, 2), (1, 3)]
    assert_same_answers(expected, oracles(model, prompts, 10))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_whole_prompts_have_the_bits_of_an_exact_prefill(accelerator, family):
    """A shape without padding is no other forward than the one without shapes."""
    model = tiny_model(family)
    prompts = ragged_prompts([64, 64])
    it = bench(model)
    exact = greedy(rollout_of(model), prompts, 10)
    for _ in range(3):
        assert_equal(greedy(it.rollout, prompts, 10), exact)
    assert counts(it.graphs) == (1, 2)


def test_steps_and_prompts_are_captured_side_by_side(accelerator):
    model = tiny_model()
    it = bench(model, max_graphs=1)
    steps = capture_steps(it.rollout, max_graphs=1)
    prompts = ragged_prompts(RAGGED)
    expected = greedy(padded_eager(model), prompts, 10)
    for _ in range(4):
        assert_equal(greedy(it.rollout, prompts, 10), expected)
    assert (steps.captures, counts(it.graphs)) == (1, (1, 3))


def test_model_with_an_obstacle_stays_eager(accelerator):
    model = tiny_model("qwen3_next")
    it = bench(model)
    prompts = ragged_prompts(RAGGED)
    for _ in range(3):
        assert_same_answers(greedy(it.rollout, prompts, 10), oracles(model, prompts, 10))
    assert counts(it.graphs) == (0, 0)


def test_an_eager_run_leaves_a_graphs_tensors_alone(accelerator):
    """An obstacle that comes and goes: what was captured goes on writing to where it is read."""
    model = tiny_model()
    it = bench(model)
    prompts, other = ragged_prompts(RAGGED), ragged_prompts(RAGGED, seed=8)
    expected = [greedy(padded_eager(model), one, 4) for one in (prompts, other)]
    for one, obstacle in ((0, None), (1, None), (0, "a reason"), (1, None)):
        it.graphs.obstacle = lambda obstacle=obstacle: obstacle
        assert_equal(greedy(it.rollout, (prompts, other)[one], 4), expected[one])
    assert counts(it.graphs) == (1, 2)


# -------------------------------------------------------------------------------------------- what is in the buffers


@pytest.mark.parametrize("family", CAPTURED)
def test_other_prompts_and_slots_go_through_the_same_graph(accelerator, family):
    """Ids, lengths and slots are buffers, of which nothing is left from the call before."""
    model = tiny_model(family)
    it = bench(model)
    for seed, lengths in enumerate([[64, 33, 1], RAGGED, [2, 2, 50], [33, 1, 63], RAGGED]):
        prompts = ragged_prompts(lengths, seed=seed, width=64 + seed)
        assert_same_answers(greedy(it.rollout, prompts, 10), oracles(model, prompts, 10))
    assert counts(it.graphs) == (1, 4)


@pytest.mark.parametrize("poison", [1e4, float("nan")])
@pytest.mark.parametrize("lengths", [RAGGED, [3, 7, 5, 9, 2], [64, 64]], ids=str)
def test_stale_buffers_do_not_reach_a_row(accelerator, poison, lengths):
    """The cache, its scratch slot, the ids of padding and the facts of rows that are padding."""
    model = tiny_model()
    it = bench(model)
    prompts = ragged_prompts(lengths)
    expected = [greedy(it.rollout, prompts, 10) for _ in range(2)][1]
    for _ in range(2):
        for buffer in it.rollout._arena.cache.buffers():
            buffer.fill_(poison)
        (forward,) = it.graphs._captured.values()
        forward.ids.fill_(VOCAB - 1)
        forward.facts.fill_(1)
        forward.logits.fill_(poison)
        assert_equal(greedy(it.rollout, prompts, 10), expected)
    assert counts(it.graphs) == (1, 3)


@pytest.mark.parametrize("use_segki", [True, False])
@pytest.mark.parametrize("lengths", [[7, 7], [7, 4]], ids=str)
def test_what_an_earlier_row_left_does_not_spread(lengths, use_segki):
    """Of prompts without graphs, with padding and without; torch's own attention multiplies what it masks by zero."""
    rollout = rollout_of(tiny_model(), use_segki=use_segki)
    prompts = ragged_prompts(lengths)
    expected = greedy(rollout, prompts, 10)
    for buffer in rollout._arena.cache.buffers():
        buffer.fill_(float("nan"))
    assert_equal(greedy(rollout, prompts, 10), expected)


def test_rows_of_padding_touch_no_slot(accelerator):
    """Five prompts in a shape of six rows, in an arena of eight slots."""
    it = bench(tiny_model())
    for seed in range(3):
        greedy(it.rollout, ragged_prompts([3, 7, 5, 9, 2], seed=seed), 1)
    cache = it.rollout._arena.cache
    assert cache.slots == 8 and counts(it.graphs) == (1, 2)
    assert all(not bool(buffer[5:8].any()) for buffer in cache.buffers())
    assert any(bool(buffer[cache.scratch].any()) for buffer in cache.buffers())


def test_a_width_beyond_the_cache(accelerator):
    """The width is 640, the cache holds 576: what padding writes in its last place is masked, and not read."""
    model = tiny_model()
    it = bench(model)
    prompts = ragged_prompts([520, 3])
    for _ in range(3):
        assert_same_answers(greedy(it.rollout, prompts, 4), oracles(model, prompts, 4))
    assert it.rollout._arena.cache.capacity == 576 and counts(it.graphs) == (1, 2)


# ---------------------------------------------------------------------------------------------- groups and schedules


@pytest.mark.parametrize("slots", [1, 2, 3, None])
@pytest.mark.parametrize("shared_prefill", [True, False])
def test_samples_and_schedules(accelerator, slots, shared_prefill):
    """Samples of a prompt share its prefill; slots refill with prompts one by one."""
    model = tiny_model()
    prompts = ragged_prompts([3, 40, 1, 7])
    config = dict(max_new_tokens=12, temperature=1.2, n_samples_per_prompt=3, seed=4, stop_token_ids=list(range(60)))
    wanted = rollout_of(model).generate(RolloutRequest(*prompts), SamplingConfig(**config))
    it = bench(model, use_shared_prefill=shared_prefill)
    for _ in range(3):
        batch = it.rollout.generate(RolloutRequest(*prompts), SamplingConfig(**config, continuous_batch_size=slots))
        assert [row.tolist() for row in answers(batch)] == [row.tolist() for row in answers(wanted)]
        torch.testing.assert_close(batch.logprobs, wanted.logprobs, atol=5e-5, rtol=0)
    assert it.graphs.replays > 0


def test_generate_iter(accelerator):
    model = tiny_model()
    prompts = ragged_prompts([3, 40, 1, 7])
    it = bench(model)
    config = SamplingConfig(max_new_tokens=8, temperature=0.0, continuous_batch_size=1)
    for _ in range(2):
        rows = {row.index: row.tokens for row in it.rollout.generate_iter(RolloutRequest(*prompts), config)}
        for index, oracle in enumerate(oracles(model, prompts, 8)):
            assert rows[index].tolist() == oracle.tokens.tolist()
    assert counts(it.graphs) == (2, 6)  # three prompts of 32 columns and one of 64, twice


@pytest.mark.parametrize("token_budget", [64, 100, 200])
@pytest.mark.parametrize("lengths", [[70, 1, 9], [150, 3, 30, 31, 5]], ids=str)
def test_groups_and_chunks_are_one_prefill(accelerator, token_budget, lengths):
    """Prompts over the budget run eagerly in chunks among others that replay."""
    model = tiny_model()
    prompts = ragged_prompts(lengths)
    slots = [2, 0, 3, 1, 4][: len(lengths)]
    exact, shaped = (new_cache(model, slots=5, capacity=192) for _ in range(2))
    graphs = PromptGraphs(shaped.call, GraphRunner(8), lambda: None)
    expected = by_hand(exact, lambda: prefill(exact.call, exact.slots, prompts[0], lengths, slots))
    forwards = []
    for _ in range(3):
        before = shaped.call.forwards
        got = by_hand(
            shaped, lambda: prefill(shaped.call, shaped.slots, prompts[0], lengths, slots, token_budget, graphs)
        )
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        forwards.append(shaped.call.forwards - before)
    assert len(set(forwards)) == 1, "a replay counts as a forward"
    assert graphs.replays > 0


def test_profile_counts_replays(accelerator):
    it = bench(tiny_model(), enable_profiling=True)
    seen = []
    for _ in range(3):
        greedy(it.rollout, ragged_prompts(RAGGED), 2)
        profile = it.rollout.get_last_profile()
        seen.append([profile[name] for name in ("num_prefill_forwards", "num_prefill_replays")])
    assert seen == [[1, 0], [1, 1], [1, 1]]
    assert it.rollout.get_last_profile()["prefill_graph_captures"] == 1


# ---------------------------------------------------------------------------------------------------- graphs that go


def test_least_recently_used_shape_is_dropped_and_its_buffers_with_it(accelerator):
    model = tiny_model()
    it = bench(model, max_graphs=2)
    one, two, three = (ragged_prompts([5] * rows) for rows in (1, 2, 3))
    expected = {id(prompts): oracles(model, prompts, 6) for prompts in (one, two, three)}
    greedy(it.rollout, three, 6)  # the arena is at its largest
    captures = []
    for prompts in (three, one, one, three, *[two] * (PATIENCE + 2), three, one, one):
        assert_same_answers(greedy(it.rollout, prompts, 6), expected[id(prompts)])
        assert len(it.graphs.runner) == len(it.graphs._captured) <= 2
        captures.append(it.graphs.captures)
    assert captures == [1, 1, 2, 2, *[2] * PATIENCE, 3, 3, 3, 3, 3]  # two has dropped one, which has to wait now


def test_a_larger_arena_has_graphs_of_its_own(accelerator):
    model = tiny_model()
    it = bench(model)
    few, many = ragged_prompts(RAGGED), ragged_prompts([5] * 9)
    for prompts, seen in ((few, (0, 0)), (few, (1, 1)), (many, (1, 1)), (few, (1, 1)), (few, (2, 2)), (few, (2, 3))):
        assert_same_answers(greedy(it.rollout, prompts, 10), oracles(model, prompts, 10))
        assert counts(it.graphs) == seen
    it.rollout.release_memory()
    assert len(it.graphs.runner) == len(it.graphs._captured) == 0


@pytest.mark.parametrize("family", CAPTURED)
def test_graph_reads_the_weights_of_now_and_is_captured_once(accelerator, family):
    model = tiny_model(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ids = ragged_prompts([12, 12], seed=21)[0]
    prompts = ragged_prompts(RAGGED)
    it = bench(model)
    outputs = []
    for _ in range(4):
        batch = greedy(it.rollout, prompts, 8)
        assert_equal(batch, greedy(padded_eager(model), prompts, 8))
        outputs.append(batch.input_ids)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        it.rollout.sync_segki_weights()
    assert counts(it.graphs) == (1, 3)
    assert all(not torch.equal(before, after) for before, after in zip(outputs, outputs[1:], strict=False))


@pytest.mark.parametrize("stage", [1, 3])
def test_engine_steps_reach_the_graph(accelerator, make_engine, monkeypatch, stage):
    """Flat weights of ZeRO-1, and the gathered copies of ZeRO-3."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # ZeRO-3 replaces it for good
    engine = make_engine(tiny_model(), learning_rate=1e-2, stage=stage)
    rollout = HybridEngineRollout(engine, Tokenizer())
    graphs = capture_prompts(rollout)
    exact = HybridEngineRollout(engine, Tokenizer())
    prompts, ids = ragged_prompts(RAGGED), ragged_prompts([12, 12], seed=21)[0]
    outputs = []
    for _ in range(4):
        batch, expected = greedy(rollout, prompts, 8), greedy(exact, prompts, 8)
        assert torch.equal(batch.input_ids, expected.input_ids)
        torch.testing.assert_close(batch.logprobs, expected.logprobs, atol=5e-5, rtol=0)
        outputs.append(batch.input_ids)
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
        rollout.sync_weights(engine.global_steps)
        exact.sync_weights(engine.global_steps)
    assert counts(graphs) == (1, 3)
    assert all(not torch.equal(before, after) for before, after in zip(outputs, outputs[1:], strict=False))


@pytest.mark.parametrize("how", ["data", "parameter", "one projection"])
def test_replaced_weights_are_never_read_through_an_old_graph(accelerator, how):
    model = tiny_model()
    prompts = ragged_prompts(RAGGED)
    it = bench(model)
    before = [greedy(it.rollout, prompts, 8) for _ in range(2)][1]
    kept = [parameter.data for parameter in model.parameters()]
    with torch.no_grad():
        if how == "data":
            for parameter in model.parameters():
                parameter.data = parameter.data * 1.2
        elif how == "parameter":
            mlp = model.model.layers[1].mlp
            mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight * -1.5)
        else:
            model.model.layers[0].linear_attn.in_proj_z.weight.data.mul_(-2)
    for _ in range(2):
        after = greedy(it.rollout, prompts, 8)
        assert_equal(after, greedy(padded_eager(model), prompts, 8))
        assert not torch.equal(before.input_ids, after.input_ids)
    assert counts(it.graphs) == ((1, 3) if how == "one projection" else (2, 2)) and kept


def test_a_hook_is_not_passed_by(accelerator):
    """It ends the replays while it is there, and all of them begin anew when it is gone."""
    model = tiny_model()
    prompts = ragged_prompts(RAGGED)
    it = bench(model)
    plain = [greedy(it.rollout, prompts, 8) for _ in range(2)][1]
    calls = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *args: calls.append(1) or args[2] * 0.5)
    for _ in range(3):
        hooked = greedy(it.rollout, prompts, 8)
        assert torch.equal(hooked.input_ids, greedy(rollout_of(model), prompts, 8).input_ids)
        assert not torch.equal(hooked.input_ids, plain.input_ids)
    assert len(calls) == 6 * 8 and counts(it.graphs) == (1, 1)
    handle.remove()
    for _ in range(3):
        assert_equal(greedy(it.rollout, prompts, 8), plain)
    assert counts(it.graphs) == (2, 3)


def test_a_failed_capture_leaves_the_next_call_right(accelerator, monkeypatch):
    model = tiny_model()
    prompts = ragged_prompts(RAGGED)
    it = bench(model)
    expected = greedy(it.rollout, prompts, 8)

    def fail(recorded, pool=None):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(accelerator, "capture_to_graph", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            greedy(it.rollout, prompts, 8)
    assert counts(it.graphs) == (0, 0) and not it.graphs._captured
    for seen in ((0, 0), (1, 1)):
        assert_equal(greedy(it.rollout, prompts, 8), expected)
        assert counts(it.graphs) == seen


def test_families_are_all_looked_at():
    assert set(FAMILIES) == {*CAPTURED, "qwen3_next"}
