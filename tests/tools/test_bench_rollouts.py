# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""bench rollouts: the rows it times are the rows it says, and its figures are what a count by hand gives."""

import json
import statistics
from types import SimpleNamespace

import pytest
import torch
import transformers
from models import tiny_model

from deepspeed_hybrid.cli import main
from deepspeed_hybrid.tools import bench_prompts, bench_rollouts
from deepspeed_hybrid.tools.bench import StepBytes
from deepspeed_hybrid.tools.bench_prompts import Peak
from deepspeed_hybrid.tools.bench_rollouts import floor_bytes, long_tailed, new_rollout, schedule_row

SMALL = "--prompts 5 --samples 2 --slots 4 --prompt 6 --median 9 --longest 40".split()


@pytest.fixture(autouse=True)
def keep_verbosity():
    level = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(level)


def rows_of(tmp_path, *arguments) -> list[dict]:
    table = tmp_path / "rollouts.json"
    assert main(["bench", "rollouts", *SMALL, *arguments, "--out", str(table)]) == 0
    return json.loads(table.read_text())["rows"]


def test_schedules(tmp_path, capsys):
    rows = rows_of(tmp_path, "--parts", "schedules", "--schedules", "continuous,fixed,fixed-plain,at-once")
    lengths = long_tailed(10, 9, 40, seed=0)
    assert [row["schedule"] for row in rows] == ["continuous", "fixed", "fixed-plain", "at-once"]
    continuous, fixed, plain, whole = rows
    for row in rows:
        assert row["part"] == "schedules" and row["rows"] == 10 and row["tokens"] == sum(lengths)
        rounded = 0.002 / row["seconds"]  # relative
        assert row["tok_s"] * row["seconds"] == pytest.approx(sum(lengths), rel=rounded)
        useful = sum(lengths) - 10
        lane_steps = useful + row["wasted_lane_steps"]
        assert row["occupancy_pct"] == pytest.approx(100 * useful / lane_steps, abs=0.1)
    assert (continuous["calls"], continuous["slots"], continuous["refills"]) == (1, 4, 6)
    assert continuous["queued_occupancy_pct"] == 100  # on a CPU the host sees at once that a row has ended
    batches = [lengths[first : first + 4] for first in range(0, 10, 4)]
    for row in (fixed, plain):
        assert (row["calls"], row["slots"], row["refills"]) == (3, 4, 0)
        assert row["decode_steps"] == sum(max(batch) - 1 for batch in batches)
    assert plain["shrinks"] == 0 and plain["wasted_lane_steps"] >= fixed["wasted_lane_steps"]
    assert (whole["slots"], whole["decode_steps"]) == (10, max(lengths) - 1)
    assert continuous["times_the_first"] == 1.0
    rounded = 0.002 / min(fixed["seconds"], continuous["seconds"])
    assert fixed["times_the_first"] == pytest.approx(fixed["seconds"] / continuous["seconds"], rel=rounded)
    assert "times as fast as fixed" in capsys.readouterr().out


def test_a_share_of_the_floor_where_there_is_a_card(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_rollouts, "has_cuda", lambda: True)
    monkeypatch.setattr(bench_rollouts, "read_bandwidth", lambda: 1e6)  # so slow that rounding is nothing
    counts = iter([1000, 1005])
    monkeypatch.setattr(bench_rollouts, "allocated_bytes", lambda: next(counts))
    (row,) = rows_of(tmp_path, "--parts", "schedules", "--schedules", "continuous")
    rounded = 0.002 / row["seconds"]
    assert row["floor_share_pct"] == pytest.approx(100 * row["floor_seconds"] / row["seconds"], rel=rounded)
    assert row["released_to_pct"] == 100.5
    assert "% of bandwidth floor" in capsys.readouterr().out


def test_prompts(tmp_path, capsys):
    rows = rows_of(tmp_path, "--parts", "shared,chunks", "--shared", "1x20,3x7", "--chunks", "30,2000")
    assert [(row["part"], row["length"]) for row in rows] == [
        ("shared", 20), ("shared", 7), ("chunks", 30), ("chunks", 2000)
    ]  # fmt: skip
    for row in rows[:2]:
        assert row["samples"] == 2 and row["ratio"] == pytest.approx(row["ms"] / row["ms_one"], rel=0.02)
    assert rows[3]["kept_bytes"] > rows[2]["kept_bytes"] > 0
    assert "peak beyond MB" in capsys.readouterr().out


