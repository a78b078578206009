# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Stages by device events: nothing waits for them, answers stay, and times are the stream's."""

import json
from collections import Counter

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from harness import greedy, rollout_of
from models import ragged_prompts, tiny_model
from trace_cases import assert_well_nested, named, read

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = ragged_prompts([30, 70, 50])
NEW = 400


@pytest.fixture(scope="module")
def rollouts():
    """Without and with stages, over one model, both warm: kernels tuned, steps and prompts captured."""
    model = tiny_model().cuda()
    both = [rollout_of(model, enable_profiling=on) for on in (False, True)]
    for _ in range(3):
        for rollout in both:
            greedy(rollout, PROMPTS, NEW)
    yield both
    for rollout in both:
        rollout.shutdown()


def test_no_stage_waits_and_answers_stay(rollouts, monkeypatch):
    plain, traced = rollouts
    expected = greedy(plain, PROMPTS, NEW)
    ranges: Counter[str] = Counter()
    accelerator = get_accelerator()
    push = accelerator.range_push

    def counted(name: str, *arguments, **options) -> None:
        ranges[name] += 1
        push(name, *arguments, **options)

    def never(*arguments):
        pytest.fail("the device was waited for")

    with monkeypatch.context() as patch:
        patch.setattr(accelerator, "range_push", counted)
        patch.setattr(accelerator, "synchronize", never)
        patch.setattr(torch.cuda, "synchronize", never)
        batch = greedy(traced, PROMPTS, NEW)
    assert torch.equal(batch.input_ids, expected.input_ids) and torch.equal(batch.logprobs, expected.logprobs)
    assert ranges["decode step"] == NEW - 1 and ranges["prefill"] == 1
    assert ranges["decode"] == -(-(NEW - 1) // traced.cfg.poll_every)


def test_times_are_the_streams(rollouts):
    _, traced = rollouts
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    greedy(traced, PROMPTS, NEW)
    end.record()
    end.synchronize()
    whole = begin.elapsed_time(end)
    profile = traced.get_last_profile()
    stages = [profile[name] for name in ("weights_ms", "setup_ms", "prefill_forward_ms", "decode_forward_ms")]
    print(f"stream {whole:.2f} ms, stages {[round(stage, 3) for stage in stages]}, call {profile['total_ms']:.2f} ms")
    assert profile["prefill_forward_ms"] > 0 and profile["decode_forward_ms"] > 0
    assert 0.7 * whole <= sum(stages) <= 1.01 * whole
    assert profile["capture_ms"] == 0


def test_refills_are_told_apart(rollouts):
    _, traced = rollouts
    greedy(traced, PROMPTS, 40, continuous_batch_size=2)
    profile = traced.get_last_profile()
    assert 0 < profile["refill_forward_ms"] < profile["prefill_forward_ms"]


def test_trace_has_a_row_for_the_device(tmp_path):
    rollout = rollout_of(tiny_model().cuda(), enable_profiling=True)
    for _ in range(2):
        greedy(rollout, PROMPTS, 40)
        rollout.sync_segki_weights()
    rollout.export_chrome_trace(tmp_path / "trace.json")
    rollout.shutdown()
    events = read(tmp_path / "trace.json")
    assert_well_nested(events)
    host, device = ([event for event in events if event["tid"] == row] for row in (0, 1))
    stages = Counter(event["name"] for event in device)
    assert stages["capture"] == 2  # of a step, and of a prompt's second forward
    assert stages["sync"] == 2 and stages["prefill"] == 2 and stages["decode"] > 2
    assert Counter(event["name"] for event in host) - stages == Counter(check=2, assemble=2, generate=2)
    for one, other in zip(named(host, "decode"), named(device, "decode"), strict=True):
        assert other["ts"] >= one["ts"] - 100  # the device is not before the host, but for what reading a clock takes
    rows = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "M"]
    assert [row["args"]["name"] for row in rows[1:]] == ["host", "device (stream)"]
