# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Reported faults of captured steps: stale weights, a capture too many, warm-ups that touch live state.

Captures are recorded and replayed on the CPU; tests/gpu/test_graph_gpu.py holds the same on a GPU.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from harness import answers, assert_same_answers, greedy, prompt, rollout_of
from models import FAMILIES, VOCAB, Tokenizer, engine_of, ragged_prompts, solo, tiny_model
from recorded_graph import capture_steps, recording_accelerator

from deepspeed_hybrid import HybridEngineRollout, RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation.graph import WARMUPS, GraphRunner

pytestmark = pytest.mark.core

CAPTURED = ["qwen3_5", "qwen3_5_conditional", "gdn_only", "qwen3"]


@pytest.fixture
def accelerator():
    with recording_accelerator() as recorder:
        yield recorder


def train_step(model, optimizer=None, engine=None) -> None:
    ids = ragged_prompts([12, 12], seed=21)[0]
    if engine is not None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    else:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------- the graph runner


def test_runner_captures_a_key_once_and_replays_what_it_recorded(accelerator):
    buffer, host = torch.zeros(3), []

    def step() -> None:
        host.append(1)
        buffer.add_(1).mul_(2)

    runner = GraphRunner(max_graphs=2)
    kept = buffer.clone()
    replay = runner.prepare("a", step, nullcontext)
    assert not torch.equal(buffer, kept), "warm-ups run for real, which is why they need a harmless context"
    assert len(host) == WARMUPS + 1

    buffer.zero_()
    replay()
    runner.prepare("a", step, nullcontext)()

    assert buffer.tolist() == [6.0] * 3  # (0 + 1) * 2 = 2, (2 + 1) * 2 = 6
    assert (runner.captures, len(runner), len(host)) == (1, 1, WARMUPS + 1)


def test_runner_warms_up_in_the_harmless_context_only(accelerator):
    harmless, seen = [False], []

    @contextmanager
    def context():
        harmless[0] = True
        yield
        harmless[0] = False

    GraphRunner(max_graphs=1).prepare("a", lambda: seen.append(harmless[0]), context)
    assert seen == [True] * WARMUPS + [False]


def test_runner_drops_the_least_recently_used(accelerator):
    runner = GraphRunner(max_graphs=2)
    for key in ("a", "b", "a", "c"):  # a is used again: b goes
        runner.prepare(key, lambda: None, nullcontext)
    assert (runner.captures, len(runner)) == (3, 2)
    runner.prepare("a", lambda: None, nullcontext)
    assert runner.captures == 3
    runner.prepare("b", lambda: None, nullcontext)
    assert runner.captures == 4
    runner.release()
    assert len(runner) == 0


def test_failed_capture_is_not_kept(accelerator):
    buffer, runner = torch.ones(2), GraphRunner(max_graphs=2)
    fail = [False, False, True, False]

    def step() -> None:
        if fail.pop(0):
            raise RuntimeError("out of memory")
        buffer.add_(1)

    with pytest.raises(RuntimeError, match="out of memory"):
        runner.prepare("a", step, nullcontext)
    assert (len(runner), runner.captures) == (0, 0)
    fail.extend([False] * 4)
    buffer.zero_()
    replay = runner.prepare("a", step, nullcontext)
    buffer.zero_()
    replay()
    assert buffer.tolist() == [1.0, 1.0]


# ------------------------------------------------------------------------------------------------ captured == eager


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3, 4, 5])
def test_captured_steps_are_the_eager_steps(accelerator, family, rows):
    """vllm-project/vllm#28202: rows fewer than captured lanes; also DeepSpeed 0.19.8's AttributeError when capturing.

    Recording fails at any value that a step reads on the host, so that it also shows that there is none.
    """
    model = tiny_model(family)
    prompts = ragged_prompts([3, 7, 5, 1, 9][:rows])
    rollout = rollout_of(model)
    runner = capture_steps(rollout)

    first, second = greedy(rollout, prompts, 20), greedy(rollout, prompts, 20)

    eager = greedy(rollout_of(model), prompts, 20)
    assert runner.captures == 1
    assert [graph.replays for graph in accelerator.graphs] == [2 * 19]
    for batch in (first, second):
        assert torch.equal(batch.input_ids, eager.input_ids)
        assert torch.equal(batch.logprobs, eager.logprobs)
    assert_same_answers(first, [solo(model, prompt(prompts, row), 20) for row in range(rows)])


