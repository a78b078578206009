# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The last rows of a run on fewer lanes: when, where to, and never with another token."""

from types import SimpleNamespace

import pytest
import torch
from harness import LateFlags, answers, assert_same_answers, prompt, rollout_of
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FAMILIES, Tokenizer, ragged_prompts, solo, tiny_model
from recorded_graph import capture_prompts, capture_steps, recording_accelerator

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import loop, tail
from deepspeed_hybrid.generation.scheduler import SlotScheduler
from deepspeed_hybrid.generation.tail import WORTHWHILE_STEPS, TailShrink, tail_lanes

CALM = settings(max_examples=300, deadline=None, derandomize=True, database=None)
LENGTHS, SAMPLES, NEW_TOKENS = [3, 11, 1, 7], 3, 36
STOPS = list(range(30, 46))  # about one token in twenty: a long tail
SEED = 12


@pytest.fixture
def eager_tail(monkeypatch):
    """Moves that pay at once, so that short runs have several."""
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)


@pytest.fixture(scope="module", params=["qwen3_5", "qwen2_5"])
def bench(request):
    model, prompts = tiny_model(request.param), ragged_prompts(LENGTHS)
    wanted = sample(rollout_of(model, shrink_tail=False), prompts)
    lengths = sorted(wanted.response_lengths.tolist())
    assert lengths[6] < 20 and lengths[-1] == NEW_TOKENS, f"no long tail: {lengths}"
    return SimpleNamespace(model=model, prompts=prompts, wanted=wanted)


def options(**changes) -> SamplingConfig:
    usual = dict(
        max_new_tokens=NEW_TOKENS, temperature=1.3, n_samples_per_prompt=SAMPLES, seed=SEED, stop_token_ids=STOPS
    )
    return SamplingConfig(**{**usual, **changes})


def sample(rollout, prompts, **changes):
    return rollout.generate(RolloutRequest(*prompts), options(**changes))


def assert_same(batch, wanted) -> None:
    assert batch.finish_reasons == wanted.finish_reasons
    assert [row.tolist() for row in answers(batch)] == [row.tolist() for row in answers(wanted)]
    torch.testing.assert_close(batch.logprobs, wanted.logprobs, atol=5e-5, rtol=0)


def watch_shrinks(rollout, then=lambda arena: None) -> list[tuple[int, int, int]]:
    """(lanes before, lanes after, rows moved) of every shrink from now on; ``then`` runs behind each."""
    arena, seen = rollout._arena, []
    shrink = arena.shrink

    def noted(lanes, moves, plan):
        before = arena.lanes
        step = shrink(lanes, moves, plan)
        seen.append((before, lanes, len(moves)))
        then(arena)
        return step

    arena.shrink = noted
    return seen


# ----------------------------------------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 100, None])
def test_continuous_is_fixed(bench, eager_tail, slots):
    rollout = rollout_of(bench.model)
    shrinks = watch_shrinks(rollout)
    assert_same(sample(rollout, bench.prompts, continuous_batch_size=slots), bench.wanted)
    assert bool(shrinks) == (slots != 1)
    assert all(2 * after <= before for before, after, _ in shrinks)


@pytest.mark.parametrize(
    "changes",
    [
        dict(top_k=20, top_p=0.9),
        dict(repetition_penalty=1.2, min_p=0.02),
        dict(logprobs_mode="raw"),
        dict(temperature=0.0, repetition_penalty=1.3),
    ],
    ids=str,
)
def test_every_kind_of_sampling(bench, eager_tail, changes):
    wanted = sample(rollout_of(bench.model, shrink_tail=False), bench.prompts, **changes)
    rollout = rollout_of(bench.model)
    shrinks = watch_shrinks(rollout)
    assert_same(sample(rollout, bench.prompts, **changes), wanted)
    assert_same(sample(rollout, bench.prompts, continuous_batch_size=7, **changes), wanted)
    assert shrinks


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slots", [3, None])
def test_every_model_is_hugging_face_alone(family, slots, eager_tail):
    """Greedy, against each prompt by itself; stops that end rows at different steps."""
    model, prompts = tiny_model(family), ragged_prompts([3, 11, 1, 7, 5])
    free = [solo(model, prompt(prompts, row), 24).tokens.tolist() for row in range(5)]
    stops = {free[row][at] for row, at in ((0, 4), (1, 9), (2, 2), (3, 14))}
    oracle = [solo(model, prompt(prompts, row), 24, stops) for row in range(5)]
    rollout = rollout_of(model)
    shrinks = watch_shrinks(rollout)
    batch = sample(
        rollout,
        prompts,
        max_new_tokens=24,
        temperature=0.0,
        n_samples_per_prompt=1,
        stop_token_ids=sorted(stops),
        continuous_batch_size=slots,
    )
    assert_same_answers(batch, oracle)
    assert shrinks or len({len(one.tokens) for one in oracle}) == 1


