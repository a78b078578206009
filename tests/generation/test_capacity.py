# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Memory is planned before it is taken: estimates are what buffers turn out to be, and too much is refused by name."""

import re
from types import SimpleNamespace

import pytest
import torch
from harness import answers, assert_same_answers, greedy, prompt, rollout_of
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FAMILIES, VOCAB, ragged_prompts, solo, tiny_model

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import capacity, loop
from deepspeed_hybrid.generation.arena import slot_bucket
from deepspeed_hybrid.generation.capacity import (
    SlotBytes,
    cache_bytes,
    free_bytes,
    logits_bytes,
    readable,
    state_bytes,
)
from deepspeed_hybrid.generation.prefill import prefill
from deepspeed_hybrid.generation.sampling import SamplingKind
from deepspeed_hybrid.job import AUTO_SHARE, most_slots

LENGTHS, SAMPLES, NEW_TOKENS = [3, 11, 1, 7], 3, 9


@pytest.fixture(scope="module")
def bench():
    model, prompts = tiny_model(), ragged_prompts(LENGTHS)
    oracle = [solo(model, prompt(prompts, row), NEW_TOKENS) for row in range(len(LENGTHS))]
    return SimpleNamespace(model=model, prompts=prompts, oracle=oracle)


def limited(model, free: int):
    """A rollout on a device with so many bytes free."""
    rollout = rollout_of(model)
    rollout._arena.device_free = lambda: free
    return rollout


def ask(rollout, bench, slots, samples: int = SAMPLES, **options):
    return greedy(
        rollout, bench.prompts, NEW_TOKENS, n_samples_per_prompt=samples, continuous_batch_size=slots, **options
    )


def needed(bench, slots: int, keeps: bool = True) -> int:
    """Bytes of a call with so many slots, with those of a prompt that some samples wait for."""
    arena = rollout_of(bench.model)._arena
    rows = len(LENGTHS) * SAMPLES
    tokens = max(LENGTHS) + NEW_TOKENS
    kept = arena.slot_bytes(tokens) if keeps and slots < rows else 0
    return arena.needed(slots, tokens) + rows * NEW_TOKENS * capacity.ANSWER_BYTES + kept


# ---------------------------------------------------------------------------------------------------------- estimates


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_estimates_are_what_buffers_take(family, state_dtype):
    rollout = rollout_of(tiny_model(family), state_dtype=state_dtype)
    for rows, tokens, options in ((3, 8, {}), (9, 70, dict(repetition_penalty=1.2))):
        prompts = ragged_prompts([5] * rows)
        greedy(rollout, prompts, tokens, **options)
        cache = rollout._arena.cache
        report = rollout._arena.bytes_by_kind()
        state = report.pop("decode_state")
        slot = SlotBytes.of(rollout._module, state_dtype)
        assert cache_bytes(slot, cache.slots, cache.capacity) == sum(report.values())
        kind = SamplingKind(penalised=bool(options))
        assert state_bytes(cache.slots, cache.capacity, VOCAB, kind) == state


def test_half_precision_halves_keys_and_windows():
    model = tiny_model().bfloat16()
    rollout = rollout_of(model)
    greedy(rollout, ragged_prompts([3, 4]), 3)
    report, cache = rollout._arena.bytes_by_kind(), rollout._arena.cache
    del report["decode_state"]
    assert cache_bytes(SlotBytes.of(model, torch.float32), cache.slots, cache.capacity) == sum(report.values())


def test_logits_are_counted_with_what_becomes_of_them():
    plain, penalised = logits_bytes(4, 100, 2, SamplingKind()), logits_bytes(4, 100, 2, SamplingKind(penalised=True))
    assert (plain, penalised) == (800, 2400)
    assert logits_bytes(4, 100, 2, SamplingKind(truncated=True)) > penalised
    assert logits_bytes(4, 100, 2, SamplingKind(truncated=True), sorts=False) == 4 * 100 * (2 + 4 + 4)


def test_sizes_are_readable():
    assert [readable(size) for size in (12, 1200, 3_400_000, 12_345_000_000)] == [
        "12 bytes",
        "1.2 KB",
        "3.4 MB",
        "12.3 GB",
    ]


# --------------------------------------------------------------------------------------------------------- free memory


def test_a_cpu_has_no_limit(bench, monkeypatch):
    monkeypatch.setattr(capacity, "get_accelerator", lambda: pytest.fail("a CPU was asked for its free memory"))
    assert free_bytes(torch.device("cpu")) is None
    assert_same_answers(ask(rollout_of(bench.model), bench, None), bench.oracle, SAMPLES)


def test_what_torch_keeps_unused_is_free(monkeypatch):
    accelerator = SimpleNamespace(
        available_memory=lambda index: 100 + index,
        memory_reserved=lambda index: 70,
        memory_allocated=lambda index: 30,
    )
    monkeypatch.setattr(capacity, "get_accelerator", lambda: accelerator)
    assert free_bytes(torch.device("cuda", 2)) == 142


