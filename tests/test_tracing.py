# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Stages of a call: their times, the trace file, and that looking changes nothing."""

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from harness import greedy, rollout_of
from models import ragged_prompts, tiny_model
from recorded_graph import capture_steps, recording_accelerator
from trace_cases import assert_well_nested, named, read

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import trace
from deepspeed_hybrid.generation.trace import NOTHING, OFF, Tracer

PROMPTS = ragged_prompts([3, 7, 5])
FORWARD_MS, CLOCK_MS = 10, 0.5  # CLOCK_MS: more than all looks at the clock of a call
STAGES = ("weights_ms", "setup_ms", "prefill_forward_ms", "decode_forward_ms", "generation_overhead_ms")


@pytest.fixture
def forward_time(monkeypatch):
    """A clock that only forwards move, so that stages are known by what they hold; and what slows a rollout's."""
    now = 0.0

    def read() -> float:
        nonlocal now
        now += 1e-6
        return now

    def slowed(rollout):
        call = rollout._paths.call
        original = call.logits

        def slow(*arguments):
            nonlocal now
            now += FORWARD_MS / 1000
            return original(*arguments)

        call.logits = slow
        return rollout

    monkeypatch.setattr(time, "perf_counter", read)
    return slowed


@pytest.mark.parametrize("slots", [None, 2])
def test_times_of_stages_add_up_to_the_calls(slots, forward_time):
    rollout = forward_time(rollout_of(tiny_model("qwen2_5"), enable_profiling=True))
    greedy(rollout, PROMPTS, 6, continuous_batch_size=slots)
    profile = rollout.get_last_profile()
    waves, refills = (1, 0) if slots is None else (2, 1)
    assert profile["prefill_forward_ms"] == pytest.approx(FORWARD_MS * (1 + refills), abs=CLOCK_MS)
    assert profile["decode_forward_ms"] == pytest.approx(FORWARD_MS * 5 * waves, abs=CLOCK_MS)
    assert profile["refill_forward_ms"] == pytest.approx(FORWARD_MS * refills, abs=CLOCK_MS)
    assert sum(profile[name] for name in STAGES) == pytest.approx(profile["generation_ms"])
    rest = profile["total_ms"] - profile["prefill_forward_ms"] - profile["decode_forward_ms"]
    assert 0 < rest < CLOCK_MS


def test_a_profile_is_of_one_call(forward_time):
    rollout = forward_time(rollout_of(tiny_model("qwen2_5"), enable_profiling=True))
    greedy(rollout, PROMPTS, 12)
    greedy(rollout, PROMPTS, 2)
    assert rollout.get_last_profile()["decode_forward_ms"] == pytest.approx(FORWARD_MS, abs=CLOCK_MS)


def test_trace_is_json_with_nested_stages(tmp_path):
    model = tiny_model()
    rollout = rollout_of(model, enable_profiling=True)
    with recording_accelerator():
        capture_steps(rollout)
        greedy(rollout, PROMPTS, 6, continuous_batch_size=2)
        rollout.sync_segki_weights()
        list(rollout.generate_iter(RolloutRequest(*PROMPTS), SamplingConfig(max_new_tokens=4, temperature=0.0)))
    path = tmp_path / "new" / "trace.json"
    rollout.export_chrome_trace(path)

    events = read(path)
    assert_well_nested(events)
    assert {event["tid"] for event in events} == {0}  # no device of its own
    (first, second) = named(events, "generate")
    assert (first["args"]["rows"], first["args"]["tokens"]) == (3, 18)
    (sync,) = named(events, "sync")
    assert first["ts"] + first["dur"] <= sync["ts"] and sync["ts"] + sync["dur"] <= second["ts"]
    for setup, capture in zip(named(events, "setup"), named(events, "capture"), strict=True):
        assert setup["ts"] <= capture["ts"] and capture["ts"] + capture["dur"] <= setup["ts"] + setup["dur"]
    assert [event["args"]["rows"] for event in named(events, "refill")] == [1]
    assert [event["args"]["rows"] for event in named(events, "prefill")] == [2, 3]
    assert sum(event["args"]["steps"] for event in named(events, "decode")) == 5 + 5 + 3
    assert len(named(events, "check")) == len(named(events, "assemble")) == 2


