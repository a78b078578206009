# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The commands as a user types them: exit codes, what they print and what they write."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from models import tiny_model
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from deepspeed_hybrid import HybridEngineRolloutConfig
from deepspeed_hybrid.cli import build_parser, main
from deepspeed_hybrid.paths import resolve_paths
from deepspeed_hybrid.tools import bench, breakdown, checks, demo, doctor, results
from deepspeed_hybrid.tools.device import has_cuda
from deepspeed_hybrid.tools.models import load_config, shrunk

ROOT = Path(__file__).resolve().parents[2]

without_cuda = pytest.mark.skipif(has_cuda(), reason="what is refused without a CUDA device")
MEASUREMENT_KEYS = ["what", "gpu", "commit", "versions", "command", "rows"]
PNG = b"\x89PNG\r\n"


@pytest.fixture(autouse=True)
def keep_verbosity():
    """The commands quieten transformers for the whole process."""
    level = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(level)


LAUNCHER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def run_module(*arguments: object) -> subprocess.CompletedProcess:
    """In a process of its own, as the demo is one torch.distributed job."""
    command = [sys.executable, "-m", "deepspeed_hybrid", *map(str, arguments)]
    # Another test of this worker may have joined a job of its own; its rank and port are not the demo's.
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("demo", "doctor", "bench"))


@pytest.mark.parametrize(
    "arguments",
    [[], ["demo", "--steps", "0"], ["doctor", "--backend", "rocm"], ["bench"], ["bench", "decode", "--batch", "1,0"]],
    ids=" ".join,
)
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        build_parser().parse_args(arguments)
    assert refused.value.code == 2
    assert "usage: deepspeed-hybrid" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- demo


@pytest.mark.slow
def test_demo_prints_a_line_a_step_and_writes_its_files(tmp_path):
    result = run_module("demo", "--steps", 2, "--out", tmp_path / "new" / "folder")
    assert result.returncode == 0, result.stdout + result.stderr

    lines = [line for line in result.stdout.splitlines() if re.search(r"\bstep +\d+ ", line)]
    assert len(lines) == 2
    assert all(word in line for line in lines for word in ("reward", "tokens/s", "logprob gap", "generate", "train"))
    assert "not judged" in result.stdout
    assert "INFO" not in result.stdout + result.stderr
    assert "2/2" in result.stderr  # the progress bar

    written = json.loads((tmp_path / "new" / "folder" / "demo.json").read_text())
    assert list(written) == MEASUREMENT_KEYS
    assert "demo --steps 2" in written["command"]
    assert [row["step"] for row in written["rows"]] == [1, 2]
    assert all(0 <= row["reward"] < 0.3 for row in written["rows"])
    gap = 0.05 if has_cuda() else 1e-5
    assert all(0 < row["logprob_gap"] < gap for row in written["rows"])
    assert (tmp_path / "new" / "folder" / "reward.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("last, code", [(0.79, 1), (0.81, 0)])
def test_demo_fails_where_nothing_was_learned(last, code, tmp_path, capsys):
    rewards = [0.0] * (demo.STEPS - demo.LAST) + [last] * demo.LAST
    figures = dict(exact=0.0, tok_s=1.0, logprob_gap=0.0, generate_ms=1.0, train_ms=1.0)
    rows = [demo.StepResult(step=step, reward=reward, **figures) for step, reward in enumerate(rewards, 1)]
    assert demo._conclude(rows, tmp_path) == code
    assert ("not learned" in capsys.readouterr().out) == bool(code)


def test_demo_names_what_training_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "training_obstacle", lambda: "the reason and the fix")
    assert main(["demo", "--out", str(tmp_path / "unused")]) == 1
    assert "the reason and the fix" in capsys.readouterr().out
    assert not (tmp_path / "unused").exists()


# ----------------------------------------------------------------------------------------------------------- doctor


def test_doctor_reports_versions_ops_and_paths(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for expected in (f"torch {torch.__version__}", "triton", "flash-linear-attention", "nvcc", "ninja", "decode_step"):
        assert expected in re.sub(" +", " ", printed)
    assert re.search(r"GatedDeltaNet training\n +here +ok: ", printed)
    assert re.search(r"\d +linear_attention +\S", printed) and re.search(r"\d +full_attention +\S", printed)


@without_cuda
@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ("--use-graph-capture", "no CUDA device"),
        ("--backend cuda", "no CUDA device"),
        ("--backend triton", "no CUDA device"),
    ],
)
def test_doctor_fails_where_a_requested_path_cannot_run(flags, cause, capsys):
    assert main(["doctor", *flags.split()]) == 1
    assert cause in capsys.readouterr().out.partition("FAILED")[2]