# ------------------------------------------------------------------------------------------------------------ refusals


def assert_untouched(rollout) -> None:
    assert rollout._arena.cache is None and rollout._arena.state is None
    assert [name for name, module in rollout._module.named_modules() if "forward" in module.__dict__] == []


@pytest.mark.parametrize("slots", [None, 12, 9])
def test_too_much_is_refused_before_anything_is_made(bench, slots, monkeypatch):
    free = int(needed(bench, 4) / AUTO_SHARE) + 1
    rollout = limited(bench.model, free)
    zeros = torch.zeros

    def only_on_meta(*args, **options):
        assert torch.device(options["device"]).type == "meta", "something was allocated"
        return zeros(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", only_on_meta)
        for call in (rollout.generate, rollout.generate_iter):
            sampling = SamplingConfig(NEW_TOKENS, n_samples_per_prompt=SAMPLES, continuous_batch_size=slots)
            with pytest.raises(ValueError) as caught:
                call(RolloutRequest(*bench.prompts), sampling)
    text = str(caught.value)
    assert ("n_samples_per_prompt=3" in text) if slots is None else f"continuous_batch_size={slots}" in text
    assert readable(needed(bench, slots or 12, keeps=False)) in text and readable(free) in text
    assert "continuous_batch_size of 4 would fit" in text
    assert_untouched(rollout)
    fitting = int(re.search(r"of (\d+) would fit", text)[1])
    assert_same_answers(ask(rollout, bench, fitting), bench.oracle, SAMPLES)


@pytest.mark.parametrize("slots", [None, 1, 7, "auto"])
def test_where_not_even_one_row_fits(bench, slots):
    rollout = limited(bench.model, needed(bench, 1, keeps=False) - 1)
    with pytest.raises(ValueError, match="not even one would fit"):
        ask(rollout, bench, slots)
    assert_untouched(rollout)


@pytest.mark.parametrize("slots", [1, "auto", 5])
def test_what_fits_without_a_kept_prompt_runs_without_one(bench, slots, monkeypatch):
    prompts = []
    monkeypatch.setattr(loop, "prefill", lambda *args, **options: prompts.extend(args[3]) or prefill(*args, **options))
    rollout = limited(bench.model, needed(bench, 1 if slots == "auto" else slots, keeps=False))
    assert_same_answers(ask(rollout, bench, slots), bench.oracle, SAMPLES)
    assert len(prompts) > len(LENGTHS), "every prompt was run once alone, so one was kept"


def test_what_is_asked_for_as_capacity_is_what_has_to_fit(bench):
    rollout = limited(bench.model, needed(bench, 12))
    roomy = rollout_of(bench.model, continuous_cache_capacity=640)
    roomy._arena.device_free = rollout._arena.device_free
    with pytest.raises(ValueError, match="for slots of 640 tokens"):
        ask(roomy, bench, None)
    assert_untouched(roomy)
    assert_same_answers(ask(roomy, bench, "auto"), bench.oracle, SAMPLES)
    assert roomy._arena.cache.capacity == 640 and roomy.get_last_continuous_stats()["slots"] < 12


def test_exactly_enough_is_enough(bench):
    rollout = limited(bench.model, needed(bench, 12))
    assert_same_answers(ask(rollout, bench, None), bench.oracle, SAMPLES)


def test_what_is_there_needs_no_room(bench):
    rollout = limited(bench.model, needed(bench, 12))
    ask(rollout, bench, None)
    rollout._arena.device_free = lambda: 0
    assert_same_answers(ask(rollout, bench, None), bench.oracle, SAMPLES)
    assert_same_answers(ask(rollout, bench, "auto"), bench.oracle, SAMPLES)
    with pytest.raises(ValueError, match="free on cpu"):
        ask(rollout, bench, None, samples=9)
    assert_same_answers(ask(rollout, bench, 2, samples=9), bench.oracle, 9)


def test_room_for_two_calls_gives_way_to_room_for_one(bench):
    """Growing would keep the slots of the first call and the length of the second."""
    rollout = limited(bench.model, 10**12)
    greedy(rollout, ragged_prompts([3] * 8), 60)
    arena = rollout._arena
    both, alone = arena._bytes(8, 128, SamplingKind()), arena.needed(4, 100)
    assert alone < both
    arena.device_free = lambda: both - 1 - sum(arena.bytes_by_kind().values())
    greedy(rollout, ragged_prompts([3] * 4), 90)
    assert (arena.cache.slots, arena.cache.capacity) == (4, 128)


# ---------------------------------------------------------------------------------------------------------------- auto


@pytest.mark.parametrize("slots, lanes", [(12, 16), (8, 8), (7, 4), (2, 2), (1, 1)])
def test_auto_takes_what_fits(bench, slots, lanes):
    """Room for so many slots; a step runs lanes, so that fewer may be had than there would be room for."""
    free = needed(bench, lanes) if lanes > 1 else needed(bench, 1)
    rollout = limited(bench.model, int(free / AUTO_SHARE) + 1)
    assert_same_answers(ask(rollout, bench, "auto"), bench.oracle, SAMPLES)
    stats = rollout.get_last_continuous_stats()
    assert stats["slots"] == min(12, lanes)
    assert rollout._arena.cache.slots == slot_bucket(stats["slots"])


def test_auto_without_a_limit_is_all_rows(bench):
    rollout = rollout_of(bench.model, enable_profiling=True)
    assert_same_answers(ask(rollout, bench, "auto"), bench.oracle, SAMPLES)
    assert rollout.get_last_profile()["continuous_batch_size"] == 12
    assert rollout.get_last_continuous_stats()["refills"] == 0


def test_auto_takes_one_row_with_nothing_to_spare(bench):
    rollout = limited(bench.model, needed(bench, 1))
    assert [row.tolist() for row in answers(ask(rollout, bench, "auto"))]
    assert rollout.get_last_continuous_stats()["slots"] == 1


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(most=st.integers(0, 200), limit=st.integers(0, 210))
def test_most_slots_that_fit(most, limit):
    assert most_slots(most, lambda count: count <= limit) == min(most, limit)


@pytest.mark.parametrize("slots", [None, "auto", 2**40])
def test_an_absurd_number_of_rows_is_looked_at_a_few_times_alone(bench, slots):
    """Counting them down one by one would take days."""
    rollout = limited(bench.model, 10**8)
    arena, asked = rollout._arena, []
    counted = arena.needed
    arena.needed = lambda *call: asked.append(call) or counted(*call)
    with pytest.raises(ValueError, match="free on cpu; (not even one|a continuous_batch_size of 1 would fit)"):
        ask(rollout, bench, slots, samples=2**30)
    assert len(asked) < 500
    assert_untouched(rollout)


# ---------------------------------------------------------------------------------------- other kinds on kept buffers


KINDS = [dict(repetition_penalty=1.2), dict(temperature=0.9, top_p=0.9), dict(temperature=0.9, repetition_penalty=1.2)]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_what_another_kind_wants_is_counted_beside_kept_buffers(bench, options):
    """The tokens seen, and scores beside logits."""
    rollout = limited(bench.model, 10**12)
    ask(rollout, bench, None)
    arena, rows = rollout._arena, len(LENGTHS) * SAMPLES
    kind = SamplingKind(
        sampled="temperature" in options, truncated="top_p" in options, penalised="repetition_penalty" in options
    )
    present = sum(arena.bytes_by_kind().values())
    assert arena.needed(rows, max(LENGTHS) + NEW_TOKENS) == 0
    missing = arena.needed(rows, max(LENGTHS) + NEW_TOKENS, kind) - present
    seen = arena.cache.slots * VOCAB if kind.penalised else 0
    assert missing == seen + logits_bytes(16, VOCAB, 4, kind) - logits_bytes(16, VOCAB, 4, SamplingKind())

    others = rows * NEW_TOKENS * capacity.ANSWER_BYTES
    for short, refused in ((1, True), (0, False)):
        arena.device_free = lambda short=short: missing + others - short
        config = SamplingConfig(
            **{"max_new_tokens": NEW_TOKENS, "seed": 1, "n_samples_per_prompt": SAMPLES, **options}
        )
        call = lambda config=config: rollout.generate(RolloutRequest(*bench.prompts), config)  # noqa: E731
        if refused:
            with pytest.raises(ValueError, match="free on cpu"):
                call()
        else:
            assert len(answers(call())) == rows
            assert arena.needed(rows, max(LENGTHS) + NEW_TOKENS, kind) == 0
            assert arena.cache is not None and (arena.state.seen is not None) == kind.penalised


def test_kept_buffers_give_way_where_only_the_call_alone_fits(bench):
    """The tokens seen are kept for every slot there is, and few rows do not need as many slots."""
    rollout = limited(bench.model, 10**12)
    greedy(rollout, ragged_prompts([3] * 30), 60)
    arena, penalised = rollout._arena, SamplingKind(penalised=True)
    slots, present = arena.cache.slots, sum(arena.bytes_by_kind().values())
    alone = arena._bytes(1, 64, penalised)
    assert arena.needed(1, 12, penalised) == alone < present + slots * VOCAB
    arena.device_free = lambda: 600  # answers beside what is there
    wanted = greedy(rollout_of(bench.model), ragged_prompts([3]), 9, repetition_penalty=1.2)
    batch = greedy(rollout, ragged_prompts([3]), 9, repetition_penalty=1.2)
    assert torch.equal(batch.input_ids, wanted.input_ids)
    assert arena.cache.slots == 1 and slots == 32
