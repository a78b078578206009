# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The graph runner with an accelerator that only takes notes, and the keys that the arena gives it."""

import gc
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from models import Tokenizer, tiny_model

from deepspeed_hybrid import SamplingConfig
from deepspeed_hybrid.compat import ModelCall
from deepspeed_hybrid.generation import graph
from deepspeed_hybrid.generation.arena import Arena, length_bucket, slot_bucket
from deepspeed_hybrid.generation.graph import WARMUPS, GraphRunner
from deepspeed_hybrid.generation.requests import check_sampling
from deepspeed_hybrid.ops.decode_step import decode_step_reference
from deepspeed_hybrid.ops.truncate_scores import truncate_scores_reference


class Notes:
    """An accelerator that writes down what is asked of it; ``where`` says what surrounds the present moment."""

    def __init__(self):
        self.log: list[tuple] = []
        self.where: list[str] = []
        self.pools = 0

    @contextmanager
    def inside(self, what: str):
        self.where.append(what)
        try:
            yield
        finally:
            assert self.where.pop() == what

    def new_pool(self) -> str:
        self.pools += 1
        return f"pool {self.pools}"

    def Stream(self):
        return SimpleNamespace(wait_stream=lambda other: self.log.append(("side waits",)))

    def current_stream(self):
        return SimpleNamespace(wait_stream=lambda other: self.log.append(("main waits",)))

    def stream(self, stream):
        return self.inside("side stream")

    def create_graph(self):
        return SimpleNamespace(name=f"graph {sum(entry[0] == 'capture' for entry in self.log)}")

    @contextmanager
    def capture_to_graph(self, captured, pool):
        self.log.append(("capture", captured.name, pool))
        with self.inside("capture"):
            yield

    def replay_graph(self, captured) -> None:
        self.log.append(("replay", captured.name))

    def step(self, name: str = "step"):
        return lambda: self.log.append((name, *self.where))

    def harmless(self):
        return self.inside("harmless")


@pytest.fixture
def notes(monkeypatch):
    accelerator = Notes()
    monkeypatch.setattr(graph, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", accelerator.new_pool)
    return accelerator


def test_warm_ups_are_harmless_and_the_capture_is_bare(notes):
    replay = GraphRunner(4).prepare("key", notes.step(), notes.harmless)
    assert notes.log == [
        ("side waits",),
        *[("step", "side stream", "harmless")] * WARMUPS,
        ("main waits",),
        ("capture", "graph 0", "pool 1"),
        ("step", "capture"),
    ]
    assert WARMUPS >= 1 and notes.where == []
    notes.log.clear()
    replay(), replay()
    assert notes.log == [("replay", "graph 0")] * 2


def test_warm_ups_share_a_stream(notes, monkeypatch):
    """Also behind a release: libraries keep a workspace for every stream that they have seen."""
    made, stream = [], notes.Stream
    monkeypatch.setattr(notes, "Stream", lambda: made.append(1) or stream())
    runner = GraphRunner(4)
    for key in "abc":
        runner.prepare(key, notes.step(), notes.harmless)
        runner.release()
    assert runner.captures == 3 and len(made) == 1


def test_a_key_is_captured_once_and_all_share_a_pool(notes):
    runner = GraphRunner(4)
    for key in "abab":
        runner.prepare(key, notes.step(key), notes.harmless)()
    assert [entry for entry in notes.log if entry[0] in ("capture", "replay")] == [
        ("capture", "graph 0", "pool 1"),
        ("replay", "graph 0"),
        ("capture", "graph 1", "pool 1"),
        ("replay", "graph 1"),
        ("replay", "graph 0"),
        ("replay", "graph 1"),
    ]
    assert (runner.captures, len(runner)) == (2, 2)


def test_the_least_recently_used_goes(notes):
    runner = GraphRunner(2)
    for key in "abac":  # b is the oldest when c comes
        runner.prepare(key, notes.step(), notes.harmless)
    assert (runner.captures, len(runner)) == (3, 2)
    for key, captures in (("a", 3), ("c", 3), ("b", 4), ("c", 4), ("a", 5)):
        runner.prepare(key, notes.step(), notes.harmless)
        assert (key, runner.captures, len(runner)) == (key, captures, 2)


@pytest.mark.parametrize("most", [1, 3])
def test_a_replay_outlives_the_dropping_of_its_graph(notes, most):
    """A call under way keeps its graph."""
    runner = GraphRunner(most)
    replay = runner.prepare("a", notes.step(), notes.harmless)
    for key in range(5):
        runner.prepare(key, notes.step(), notes.harmless)
    assert len(runner) == most
    replay()
    assert notes.log[-1] == ("replay", "graph 0")


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_no_garbage_is_collected_in_a_capture(notes, collects, fails):
    """What a collection frees may be another graph, which a capture under way does not survive."""
    seen = []

    def step():
        seen.append((gc.isenabled(), bool(notes.where) and notes.where[-1] == "capture"))
        if fails and seen[-1][1]:
            raise RuntimeError("in the capture")

    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="in the capture") if fails else nullcontext():
            GraphRunner(4).prepare("key", step, notes.harmless)
        assert seen == [(collects, False)] * WARMUPS + [(False, True)]
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()