def test_samples_share_the_prefill_that_is_timed(monkeypatch):
    """The two calls differ in nothing but the number of samples."""
    asked, model = [], tiny_model("qwen2_5")
    rollout = new_rollout(model)
    monkeypatch.setattr(bench_prompts, "seconds_of", lambda *call: asked.append(call[1:]) or 0.5)
    bench_prompts.bench_shared(rollout, model, [(2, 9)], 8, 1, 0, lambda row: None)
    requests = {id(request) for request, _ in asked}
    one, several = {id(sampling): sampling for _, sampling in asked}.values()
    assert len(requests) == 1 and (one.n_samples_per_prompt, several.n_samples_per_prompt) == (1, 8)
    assert vars(one) | {"n_samples_per_prompt": 8} == vars(several) and one.max_new_tokens == 1


@pytest.mark.parametrize("median, longest", [(300, 2048), (9, 40), (5, 5)])
def test_lengths_are_long_tailed_and_always_the_same(median, longest):
    lengths = long_tailed(512, median, longest, seed=0)
    assert lengths == long_tailed(512, median, longest, seed=0)
    assert statistics.median(lengths) == pytest.approx(median, abs=1)
    assert max(lengths) == longest and min(lengths) >= 1
    assert sorted(lengths) == sorted(long_tailed(512, median, longest, seed=1))
    if longest > median:
        assert statistics.mean(lengths) > 1.2 * median and lengths != sorted(lengths)


def test_the_floor_is_the_sum_over_rows_and_steps():
    sizes, lengths, prompt, steps = StepBytes(weights=1000, state_per_row=10, kv_per_token=3), [1, 4, 2], 7, 5
    by_hand = steps * 1000
    for length in lengths:
        for token in range(1, length):  # fed to a step, which also reads those before it
            by_hand += 10 + 3 * (prompt + token)
    assert floor_bytes(sizes, lengths, prompt, steps) == by_hand


def test_a_row_sums_up_its_calls():
    load = SimpleNamespace(lengths=[3, 5, 2, 2])
    call = dict(slots=2, lane_steps=10, wasted_lane_steps=4, decode_steps=5, refills=1, shrinks=0)
    call.update(cache_memory_bytes=7 * 10**7, queued_occupancy=0.5)
    row = schedule_row("fixed", load, 2, 2.0, [call, {**call, "slots": 3, "refills": 0, "wasted_lane_steps": 5}])
    assert (row["slots"], row["calls"], row["decode_steps"], row["refills"]) == (3, 2, 10, 1)
    assert (row["tok_s"], row["occupancy_pct"], row["cache_gb"]) == (6.0, 55.0, 0.07)
    assert row["queued_occupancy_pct"] is None  # of one call only
    assert schedule_row("continuous", load, 2, 2.0, [call])["queued_occupancy_pct"] == 50.0


def test_nothing_is_timed_where_lengths_are_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_rollouts, "_run", lambda *call: (1.0, [], [1] * 10))
    table = tmp_path / "rows.json"
    assert main(["bench", "rollouts", *SMALL, "--parts", "schedules", "--out", str(table)]) == 1
    assert "other lengths" in capsys.readouterr().out and not table.exists()


def test_the_peak_is_over_what_was_there(monkeypatch):
    used = SimpleNamespace(now=100, most=0)

    def reset() -> None:
        used.most = used.now

    monkeypatch.setattr(bench_prompts, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: used.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: used.most)
    peak = Peak()
    used.most, used.now = 170, 120
    assert peak.bytes() == 70


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--slots", "7"], "multiple of the 8 samples"),
        (["--model-config", "no-such-model"], "no-such-model"),
    ],
    ids=" ".join,
)
def test_bad_options_are_errors(arguments, words, capsys):
    assert main(["bench", "rollouts", *arguments]) == 1
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--parts", "decode"], ["--schedules", ""], ["--shared", "8"], ["--chunks", "0"]]
)
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(SystemExit):
        main(["bench", "rollouts", *arguments])
