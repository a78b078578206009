# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command that compares logprobs: its figures, its files, and what it refuses."""

import itertools
import json
import math
import re

import pytest
import torch
import transformers
from models import solo, tiny_model

from deepspeed_hybrid.cli import main
from deepspeed_hybrid.tools import scoring, text_model
from deepspeed_hybrid.tools.fidelity import DECODE, OURS, PLAIN, TRAINING, path_row, standard_error, verdict
from deepspeed_hybrid.tools.scoring import Said, decode_logprobs, decode_obstacle, forward_logprobs

PNG = b"\x89PNG\r\n"
SMALL = ["--rows", "3", "--prompt", "16", "--new", "12"]
SHIFT = 0.25
LEARNING_STEPS = 20


@pytest.fixture(autouse=True)
def keep_verbosity():
    """The command quietens transformers for the whole process."""
    level = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(level)


@pytest.fixture(scope="module")
def answered() -> tuple[torch.nn.Module, Said]:
    """A model, and what it says by itself: prompts and answers of different lengths."""
    model = tiny_model()
    prompts = [[5, 9, 17], [40, 41, 42, 43, 44, 45, 46], [200]]
    solos = [solo(model, torch.tensor(prompt), new) for prompt, new in zip(prompts, (4, 9, 6), strict=True)]
    tokens, logprobs = [one.tokens.tolist() for one in solos], torch.cat([one.logprobs for one in solos])
    return model, Said("alone", prompts, tokens, logprobs.double())


@pytest.fixture
def steady_clock(monkeypatch):
    """``--train-seconds 1.5`` is so many steps on any host."""
    ticks = itertools.count(0.0, 1.5 / LEARNING_STEPS)
    monkeypatch.setattr(text_model.time, "perf_counter", lambda: next(ticks))