def test_released_graphs_are_captured_anew_in_a_new_pool(notes):
    runner = GraphRunner(4)
    runner.prepare("a", notes.step(), notes.harmless)
    runner.release()
    assert len(runner) == 0
    runner.prepare("a", notes.step(), notes.harmless)
    assert [entry for entry in notes.log if entry[0] == "capture"] == [
        ("capture", "graph 0", "pool 1"),
        ("capture", "graph 1", "pool 2"),
    ]
    assert runner.captures == 2


@pytest.mark.parametrize("failing", ["side stream", "capture"])
def test_a_step_that_fails_is_not_kept(notes, failing):
    def step() -> None:
        if notes.where[0] == failing:
            raise RuntimeError("no")

    runner = GraphRunner(4)
    with pytest.raises(RuntimeError, match="no"):
        runner.prepare("a", step, notes.harmless)
    assert (len(runner), runner.captures, notes.where) == (0, 0, [])
    # What the side stream was at is over before anything on the main one can take its buffers.
    assert [entry for entry in notes.log if "waits" in entry[0]] == [("side waits",), ("main waits",)]
    runner.prepare("a", notes.step(), notes.harmless)
    assert len(runner) == 1


# ------------------------------------------------------------------------------------------------------------- arena


class KeyCollector:
    """Stands where the runner stands; keeps the keys."""

    def __init__(self):
        self.keys = []

    def prepare(self, key, step, harmless):
        self.keys.append(key)
        return step

    def release(self) -> None:
        pass


def arena_of(masked) -> Arena:
    model = ModelCall(tiny_model("qwen2_5"))
    ops = decode_step_reference, truncate_scores_reference
    return Arena(model, torch.device("cpu"), torch.float32, KeyCollector(), *ops, masked)


@pytest.fixture(params=[True, False], ids=["masked", "by position"])
def arena(request):
    return arena_of(lambda: request.param)


def key_of(arena: Arena, rows: int = 2, tokens: int = 20, **options):
    vocab_size = arena.model.vocab_size
    plan = check_sampling(SamplingConfig(**{"max_new_tokens": 5, "seed": 1, **options}), vocab_size, None, Tokenizer())
    arena.reserve(rows, tokens)
    arena.begin(plan)
    return arena.graphs.keys[-1]


SAME_STEP = [
    dict(seed=9),
    dict(max_new_tokens=9),
    dict(temperature=0.3),
    dict(n_samples_per_prompt=2),
    dict(stop_token_ids=[4]),
    dict(tokens=64),
]
OTHER_STEP = [
    dict(rows=3),
    dict(tokens=65),  # the cache grows
    dict(temperature=0.0),
    dict(top_k=3),
    dict(repetition_penalty=1.2),
    dict(logprobs_mode="raw"),
    dict(stop_token_ids=list(range(9))),
]


@pytest.mark.parametrize("options", SAME_STEP, ids=str)
def test_numbers_do_not_make_another_graph(arena, options):
    assert key_of(arena, **options) == key_of(arena)


@pytest.mark.parametrize("options", OTHER_STEP, ids=str)
def test_other_kernels_or_buffers_make_another_graph(arena, options):
    assert key_of(arena) != key_of(arena, **options)