def test_moved_rows_bring_everything(bench, eager_tail):
    """What is behind the lanes that are left may be anything: it is not read, and not written."""

    def poison(arena) -> None:
        behind = slice(arena.lanes, arena.cache.slots)
        for buffer in arena.cache.buffers():
            buffer[behind].fill_(float("nan"))
        for name, value in arena.state._items():
            if name != "stop_ids" and value is not None:
                value[behind].fill_(1 if name == "parked" else 101)

    rollout = rollout_of(bench.model)
    shrinks = watch_shrinks(rollout, poison)
    assert_same(sample(rollout, bench.prompts, repetition_penalty=1.0), bench.wanted)
    assert sum(moved for *_, moved in shrinks) > 0
    arena = rollout._arena
    assert all(bool(buffer[arena.lanes : arena.cache.slots].isnan().all()) for buffer in arena.cache.buffers())
    assert_same(sample(rollout, bench.prompts, continuous_batch_size=12), bench.wanted)


@pytest.mark.parametrize("poll_every", [1, 3, 8])
@pytest.mark.parametrize("slots", [2, 7, None])
def test_looking_late(bench, eager_tail, monkeypatch, poll_every, slots):
    monkeypatch.setattr(loop, "StopFlags", LateFlags)
    rollout = rollout_of(bench.model, poll_every=poll_every)
    shrinks = watch_shrinks(rollout)
    assert_same(sample(rollout, bench.prompts, continuous_batch_size=slots), bench.wanted)
    assert shrinks or poll_every > 1


@pytest.mark.parametrize("slots", [7, None])
def test_captured_steps(bench, eager_tail, slots):
    """Each size of lanes is captured once, and replayed in the next calls."""
    with recording_accelerator():
        rollout = rollout_of(bench.model)
        graphs = capture_steps(rollout, max_graphs=8)
        capture_prompts(rollout)
        shrinks = watch_shrinks(rollout)
        for _ in range(3):
            assert_same(sample(rollout, bench.prompts, continuous_batch_size=slots), bench.wanted)
    assert shrinks and shrinks == shrinks[: len(shrinks) // 3] * 3
    assert graphs.captures == len({shrinks[0][0], *(after for _, after, _ in shrinks)})


@pytest.mark.parametrize("slots", [3, None])
def test_rows_of_an_iterator(bench, eager_tail, slots):
    rollout = rollout_of(bench.model)
    shrinks = watch_shrinks(rollout)
    rows = rollout.generate_iter(RolloutRequest(*bench.prompts), options(continuous_batch_size=slots))
    got = {row.index: row.tokens.tolist() for row in rows}
    assert shrinks
    assert [got[index] for index in range(len(got))] == [row.tolist() for row in answers(bench.wanted)]


def test_closed_or_overtaken_behind_a_shrink(bench, eager_tail):
    rollout = rollout_of(bench.model)
    shrinks = watch_shrinks(rollout)
    rows = rollout.generate_iter(RolloutRequest(*bench.prompts), options())
    while not shrinks:
        next(rows)
    rows.close()
    assert_same(sample(rollout, bench.prompts), bench.wanted)
    count = len(shrinks)
    rows = rollout.generate_iter(RolloutRequest(*bench.prompts), options())
    while len(shrinks) == count:
        next(rows)
    assert_same(sample(rollout, bench.prompts, continuous_batch_size=2), bench.wanted)
    with pytest.raises(RuntimeError, match="overtaken"):
        list(rows)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["copying slots", "copying state", "first step"])
def test_an_error_in_a_shrink_leaves_no_trace(bench, eager_tail, error, when):
    rollout = rollout_of(bench.model)
    sample(rollout, bench.prompts)
    arena = rollout._arena

    def fail(*args):
        raise error("cut")

    with pytest.MonkeyPatch.context() as patch:
        if when == "copying slots":
            fork = arena.cache.fork
            patch.setattr(arena.cache, "fork", lambda *args: fail() if arena.state.length.any() else fork(*args))
        elif when == "copying state":
            patch.setattr(arena.state, "move", fail)
        else:
            patch.setattr(arena, "shrink", lambda *args: fail)
        with pytest.raises(error, match="cut"):
            sample(rollout, bench.prompts)
    assert [name for name, module in bench.model.named_modules() if "forward" in module.__dict__] == []
    assert arena.cache is None
    assert_same(sample(rollout, bench.prompts), bench.wanted)


# ------------------------------------------------------------------------------------------------------------ figures