def test_fewer_rows_on_a_graph_of_four_lanes(accelerator):
    """vllm-project/vllm#28202: captured by 4 rows, replayed by 3, whose free lane holds the fourth row's rest."""
    model = tiny_model()
    rollout = rollout_of(model)
    runner = capture_steps(rollout)
    greedy(rollout, ragged_prompts([9, 8, 7, 6], seed=5), 20)

    prompts = ragged_prompts([3, 7, 5])
    batch = greedy(rollout, prompts, 20)

    assert runner.captures == 1
    assert torch.equal(batch.input_ids, greedy(rollout_of(model), prompts, 20).input_ids)


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=1.0),
        dict(temperature=0.7, top_k=20, top_p=0.9),
        dict(temperature=1.0, min_p=0.05),
        dict(temperature=0.0, repetition_penalty=1.3),
        dict(temperature=0.8, repetition_penalty=1.2, top_p=0.8),
        dict(temperature=1.0, logprobs_mode="raw"),
    ],
    ids=str,
)
def test_numbers_of_sampling_are_not_frozen_into_a_graph(accelerator, options):
    """One kind is one capture; seeds, temperatures, penalties and stop ids may change between replays."""
    model = tiny_model()
    prompts = ragged_prompts([3, 7, 5])
    rollout = rollout_of(model)
    runner = capture_steps(rollout)
    variants = [
        dict(options, seed=1),
        dict(options, seed=2),
        dict(options, seed=2, stop_token_ids=[20, 33, 70]),
        dict(options, seed=1),
    ]
    if options["temperature"]:
        variants.append(dict(options, seed=1, temperature=1.7))
    if "repetition_penalty" in options:
        variants.append(dict(options, seed=1, repetition_penalty=2.5))

    batches, eager = [], []
    for variant in variants:
        config = SamplingConfig(max_new_tokens=16, n_samples_per_prompt=2, **variant)
        batches.append(rollout.generate(RolloutRequest(*prompts), config))
        eager.append(rollout_of(model).generate(RolloutRequest(*prompts), config))

    assert runner.captures == 1
    for batch, expected in zip(batches, eager, strict=True):
        assert torch.equal(batch.input_ids, expected.input_ids)
        assert torch.equal(batch.logprobs, expected.logprobs)
        assert batch.finish_reasons == expected.finish_reasons
    assert torch.equal(batches[0].input_ids, batches[3].input_ids)
    if options["temperature"]:
        assert not torch.equal(batches[0].input_ids, batches[1].input_ids)
        assert not torch.equal(batches[0].input_ids, batches[4].input_ids)


def test_bounded_number_of_graphs_and_right_answers_after_eviction(accelerator):
    model = tiny_model()
    rollout = rollout_of(model)
    runner = capture_steps(rollout, max_graphs=2)
    four, two, one = ragged_prompts([3, 7, 5, 9]), ragged_prompts([6, 2]), ragged_prompts([4])
    greedy(rollout, four, 100)  # the arena is at its largest: what follows changes lanes, not addresses
    captures = []
    for prompts, length in ((one, 16), (four, 16), (one, 100), (two, 16), (one, 16), (four, 16), (one, 16)):
        batch = greedy(rollout, prompts, length)
        assert torch.equal(batch.input_ids, greedy(rollout_of(model), prompts, length).input_ids)
        assert len(runner) <= 2
        captures.append(runner.captures)
    assert captures == [2, 2, 2, 3, 3, 4, 4]  # two drops four, which drops two; a length is no other graph


# --------------------------------------------------------------------------------------------------- weights move on


def places_of(rollout) -> list:
    """Where all weights lie."""
    return [place for module in rollout._seen.modules for place in module.places]


