# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The demo on two processes, started as a user starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_hybrid.cli import build_parser, main
from deepspeed_hybrid.tools import demo
from deepspeed_hybrid.tools.device import has_cuda

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
STEPS = 2  # the second shows what the first has taught
SECONDS = 600

without_cuda = pytest.mark.skipif(has_cuda(), reason="two processes would want two GPUs")


def rows_of(launcher: list[str], out: Path, *options: object) -> list[dict]:
    """The rows that a demo writes, in a process, or processes, of its own."""
    command = [sys.executable, *launcher, "-m", "deepspeed_hybrid", "demo", "--steps", STEPS, "--out", out, *options]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    output = subprocess.PIPE
    with subprocess.Popen(
        list(map(str, command)), cwd=ROOT, env=environment, stdout=output, stderr=output, text=True
    ) as process:
        try:
            printed, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its processes then, which a kill would leave alone
            raise
    assert process.returncode == 0, printed + errors
    assert printed.count("not judged") == 1, "one process concludes"
    return json.loads((out / "demo.json").read_text())["rows"]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@without_cuda
@pytest.mark.slow
def test_processes_that_share_a_model_train_as_one_does(tmp_path):
    alone = rows_of([], tmp_path / "alone", "--model-size", "small")
    shared = rows_of(TORCHRUN, tmp_path / "shared", "--model-size", "small", "--tensor-parallel", 2)
    for one, other in zip(alone, shared, strict=True):
        assert other["reward"] == pytest.approx(one["reward"], abs=1e-3)
        assert 0 < other["logprob_gap"] < 1e-5


@without_cuda
@pytest.mark.slow
def test_processes_with_prompts_of_their_own(tmp_path):
    rows = rows_of(TORCHRUN, tmp_path / "together", "--zero-stage", 2)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["logprob_gap"] < 1e-5 for row in rows)


def test_processes_that_do_not_divide_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "training_obstacle", lambda: None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["demo", "--tensor-parallel", "2", "--out", str(tmp_path / "unused")]) == 1
    printed = capsys.readouterr().out
    assert "--tensor-parallel 2" in printed and "torchrun --nproc-per-node 2 -m deepspeed_hybrid demo" in printed
    assert not (tmp_path / "unused").exists()


def test_argument_of_deepspeeds_launcher_is_accepted():
    options = build_parser().parse_args(["--local_rank=1", "demo", "--zero-stage", "2"])
    assert options.zero_stage == 2 and options.tensor_parallel == 1
