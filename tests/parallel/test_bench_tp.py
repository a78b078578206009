# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The benchmark of shared layers, on two CPU ranks and a tiny model."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.xdist_group("two_ranks")
SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "bench_tp.py"
BATCHES, NEW = [2], 6


def bench_tp():
    spec = importlib.util.spec_from_file_location("bench_tp", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(out: str) -> int:
    options = dict(
        preset="tiny", tp=[1, 2], batches=BATCHES, prompt=5, new=NEW, runs=1, fp32_tokens=8, cycles=2, seed=0
    )
    module = bench_tp()
    module.MOST_ERROR = 1.5  # of so few tokens
    return module.measure(SimpleNamespace(**options, kernels=True, out=Path(out), plot=None))


def test_rows_of_one_rank_and_of_two(ranks, tmp_path):
    out = tmp_path / "tp.json"
    assert ranks.run("parallel.test_bench_tp:rows", out=str(out)) == [0, 0]
    check, half, cycles, *timed = json.loads(out.read_text())["rows"]
    assert check["equal"] == check["of"] == 4 * 8
    assert half["fine"] and half["equal"] == half["of"] > 0 and 0 < half["error"] < 1.5 * half["transformers_error"]
    assert cycles["equal"] == cycles["of"] == 2 and cycles["more"].startswith("2 different answers")
    assert [(row["tp"], row["batch"], row["new"]) for row in timed] == [(tp, n, NEW) for tp in (1, 2) for n in BATCHES]
    assert all(row["tok_s"] > 0 and row["first_token_ms"] > 0 for row in timed)
    assert [row["bytes_copied"] > 0 for row in timed] == [False, True], "heads of a rank are copies"


def unlike_tokens() -> bool:
    return bench_tp().all_the_same(torch.tensor([[3, torch.distributed.get_rank()]]))


def test_ranks_that_differ_are_found(ranks):
    assert ranks.run("parallel.test_bench_tp:unlike_tokens") == [False, False]