def test_doctor_agrees_with_the_rollout_about_segments(capsys):
    model = AutoModelForCausalLM.from_config(shrunk(load_config("tiny")))
    try:
        resolve_paths(SimpleNamespace(module=model), HybridEngineRolloutConfig(use_segki=True))
        expected = 0
    except RuntimeError:
        expected = 1
    assert main(["doctor", "--use-segki"]) == expected
    assert ("FAILED" in capsys.readouterr().out) == bool(expected)


def test_doctor_reads_a_model_config(tmp_path, capsys):
    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_attention_heads=2, num_hidden_layers=30)
    config.save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path / "config.json")]) == 0
    layers = capsys.readouterr().out.partition("paths of")[2]
    assert "full_attention" in layers and "linear_attention" not in layers


def test_doctor_fails_for_a_model_that_is_not_supported(tmp_path, capsys):
    GPT2Config(n_embd=32, n_head=2, n_layer=2).save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    assert "not supported" in capsys.readouterr().out.partition("FAILED")[2]


def test_doctor_fails_for_a_file_that_is_no_config(tmp_path, capsys):
    (tmp_path / "config.json").write_text("no JSON")
    assert main(["doctor", "--model", str(tmp_path / "config.json")]) == 1
    assert "FAILED: It looks like the config file" in capsys.readouterr().out


def test_doctor_says_why_training_fails(monkeypatch, capsys):
    def forward(*args, **kwargs):
        raise RuntimeError("0 active drivers")

    model = tiny_model()
    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr(doctor, "has_cuda", lambda: False)
    assert doctor._training(model) == "FAILED: RuntimeError: 0 active drivers"


@pytest.mark.parametrize(
    "triton, major, refused",
    [("3.3.1", 9, False), ("3.4.0", 9, True), ("3.7.0", 9, True), ("3.7.1", 9, False), ("3.8.0", 9, False),
     ("3.6.0", 8, False), ("3.6.0", 10, False), (None, 9, False)],
)  # fmt: skip
def test_triton_that_fla_refuses_on_hopper(triton, major, refused):
    reason = checks.backward_obstacle(triton, major)
    assert (reason is not None) == refused
    assert reason is None or ("triton>=3.7.1" in reason and triton in reason)


def test_missing_fla_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    assert "pip install flash-linear-attention" in checks.fla_obstacle()


# ------------------------------------------------------------------------------------------------------------ bench


def test_bench_writes_its_rows(tmp_path, capsys):
    table, plot = tmp_path / "sub" / "decode.json", tmp_path / "sub" / "decode.png"
    arguments = ["--batch", "1,3", "--prompt", "5", "--new", "4", "--runs", "2", "--out", table, "--plot", plot]
    assert main(["bench", "decode", *map(str, arguments)]) == 0

    written = json.loads(table.read_text())
    assert list(written) == MEASUREMENT_KEYS
    assert written["versions"]["torch"] == torch.__version__
    assert [(row["batch"], row["prompt"], row["new"]) for row in written["rows"]] == [(1, 5, 4), (3, 5, 4)]
    for row in written["rows"]:
        assert {"tok_s", "ms_step", "spread_pct"} <= set(row)
        assert row["tok_s"] * row["ms_step"] == pytest.approx(1000 * row["batch"], rel=0.01)
    assert plot.read_bytes().startswith(PNG)
    assert len(re.findall(r"^ +on +greedy +[13] +5 +4 ", capsys.readouterr().out, re.MULTILINE)) == 2


def test_bench_times_with_and_without_segments(tmp_path):
    table = tmp_path / "decode.json"
    arguments = ["--batch", "1,2", "--prompt", "5", "--new", "4", "--runs", "1", "--segki", "both", "--out", table]
    assert main(["bench", "decode", *map(str, arguments)]) == 0
    rows = json.loads(table.read_text())["rows"]
    assert [(row["batch"], row["segki"]) for row in rows] == [(1, "off"), (1, "on"), (2, "off"), (2, "on")]


@pytest.mark.parametrize(
    "arguments, options",
    [
        ([], {"temperature": 0.0}),
        (["--sampling", "sampled"], {"temperature": 1.0}),
        (["--sampling", "truncated"], {"temperature": 1.0, "top_k": 20, "top_p": 0.95}),
    ],
    ids=["greedy", "sampled", "truncated"],
)
def test_bench_samples_as_it_is_told(arguments, options, tmp_path, monkeypatch, capsys):
    asked, generate = [], bench.HybridEngineRollout.generate

    def recorded(rollout, request, sampling):
        asked.append(sampling)
        return generate(rollout, request, sampling)

    monkeypatch.setattr(bench.HybridEngineRollout, "generate", recorded)
    table = tmp_path / "decode.json"
    common = ["--batch", "2", "--prompt", "5", "--new", "4", "--runs", "1", "--out", str(table)]
    assert main(["bench", "decode", *common, *arguments]) == 0

    name = arguments[-1] if arguments else "greedy"
    written = json.loads(table.read_text())
    assert written["what"].startswith(f"{name} decode") and [row["sampling"] for row in written["rows"]] == [name]
    assert re.search(rf"^ +on +{name} +2 +5 +4 ", capsys.readouterr().out, re.MULTILINE)
    assert {sampling.max_new_tokens for sampling in asked} == {1, 4}
    assert all(getattr(sampling, option) == value for sampling in asked for option, value in options.items())