def test_figures(bench, eager_tail):
    lengths = bench.wanted.response_lengths
    useful = int((lengths - 1).sum())
    stats = {}
    for shrink in (False, True):
        rollout = rollout_of(bench.model, shrink_tail=shrink, enable_profiling=True)
        shrinks = watch_shrinks(rollout)
        assert_same(sample(rollout, bench.prompts, continuous_batch_size=7), bench.wanted)
        stats[shrink] = rollout.get_last_continuous_stats()
        assert stats[shrink]["shrinks"] == len(shrinks) == rollout.get_last_profile()["num_tail_shrinks"]
        assert stats[shrink]["wasted_lane_steps"] == stats[shrink]["lane_steps"] - useful
        assert stats[shrink]["occupancy"] == useful / stats[shrink]["lane_steps"]
    assert stats[False]["shrinks"] == 0 < stats[True]["shrinks"]
    assert stats[False]["decode_steps"] == stats[True]["decode_steps"]
    assert stats[True]["wasted_lane_steps"] < stats[False]["wasted_lane_steps"]


def test_rows_that_end_together_do_not_move(bench):
    rollout = rollout_of(bench.model)
    shrinks = watch_shrinks(rollout)
    sample(rollout, bench.prompts, stop_token_ids=None)
    assert shrinks == []


def test_short_runs_do_not_move(bench):
    """By the rule as it is; the runs of the other tests are short, and move at once."""
    rollout = rollout_of(bench.model)
    shrinks = watch_shrinks(rollout)
    sample(rollout, bench.prompts, max_new_tokens=WORTHWHILE_STEPS)
    assert shrinks == []


# ----------------------------------------------------------------------------------------------------------- the rule


def test_lanes_for_the_last_rows():
    assert [tail_lanes(rows) for rows in (1, 2, 4, 5, 16, 17, 32, 33, 65, 128, 129)] == [
        *(1, 4, 4, 16, 16, 32, 32, 64, 128, 128, 256)
    ]


@CALM
@given(lanes=st.integers(1, 512), data=st.data())
def test_the_rule(lanes, data):
    """Lanes at least halve, hold the rows, and are left alone for a while; whatever the rows do."""
    shrink, rows, done, left = TailShrink(True), lanes, 0, data.draw(st.integers(0, 400))
    moved_at, sizes = [], [lanes]
    while left > 0 and rows > 0:
        fewer = shrink.lanes(rows, sizes[-1], done, left)
        if fewer is not None:
            assert rows <= fewer <= sizes[-1] // 2 and left >= WORTHWHILE_STEPS
            assert not moved_at or done - moved_at[-1] >= WORTHWHILE_STEPS
            moved_at.append(done)
            sizes.append(fewer)
        burst = min(left, data.draw(st.integers(1, 64)))
        done, left, rows = done + burst, left - burst, rows - data.draw(st.integers(0, rows))
    assert len(set(sizes)) == len(sizes) <= 10
    assert TailShrink(False).lanes(1, 512, 0, 10**6) is None


@CALM
@given(rows=st.integers(1, 30), slots=st.integers(1, 12), data=st.data())
def test_compacting(rows, slots, data):
    """Nobody is lost, nobody moves who need not, and places are taken once."""
    scheduler = SlotScheduler(rows, slots)
    while scheduler.waiting:
        scheduler.admit()
        seated = [slot for slot, row in enumerate(scheduler.occupants) if row is not None]
        for slot in data.draw(st.lists(st.sampled_from(seated), min_size=1, unique=True)):
            scheduler.retire(slot)
    before = list(scheduler.occupants)
    fewer = data.draw(st.integers(scheduler.running, slots + 2))

    moves = scheduler.compact(fewer)

    sources, targets = [source for source, _ in moves], [target for _, target in moves]
    assert len(set(sources)) == len(sources) and len(set(targets)) == len(targets)
    assert all(source >= fewer and before[source] is not None for source in sources)
    assert all(target < fewer and before[target] is None for target in targets)
    expected = [*before]
    for source, target in moves:
        expected[target] = before[source]
    assert scheduler.occupants == expected[:fewer]
    assert sorted(row for row in before if row is not None) == sorted(
        row for row in scheduler.occupants if row is not None
    )


def test_compacting_too_far_is_an_error():
    scheduler = SlotScheduler(3, 3)
    scheduler.admit()
    with pytest.raises(ValueError, match="2 slots"):
        scheduler.compact(2)
    assert scheduler.occupants == [0, 1, 2]
    waiting = SlotScheduler(3, 2)
    with pytest.raises(ValueError, match="waiting"):
        waiting.compact(1)


def test_the_switch_is_checked():
    with pytest.raises(ValueError, match="shrink_tail.*True or False.*'yes'"):
        rollout_of(tiny_model("qwen2_5"), Tokenizer(), shrink_tail="yes")