def test_iterators_that_wait_for_one_another_nest(tmp_path):
    rollout = rollout_of(tiny_model("qwen2_5"), enable_profiling=True)
    request, sampling = RolloutRequest(*PROMPTS), SamplingConfig(max_new_tokens=4, temperature=0.0)
    first, second = rollout.generate_iter(request, sampling), rollout.generate_iter(request, sampling)
    assert len(list(first)) == 3
    next(second)
    rollout.sync_segki_weights()
    assert len(list(second)) == 2
    rollout.export_chrome_trace(tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    assert_well_nested(events)
    assert [len(named(events, name)) for name in ("check", "generate", "sync")] == [2, 2, 1]


def test_answers_are_the_same_with_and_without():
    model = tiny_model()
    sampling = SamplingConfig(max_new_tokens=8, temperature=1.0, seed=3, n_samples_per_prompt=2)
    plain, traced = (
        rollout_of(model, enable_profiling=on).generate(RolloutRequest(*PROMPTS), sampling) for on in (False, True)
    )
    assert torch.equal(plain.input_ids, traced.input_ids) and torch.equal(plain.logprobs, traced.logprobs)


def test_off_records_nothing(tmp_path):
    def step() -> None:
        pass

    assert OFF.span("decode", steps=3) is NOTHING and OFF.ranged("decode step", step) is step
    rollout = rollout_of(tiny_model("qwen2_5"))
    greedy(rollout, PROMPTS, 3)
    assert not rollout._figures.trace.spans and not rollout._figures.trace.totals
    with pytest.raises(RuntimeError, match="enable_profiling=True"):
        rollout.export_chrome_trace(tmp_path / "trace.json")


def test_a_failed_call_leaves_whole_stages_only(tmp_path):
    rollout = rollout_of(tiny_model("qwen2_5"), enable_profiling=True)
    original = rollout._paths.call.logits

    def fails(*arguments):
        raise MemoryError("as a device may")

    rollout._paths.call.logits = fails
    with pytest.raises(MemoryError):
        greedy(rollout, PROMPTS, 3)
    rollout._paths.call.logits = original
    greedy(rollout, PROMPTS, 3)
    rollout.export_chrome_trace(tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    assert_well_nested(events)
    assert [len(named(events, name)) for name in ("setup", "prefill", "generate")] == [2, 1, 1]


# ---------------------------------------------------------------------------------------------------- device events


class LateDevice:
    """An accelerator whose device is at an event as much later as work was queued before it. It may be waited for
    only where a test says so."""

    def __init__(self):
        self.queued_until = 0.0  # the device's time at which all that was queued is done
        self.reached = 0.0  # how far it is
        self.may_wait = False
        self.ranges: list[str] = []
        self.most_ranges = 0

    def work(self, seconds: float) -> None:
        self.queued_until += seconds

    def Event(self, enable_timing: bool):
        assert enable_timing
        device = self

        class Event:
            def record(self) -> None:
                self.at = device.queued_until

            def query(self) -> bool:
                return self.at <= device.reached

            def synchronize(self) -> None:
                assert device.may_wait, "a stage waited for the device"
                device.reached = max(device.reached, self.at)

            def elapsed_time(self, other) -> float:
                assert self.query() and other.query()
                return (other.at - self.at) * 1000

        return Event()

    def range_push(self, name: str) -> None:
        self.ranges.append(name)
        self.most_ranges = max(self.most_ranges, len(self.ranges))

    def range_pop(self) -> None:
        self.ranges.pop()


@pytest.fixture
def late(monkeypatch) -> Iterator[SimpleNamespace]:
    device = LateDevice()
    monkeypatch.setattr(trace, "get_accelerator", lambda: device)
    yield SimpleNamespace(device=device, tracer=Tracer(True, torch.device("cuda")))
    assert not device.ranges


def test_device_times_are_the_devices(late):
    device, tracer = late.device, late.tracer
    for _ in range(3):
        with tracer.span("decode"):
            device.work(2.0)
    with tracer.span("refill"):
        device.work(1.0)
        with tracer.span("capture"):
            device.work(0.5)
    assert not tracer.totals  # nobody has waited
    device.may_wait = True
    tracer.settle()
    assert dict(tracer.totals) == pytest.approx({"decode": 6.0, "capture": 0.5, "refill": 1.5})
    starts = [span.device_start - tracer.spans[0].device_start for span in tracer.spans]
    assert starts == pytest.approx([0.0, 2.0, 4.0, 7.0, 6.0])
    assert all(span.end - span.start < 1.0 for span in tracer.spans)


def test_what_the_device_has_done_is_settled_without_waiting(late):
    device, tracer = late.device, late.tracer
    for step in range(100):
        with tracer.span("decode"):
            device.work(1.0)
            device.reached = step - 3.0
    assert tracer.totals["decode"] == pytest.approx(96.0) and len(tracer._pending) == 4


def test_each_call_counts_from_a_moment_of_its_own(late):
    """Events a day apart have a distance that a float holds to milliseconds only."""
    device, tracer = late.device, late.tracer
    device.may_wait = True
    for _ in range(2):
        with tracer.span("decode"):
            device.work(1.0)
        tracer.settle()
        device.work(86400.0)
    first, second = tracer.spans
    assert second.device_start == second.start and second.device_start - first.device_start < 1.0


def test_ranges_close_where_a_stage_raises(late):
    def step() -> None:
        raise MemoryError

    with pytest.raises(MemoryError), late.tracer.span("decode"):
        late.tracer.ranged("decode step", step)()
    assert late.device.most_ranges == 2
    late.device.may_wait = True
    late.tracer.settle()
    assert not late.tracer.spans