def test_a_length_is_another_graph_under_a_mask_alone():
    """A mask has the width that attention reads; without one, rows of any length go through one graph."""
    for masked, graphs in ((True, 4), (False, 1)):
        arena = arena_of(lambda masked=masked: masked)
        key_of(arena, tokens=200)  # the cache is at its largest
        assert len({key_of(arena, tokens=tokens) for tokens in (20, 64, 65, 129, 200)}) == graphs
        assert arena.kv_length == 256


def test_a_layer_that_comes_to_want_a_mask_is_another_graph():
    """Between two calls a hook may take a layer out of its chain."""
    answers = [False, False, True, True]
    arena = arena_of(lambda: answers.pop(0))
    assert key_of(arena, tokens=64) != key_of(arena, tokens=64)
    assert answers == []


def test_more_truncation_is_the_same_graph(arena):
    assert key_of(arena, top_k=3) == key_of(arena, top_p=0.5) == key_of(arena, min_p=0.1, top_k=9)


def test_a_grown_stop_id_buffer_is_told_from_the_old_one_at_its_address(arena, monkeypatch):
    """An allocator may hand out the address of a freed buffer again; the graph still reads the old number of ids."""
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 4096)
    keys = [key_of(arena, stop_token_ids=list(range(count))) for count in (1, 9, 17)]
    assert len(set(keys)) == 3


def test_one_token_needs_no_graph(arena):
    arena.reserve(2, 20)
    arena.begin(check_sampling(SamplingConfig(max_new_tokens=1), arena.model.vocab_size, None, Tokenizer()))
    assert arena.graphs.keys == []


def test_buckets():
    assert [slot_bucket(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 100)] == [1, 2, 4, 4, 8, 8, 16, 16, 24, 104]
    assert [length_bucket(tokens) for tokens in (1, 63, 64, 65, 1000)] == [64, 64, 64, 128, 1024]


def test_an_arena_grows_and_does_not_shrink(arena):
    arena.reserve(3, 100)
    first = arena.cache
    assert (arena.lanes, arena.kv_length, first.slots, first.capacity) == (4, 128, 4, 128)
    arena.reserve(1, 10)
    assert arena.cache is first and (arena.lanes, arena.kv_length) == (1, 64 if arena.masked() else 128)
    arena.reserve(9, 10)
    assert (arena.cache.slots, arena.cache.capacity) == (16, 128) and arena.state.token.numel() == 16
    arena.release()
    assert arena.cache is None and set(arena.bytes_by_kind().values()) == {0}


def test_parked_is_undone_even_by_an_error(arena):
    arena.reserve(2, 10)
    arena.state.parked.copy_(torch.tensor([False, True]))
    with pytest.raises(KeyError), arena.parked():
        assert arena.state.parked.all()
        raise KeyError
    assert arena.state.parked.tolist() == [False, True]
    with arena.parked():
        pass
    assert arena.state.parked.tolist() == [False, True]


def test_unrelated_calls_do_not_multiply():
    """Many short rows, then a few long ones: room for each, and not for many long ones."""
    arena = arena_of(lambda: False)
    sizes = []
    for rows, tokens in ((512, 64), (4, 4096), (4, 2000), (8, 4096), (512, 64)):
        arena.reserve(rows, tokens)
        sizes.append((arena.cache.slots, arena.cache.capacity))
    assert sizes == [(512, 64), (4, 4096), (4, 4096), (8, 4096), (512, 64)]


def test_calls_that_have_much_in_common_share_their_room():
    arena = arena_of(lambda: False)
    arena.reserve(8, 128)
    arena.reserve(16, 64)
    assert (arena.cache.slots, arena.cache.capacity) == (16, 128)
    cache = arena.cache
    arena.reserve(8, 128)
    assert arena.cache is cache


def test_other_threads_may_use_the_device_during_a_capture(notes, monkeypatch):
    class Capture:
        capture_error_mode = "global"

    context = Capture()
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(notes, "capture_to_graph", lambda graph, pool: context)
    assert graph.capturing("graph", "pool") is context and context.capture_error_mode == "thread_local"