def test_bench_times_first_tokens(tmp_path, capsys):
    table = tmp_path / "prefill.json"
    assert main(["bench", "prefill", "--shapes", "1x5,3x40", "--runs", "1", "--out", str(table)]) == 0
    rows = json.loads(table.read_text())["rows"]
    assert [(row["n"], row["length"]) for row in rows if row["graphs"] == "off"] == [(1, 5), (3, 40)]
    for row in rows:
        assert row["tok_s"] * row["ms"] == pytest.approx(1000 * row["n"] * row["length"], rel=0.01)
    assert len(re.findall(r"^ +off +[13] +\d+ ", capsys.readouterr().out, re.MULTILINE)) == 2


@pytest.mark.parametrize("shapes", ["1", "1x", "0x3", "1x2x3", "a"])
def test_bench_refuses_shapes_that_are_none(shapes):
    with pytest.raises(SystemExit):
        main(["bench", "prefill", "--shapes", shapes])


def test_breakdown_is_of_the_steps_between_two_calls(monkeypatch):
    """A prefill is in both calls and cancels; kernels are summed by kind."""

    def device_time(generate, tokens):
        generate(tokens)
        steps = tokens - 1
        return {
            "nvjet_hsh_64x8": (10 + 3 * steps, 100.0 + 6.0 * steps),
            "void gemv2T_kernel": (steps, 2.0 * steps),
            "void ds_hybrid::(anonymous namespace)::scan_chunk<float, false>": (1 + steps, 5.0 * steps),
            "chunk_of_the_prefill": (4, 9.0),
        }

    asked: list[int] = []
    monkeypatch.setattr(breakdown, "_device_time", device_time)
    shares = breakdown.step_breakdown(asked.append)
    assert asked == [breakdown.FEW, breakdown.MANY]
    assert [(share.kind, share.count, share.us) for share in shares] == [("product", 4, 8.0), ("choice", 1, 5.0)]


def test_bench_times_nothing_that_does_not_repeat(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "_same", lambda first, second: False)
    monkeypatch.setattr(bench, "seconds_of", lambda *_: pytest.fail("timed"))
    assert main(["bench", "decode", "--batch", "1", "--new", "2", "--out", str(tmp_path / "rows.json")]) == 1
    assert "different tokens" in capsys.readouterr().out
    assert not (tmp_path / "rows.json").exists()


def test_bench_takes_the_median_and_the_spread():
    row = bench.decode_row(batch=2, prompt=8, new=101, seconds=[1.0, 0.9, 1.2], first=[0.2, 0.1], floor=0.005)
    assert row == {"batch": 2, "prompt": 8, "new": 101, "tok_s": 202.0, "ms_step": 9.901, "spread_pct": 30.0,
                   "first_token_ms": 150.0, "ms_decode_step": 8.5, "floor_share_pct": 50.5}  # fmt: skip


def test_bandwidth_floor_of_the_4b_model():
    """8.41 GB of weights, 2 x 48 MiB of fp32 state a row, 32 KiB of keys and values a token."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config("qwen3.5-4b"), dtype=torch.bfloat16)
    sizes = bench.step_bytes(model)
    assert sizes.weights == pytest.approx(8.41e9, rel=1e-3)
    assert sizes.state_per_row == 2 * (48 * 2**20 + 24 * 8192 * 4 * 2)
    assert sizes.kv_per_token == 32 * 2**10
    assert sizes.total(4, 100) == sizes.weights + 4 * sizes.state_per_row + 400 * sizes.kv_per_token


def test_unknown_model_config_is_an_error_not_a_traceback(capsys):
    assert main(["bench", "decode", "--model-config", "no-such-model"]) == 1
    assert "no-such-model" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no-such-model"):
        main(["--traceback", "bench", "decode", "--model-config", "no-such-model"])


# ---------------------------------------------------------------------------------------------------------- results


def test_plot_without_matplotlib_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not results.draw(tmp_path / "plot.png", [1, 2], {"a": [1, 2]}, "x", "y")
    assert "pip install matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "plot.png").exists()


def test_commit_is_none_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(results.deepspeed_hybrid, "__file__", str(tmp_path / "__init__.py"))
    assert results.commit() is None


def test_missing_distribution_has_no_version():
    assert results.distribution_version("no-such-distribution-of-ours") is None
