# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""truncate_scores on a CPU against transformers' warpers and float64, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from truncate_cases import KINDS, LOWEST, check_rows, every_choice, score_rows, settings_of

from deepspeed_hybrid import HybridEngineRolloutConfig, paths
from deepspeed_hybrid.generation.sampling import truncate_alone
from deepspeed_hybrid.ops.truncate_scores import truncate_scores, truncate_scores_reference


def warped(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """By transformers' own, in the order in which its generate() has them."""
    chosen = LogitsProcessorList()
    if top_k > 0:
        chosen.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chosen.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        chosen.append(MinPLogitsWarper(min_p))
    return chosen(torch.zeros(len(scores), 1).long(), scores.clone())


@pytest.mark.parametrize("vocab", [1, 2, 31, 1000])
@pytest.mark.parametrize("kind", ["random", "peaked", "flat", "far"])
@pytest.mark.parametrize(
    "top_k, top_p, min_p",
    [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (20, 0.95, 0.0), (20, 0.7, 0.05), (3, 1.0, 0.4)],
)
def test_it_keeps_what_transformers_keeps(kind, vocab, top_k, top_p, min_p):
    scores = score_rows(kind, 3, vocab)
    settings = torch.full((3,), top_k), torch.full((3,), 1 - top_p), torch.full((3,), min_p)
    assert torch.equal(truncate_scores(scores, *settings), warped(scores, top_k, top_p, min_p))


@pytest.mark.parametrize("vocab", [1, 2, 31, 1000, 4097])
@pytest.mark.parametrize("kind", KINDS)
def test_it_keeps_what_float64_keeps(kind, vocab):
    choices = every_choice(vocab)
    scores, settings = score_rows(kind, len(choices), vocab), settings_of(choices, len(choices))
    before = scores.clone()
    check_rows(truncate_scores(scores, *settings), scores, *settings)
    assert torch.equal(scores, before)


def test_of_equal_scores_the_first_are_dropped():
    """A quarter of the mass is dropped of eight equal ones, and of three that tie behind one."""
    equal = torch.zeros(1, 8)
    kept = truncate_scores(equal, torch.tensor([0]), torch.tensor([0.25]), torch.tensor([0.0]))
    assert kept.isfinite().tolist() == [[False] * 2 + [True] * 6]
    tied = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    kept = truncate_scores(tied, torch.tensor([0]), torch.tensor([0.25]), torch.tensor([0.0]))
    assert kept.isfinite().tolist() == [[False, True, True, True]]


def test_ties_with_the_kth_are_kept_and_the_last_of_the_likeliest():
    scores = torch.tensor([[2.0, 1.0, 2.0, 1.0, 0.0]])
    kept = truncate_scores(scores, torch.tensor([3]), torch.tensor([0.0]), torch.tensor([0.0]))
    assert kept.tolist() == [[2.0, 1.0, 2.0, 1.0, LOWEST]]
    kept = truncate_scores(scores, torch.tensor([0]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert kept.tolist() == [[LOWEST, LOWEST, 2.0, LOWEST, LOWEST]]


def test_rows_alone():
    choices = every_choice(5000)
    scores, settings = score_rows("random", len(choices), 5000), settings_of(choices, len(choices))
    together = truncate_alone(truncate_scores_reference, scores, *settings)
    assert torch.equal(together.isfinite(), truncate_scores(scores, *settings).isfinite())


def test_the_op_needs_no_help_for_rows_alone(monkeypatch):
    calls = []

    def op(*arguments):
        calls.append(arguments)
        return "rows"

    monkeypatch.setattr("deepspeed_hybrid.generation.sampling.truncate_scores", op)
    scores, settings = score_rows("random", 4, 31), settings_of([(3, 0.1, 0.0)], 4)
    assert truncate_alone(op, scores, *settings) == "rows"
    assert len(calls) == 1 and calls[0][0] is scores


@pytest.mark.parametrize("rows, vocab", [(4, 33), (1, 1), (0, 5)])
def test_opcheck(rows, vocab):
    settings = (setting[:rows] for setting in settings_of([(20, 0.05, 0.1)], 4))
    torch.library.opcheck(truncate_scores, (score_rows("random", rows, vocab), *settings))


def test_fake_tensors_need_no_kernel():
    with FakeTensorMode():
        scores = torch.empty(3, 9, device="meta")
        per_row = torch.empty(3, device="meta")
        kept = truncate_scores(scores, torch.empty(3, device="meta", dtype=torch.int64), per_row, per_row)
        assert kept.shape == (3, 9) and kept.dtype == torch.float32 and kept.is_contiguous()


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("scores", lambda tensor: tensor.double(), r"scores must be \[B, V\] float32 with V > 0"),
        ("scores", lambda tensor: tensor[0], r"scores must be \[B, V\] float32 with V > 0"),
        ("scores", lambda tensor: tensor[:, :0], r"scores must be \[B, V\] float32 with V > 0"),
        ("top_k", lambda tensor: tensor.int(), "top_k must have one torch.int64 a row"),
        ("top_k", lambda tensor: tensor[:2], "top_k must have one torch.int64 a row"),
        ("top_p_tail", lambda tensor: tensor.double(), "top_p_tail must have one torch.float32 a row"),
        ("min_p", lambda tensor: tensor[:, None], "min_p must have one torch.float32 a row"),
    ],
)
def test_bad_arguments_are_refused(name, change, message):
    top_k, tail, min_p = settings_of([(3, 0.1, 0.1)], 4)
    arguments = {"scores": score_rows("random", 4, 31), "top_k": top_k, "top_p_tail": tail, "min_p": min_p}
    with pytest.raises(ValueError, match=message):
        truncate_scores(**arguments | {name: change(arguments[name])})


def test_gradients_are_refused():
    scores = score_rows("random", 2, 9).requires_grad_()
    with pytest.raises(RuntimeError, match="truncate_scores is for inference and has no gradient"):
        truncate_scores(scores, *settings_of([(3, 0.1, 0.1)], 2))
    with torch.no_grad():
        truncate_scores(scores, *settings_of([(3, 0.1, 0.1)], 2))


@pytest.mark.parametrize("obstacle", [None, "nvcc is not there"])
def test_the_reference_stands_in_where_the_op_cannot_be_built(obstacle, monkeypatch):
    monkeypatch.setattr(paths, "op_obstacle", lambda name: obstacle)
    off: dict[str, str] = {}
    cuda, op = SimpleNamespace(type="cuda"), paths.OPS["truncate_scores"]
    chosen = paths._op("truncate_scores", *op, cuda, HybridEngineRolloutConfig(), off)
    assert chosen is (truncate_scores if obstacle is None else truncate_scores_reference)
    assert off == ({} if obstacle is None else {"truncate_scores op": obstacle})
