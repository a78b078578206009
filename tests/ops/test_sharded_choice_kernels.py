# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The kernels of a choice on shares of the scores, in the interpreter, against torch."""

import pytest
import torch
from gdn_decode_cases import interpreted
from glue_cases import poisoned_outputs

from deepspeed_hybrid.ops.decode_step import LENGTH, STOPPED, record_choice

pytestmark = [pytest.mark.interpreter, interpreted]

START = 1000


def scores_of(kind: str, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A view of wider rows, of which nothing else may be read."""
    generator = torch.Generator().manual_seed(size)
    scores = (3 * torch.randn(rows, size, generator=generator)).to(dtype)
    if kind == "ties":
        scores = (scores / 2).round()
    if kind == "holes":
        scores[:, 1::2] = -torch.inf
        scores[0, :-1] = -torch.inf
    wide = torch.full((rows, size + 3), torch.nan, dtype=dtype)
    wide[:, :size] = scores
    return wide[:, :size]


@pytest.mark.parametrize(
    "kind, rows, size, dtype, raw",
    [
        ("noise", 1, 1, torch.float32, False),
        ("ties", 3, 4099, torch.bfloat16, True),
        ("holes", 2, 9001, torch.float32, False),
        ("noise", 2, 130, torch.float16, True),
    ],
)
def test_candidates(kind, rows, size, dtype, raw):
    from deepspeed_hybrid.ops.triton.sharded_choice import nominate

    scores = scores_of(kind, rows, size, dtype)
    raw_logits = scores_of("noise", rows, size, torch.float32).flip(1) if raw else None
    source = (scores if raw_logits is None else raw_logits).float()
    with poisoned_outputs():
        merit, entry, score, total = nominate(scores, raw_logits, START).unbind(-1)
    best = scores.float().argmax(dim=-1)
    assert torch.equal(entry.long(), best + START)
    assert torch.equal(merit, scores.float().gather(1, best[:, None])[:, 0])
    assert torch.equal(score, source.gather(1, best[:, None])[:, 0])
    torch.testing.assert_close(total, source.logsumexp(-1), rtol=1e-6, atol=1e-6)


def test_a_share_with_nothing_to_choose_loses_and_is_within_bounds():
    from deepspeed_hybrid.ops.triton.sharded_choice import nominate

    merit, entry, _, total = nominate(torch.full((1, 5), -torch.inf), None, START).unbind(-1)
    assert merit.item() == -torch.inf and START <= entry.item() < START + 5 and total.item() < -1e38


@pytest.mark.parametrize("ranks, stops", [(1, 1), (2, 3), (3, 0)])
def test_records(ranks, stops):
    """A stop, a limit, a stop at the limit, a parked row, a full buffer and a row that goes on."""
    from deepspeed_hybrid.ops.triton.sharded_choice import record

    rows, columns = 6, 4
    generator = torch.Generator().manual_seed(ranks)
    candidates = torch.randn(ranks, rows, 4, generator=generator)
    candidates[..., 1] = torch.randint(0, 50, (ranks, rows), generator=generator).float()
    candidates[:, 0, 0] = 1.0  # equal merits: the first rank's
    best = candidates[..., 0].argmax(dim=0)
    pick = torch.arange(rows)
    choice, score = candidates[best, pick, 1].long(), candidates[best, pick, 2]
    logprob = score - candidates[..., 3].logsumexp(dim=0)
    stop_ids = torch.tensor([int(choice[0]), int(choice[2]), -1][:stops], dtype=torch.int64)
    limit = torch.tensor([9, 2, 2, 9, 9, 9])

    def fresh() -> list[torch.Tensor]:
        length = torch.tensor([0, 1, 1, 1, 3, 2])
        return [
            torch.full((rows,), 7),
            length + 10,
            length,
            torch.tensor([False, False, False, True, False, False]),
            torch.zeros(rows, dtype=torch.uint8),
            torch.full((rows, columns), -5),
            torch.full((rows, columns), 0.5),
        ]

    wanted, found = fresh(), fresh()
    record_choice(choice, logprob, limit, stop_ids, *wanted)
    record(candidates, limit, stop_ids, *found, STOPPED, LENGTH)
    *exact, logprobs = zip(wanted, found, strict=True)
    assert all(torch.equal(one, other) for one, other in exact)
    torch.testing.assert_close(*logprobs, rtol=1e-6, atol=1e-6)