@pytest.mark.parametrize("family", CAPTURED)
def test_graph_reads_the_weights_of_now_and_is_captured_once(accelerator, family):
    """NVIDIA-NeMo/RL#2895, and DeepSpeed 0.19.8's new graph after every optimizer step."""
    model = tiny_model(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    prompts = ragged_prompts([3, 7, 5])
    rollout = rollout_of(model)
    runner = capture_steps(rollout)
    outputs, addresses = [], []
    for _ in range(5):
        batch = greedy(rollout, prompts, 16)
        assert torch.equal(batch.input_ids, greedy(rollout_of(model), prompts, 16).input_ids)
        outputs.append(batch.input_ids)
        addresses.append([buffer.data_ptr() for buffer in rollout._arena.cache.buffers()] + places_of(rollout))
        train_step(model, optimizer)
        rollout.sync_segki_weights()
    assert runner.captures == 1
    assert all(now == addresses[0] for now in addresses)
    assert all(not torch.equal(before, after) for before, after in zip(outputs, outputs[1:], strict=False))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_engine_steps_reach_the_graph(accelerator, make_engine, stage):
    """NVIDIA-NeMo/RL#2895 with the engine's own optimizer: prefill, graph and oracle agree after every step."""
    model = tiny_model()
    engine = make_engine(model, learning_rate=1e-2, stage=stage)
    prompts = ragged_prompts([3, 7, 5])
    rollout = HybridEngineRollout(engine, Tokenizer())
    runner = capture_steps(rollout)
    outputs = []
    for _ in range(5):
        batch = greedy(rollout, prompts, 12)
        outputs.append(batch.input_ids)
        model.eval()
        assert_same_answers(batch, [solo(model, prompt(prompts, row), 12) for row in range(3)], atol=1e-4)
        model.train()
        train_step(model, engine=engine)
        rollout.sync_weights(engine.global_steps)
    assert runner.captures == 1
    assert all(not torch.equal(before, after) for before, after in zip(outputs, outputs[1:], strict=False))


@pytest.mark.parametrize("how", ["data", "parameter", "one projection"])
def test_replaced_weights_are_never_read_through_an_old_graph(accelerator, how):
    """The kind behind it: storage that moves, parameters that are exchanged, writes that move no version."""
    model = tiny_model()
    prompts = ragged_prompts([3, 7, 5])
    rollout = rollout_of(model)
    runner = capture_steps(rollout)
    before = greedy(rollout, prompts, 16)

    with torch.no_grad():
        if how == "data":
            for parameter in model.parameters():
                parameter.data = parameter.data * 1.2
        elif how == "parameter":
            mlp = model.model.layers[1].mlp
            mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight * -1.5)
        else:
            model.model.layers[0].linear_attn.in_proj_z.weight.data.mul_(-2)

    after = greedy(rollout, prompts, 16)

    assert not torch.equal(before.input_ids, after.input_ids)
    assert torch.equal(after.input_ids, greedy(rollout_of(model), prompts, 16).input_ids)
    assert runner.captures == (1 if how == "one projection" else 2)


# ------------------------------------------------------------------------------------------------ harmless warm-ups


@pytest.mark.parametrize("family", CAPTURED)
def test_first_decode_of_a_fresh_runner_is_the_second(accelerator, family):
    """fla-org/flash-linear-attention ca89d201, #860: what warms up a kernel must not run on live state."""
    model = tiny_model(family)
    prompts = ragged_prompts([3, 7, 5, 2])
    eager = greedy(rollout_of(model), prompts, 2)
    for _ in range(2):
        rollout = rollout_of(model)
        capture_steps(rollout)
        first, second = greedy(rollout, prompts, 2), greedy(rollout, prompts, 2)
        assert torch.equal(first.logprobs, second.logprobs) and torch.equal(first.logprobs, eager.logprobs)
        assert torch.equal(first.input_ids, eager.input_ids)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, dict(repetition_penalty=1.5)], ids=str)
def test_parked_steps_change_nothing(family, options):
    """The same reports: any number of steps inside ``parked()`` leave every slot's bits as they were."""
    model = tiny_model(family)
    rollout = rollout_of(model)
    arena = rollout._arena
    steps = []
    begin = arena.begin
    arena.begin = lambda plan: steps.append(begin(plan)) or steps[-1]
    rows = rollout.generate_iter(
        RolloutRequest(*ragged_prompts([3, 7, 5])),
        SamplingConfig(max_new_tokens=9, temperature=0.0, stop_token_ids=list(range(VOCAB // 4)), **options),
    )
    next(rows)
    ended = arena.state.parked.clone()
    tensors = [buffer[:-1] for buffer in arena.cache.buffers()]  # all but scratch
    tensors += [value for _, value in arena.state._items() if value is not None]
    before = [tensor.clone() for tensor in tensors]

    with rollout._generating(), arena.parked():
        assert bool(arena.state.parked.all())
        for _ in range(3):
            steps[0]()

    assert torch.equal(arena.state.parked, ended)
    assert all(torch.equal(old, new) for old, new in zip(before, tensors, strict=True))
    rows.close()


def test_rows_finish_where_they_should_while_replaying(accelerator):
    """Stop flags are set inside the graph."""
    model = tiny_model()
    prompts = ragged_prompts([3, 7, 5, 9])
    rollout = HybridEngineRollout(engine_of(model), Tokenizer(eos=list(range(12, 30))))
    capture_steps(rollout)

    batch = greedy(rollout, prompts, 40, continuous_batch_size=2)

    expected = [solo(model, prompt(prompts, row), 40, set(range(12, 30))) for row in range(4)]
    assert len({len(row) for row in answers(batch)}) > 1
    assert_same_answers(batch, expected)