def test_a_run_on_text_prints_and_writes_and_another_engine_is_compared(tmp_path, capsys, steady_clock):
    out, plot, saved = tmp_path / "sub" / "rows.json", tmp_path / "sub" / "rows.png", tmp_path / "model"
    files = ["--out", str(out), "--plot", str(plot), "--save", str(saved)]
    assert main(["--traceback", "fidelity", *SMALL, "--layers", "4", "--train-seconds", "1.5", *files]) == 0
    printed = capsys.readouterr().out
    assert float(re.search(r"its loss is ([0-9.]+) nats", printed).group(1)) < math.log(text_model.VOCAB)
    assert re.search(rf"^{OURS} +0( +0)+ +36( +0)+$", printed, re.MULTILINE)  # all ratios are between 0.99 and 1.01
    assert "the training forward: " in printed and plot.read_bytes().startswith(PNG)
    rows = {row["path"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == [OURS, DECODE, TRAINING]
    for row in rows.values():
        assert row["tokens"] == sum(row["ratios"]) == 36 and len(row["ratios"]) == len(row["ratio_edges"]) + 1
        assert row["mean_abs"] <= row["max_abs"] < 2e-5 and 0 <= row["kl"] < 1e-8 and row["clipped_pct"] == 0
        assert 0 < row["oracle_max_abs"] < 2e-5 or row["path"] == TRAINING
    assert rows[TRAINING]["max_abs"] == 0 < rows[OURS]["max_abs"]

    content = json.loads((saved / "rows.json").read_text())
    content["engine"] = "shifted"
    content["logprobs"] = [[value - SHIFT for value in row[:-1]] for row in content["logprobs"]]
    content["tokens"] = [row[:-1] for row in content["tokens"]]
    (tmp_path / "other.json").write_text(json.dumps(content))
    again = ["--model-config", str(saved), "--external", str(tmp_path / "other.json"), "--out", str(out)]
    assert main(["--traceback", "fidelity", *SMALL, *again]) == 0
    rows = {row["path"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == [OURS, "shifted", DECODE, TRAINING]
    shifted = rows["shifted"]
    assert (shifted["tokens"], shifted["clipped_pct"]) == (33, 100.0)
    assert shifted["mean_abs"] == pytest.approx(SHIFT, abs=1e-5)  # so the checkpoint holds the very weights
    assert shifted["oracle_max_abs"] == pytest.approx(SHIFT, abs=1e-5)
    assert shifted["kl"] == pytest.approx(math.exp(SHIFT) - 1 - SHIFT, abs=1e-5)


@pytest.mark.parametrize("at_once", [None, 1])
def test_rows_of_any_length_are_scored_as_if_alone(answered, at_once, monkeypatch):
    model, said = answered
    if at_once:
        monkeypatch.setattr(scoring, "LOGITS_BYTES", 1)
    assert forward_logprobs(model, said, 1.0) == pytest.approx(said.logprobs, abs=5e-5)


def test_decode_is_scored_as_it_goes(answered):
    model, said = answered
    rows = Said("", said.prompts[1:2] * 2, said.tokens[1:2] * 2, torch.cat([said.logprobs[4:13]] * 2))
    assert decode_logprobs(model, rows, 1.0) == pytest.approx(rows.logprobs, abs=5e-5)
    cooler = decode_logprobs(model, rows, 0.5)
    assert cooler == pytest.approx(forward_logprobs(model, rows, 0.5), abs=1e-4)
    assert cooler.mean() > rows.logprobs.mean()  # greedy tokens gain by it
    assert decode_obstacle(model) is None and "GatedDeltaNet" in decode_obstacle(tiny_model("gdn_only"))


def test_figures_of_a_path():
    training = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    own = training - torch.tensor([0.0, 0.1, -0.3, 0.0], dtype=torch.float64)
    row = path_row("some", own, training, own + 0.5)
    assert (row["tokens"], row["clipped_pct"]) == (4, 25.0)
    assert row["mean_abs"] == pytest.approx(0.1) and row["max_abs"] == pytest.approx(0.3)
    assert row["kl"] == pytest.approx((math.exp(0.1) - 1.1 + math.exp(-0.3) - 0.7) / 4)
    counts = dict(zip(row["ratio_edges"], row["ratios"], strict=False))  # below each edge
    assert {edge: count for edge, count in counts.items() if count} == {0.8: 1, 1.01: 2, 1.25: 1}
    assert row["oracle_mean_abs"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("ours", "error", "dtype", "said", "code"),
    [
        (1e-3, 0.0, torch.bfloat16, "at most", 0),
        (2e-3, 0.0, torch.bfloat16, "at most", 0),
        (2.1e-3, 0.0, torch.bfloat16, "above", 1),
        (2.1e-3, 6e-5, torch.bfloat16, "level with", 0),
        (2.1e-3, 4e-5, torch.bfloat16, "above", 1),
        (2.1e-3, 4e-5, torch.float32, "above", 0),
        (math.inf, math.nan, torch.bfloat16, "above", 1),
        (math.nan, 1e-4, torch.bfloat16, "above", 1),
    ],
)
def test_verdict(ours, error, dtype, said, code, capsys):
    rows = [{"path": OURS, "mean_abs": ours}, {"path": DECODE, "mean_abs": 2e-3, "standard_error": error}]
    assert verdict(rows, dtype) == code
    assert f"{said} that of {DECODE}" in capsys.readouterr().out


def test_standard_error():
    """That of many samples' mean, where tokens of a row go together; of one row there is none."""
    generator = torch.Generator().manual_seed(0)
    training, means = torch.zeros(64 * 8, dtype=torch.float64), []
    for _ in range(400):
        of_rows = torch.rand(64, 1, generator=generator, dtype=torch.float64).expand(64, 8).flatten()
        said = Said("some", [[1]] * 64, [[1] * 8] * 64, of_rows)
        means.append(float(of_rows.mean()))
        found = standard_error(said, training, training)
        assert found == pytest.approx((1 / 12 / 64) ** 0.5, rel=0.35)
    assert found == pytest.approx(torch.tensor(means).std().item(), rel=0.2)
    assert standard_error(Said("some", [[1]], [[1] * 512], of_rows), training, training) == 0.0


def test_half_precision_is_seen(tmp_path):
    """The measure itself: bf16 is further from the oracle than fp32, and our rollouts are still near to training."""
    out = tmp_path / "rows.json"
    assert main(["fidelity", *SMALL, "--dtype", "bf16", "--segki", "both", "--out", str(out)]) in (0, 1)
    rows = {row["path"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == [PLAIN, OURS, DECODE, TRAINING]
    for path in (PLAIN, OURS):
        assert 1e-4 < rows[path]["oracle_mean_abs"] < 0.05 and 1e-5 < rows[path]["mean_abs"] < 0.05


def test_text_is_python_and_windows_are_of_it():
    text = text_model.standard_library(2**16)
    assert len(text) == 2**16 and b"\nimport " in text
    known, unknown = text_model.split(text_model.byte_ids(text))
    assert len(unknown) == int(2**16 * text_model.HELD_OUT) and len(known) + len(unknown) == 2**16
    rows = text_model.windows(unknown, 3, 10)
    assert torch.equal(rows[0], unknown[:10]) and torch.equal(rows[2], unknown[-10:])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([], "object"),
        ({"engine": "a", "prompt_ids": [[1]], "tokens": [[1]]}, "logprobs"),
        ({"engine": "a", "prompt_ids": [[1]], "tokens": [[1, 2]], "logprobs": [[-1.0]]}, "a logprob for each token"),
        ({"engine": "a", "prompt_ids": [], "tokens": [], "logprobs": []}, "a row"),
        ({"engine": "a", "prompt_ids": [[]], "tokens": [[1]], "logprobs": [[-1.0]]}, "every prompt"),
    ],
)
def test_other_engines_files_of_another_form_are_refused(content, what, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=what):
        Said.read(path)


def test_what_does_not_go_together_is_refused(tmp_path, capsys):
    tiny_model("qwen2_5").save_pretrained(tmp_path)
    assert main(["fidelity", "--model-config", str(tmp_path), "--train-seconds", "1"]) == 1
    assert "not with a checkpoint" in capsys.readouterr().out
    assert main(["fidelity", "--layers", "5"]) == 1
    assert "at most the configuration's 4" in capsys.readouterr().out
    for arguments in (["--temperature", "0"], ["--train-seconds", "-1"], ["--train-seconds", "inf"]):
        with pytest.raises(SystemExit):
            main(["fidelity", *arguments])
