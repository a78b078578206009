# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Choice and truncation over two ranks' shares of the scores, against the same over whole rows."""

import deepspeed
import pytest
import torch

from deepspeed_hybrid.ops.decode_step import CHUNK, choose_token
from deepspeed_hybrid.ops.sharded_choice import choose_token_on_shards
from deepspeed_hybrid.ops.sharded_truncate import truncate_scores_on_shards
from deepspeed_hybrid.ops.truncate_scores import truncate_scores_reference
from deepspeed_hybrid.ops.vocab_shard import EXACT_IN_FP32, VocabShard

pytestmark = pytest.mark.xdist_group("two_ranks")

ROWS = 16
# Within a chunk, a boundary between chunks, chunks that both ranks have a part of, and a rank with one id.
SIZES = [[3, 3], [129, 128], [CHUNK, CHUNK], [1300, 1201], [1, 2999], [4000, 1]]
SETTINGS = [  # top_k, 1 - top_p, min_p
    (0, 0.0, 0.0), (1, 0.0, 0.0), (5, 0.0, 0.0), (10**6, 0.3, 0.0), (0, 0.1, 0.0), (0, 0.9999, 0.0), (0, 1.0, 0.0),
    (0, 0.0, 0.2), (0, 0.0, 1.0), (7, 0.4, 0.05),
]  # fmt: skip


def everything(sizes: list[int]) -> VocabShard:
    return VocabShard(torch.distributed.group.WORLD, sizes)


def scores_of(kind: str, total: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(total)
    scores = 3 * torch.randn(ROWS, total, generator=generator)
    if kind == "ties":
        scores = (scores / 2).round()
        scores[:, :: max(1, total // 7)] = -0.0
    if kind == "holes":
        scores[:, 1::2] = -torch.inf
        scores[0, 1:] = -torch.inf  # the last rank has nothing
    return scores


def choices(sizes: list[int], kind: str) -> list:
    """Asserts that this rank's choices are those from whole rows; returns them."""
    shard, scores = everything(sizes), scores_of(kind, sum(sizes))
    raw = scores_of("noise", sum(sizes)).flip(1)
    key = tuple(torch.arange(ROWS) * factor + 1 for factor in (977, 1, 3, 5))
    temperature = torch.linspace(0.3, 2.0, ROWS)
    chosen = []
    for sampled, raw_logits, divisor in [
        (False, None, None), (False, raw, None), (True, None, temperature), (True, raw, temperature),
        (True, None, None),
    ]:  # fmt: skip
        own_raw = None if raw_logits is None else shard.own(raw_logits)
        token, logprob = choose_token_on_shards(shard, shard.own(scores), own_raw, divisor, key, sampled)
        wanted, wanted_logprob = choose_token(scores, raw_logits, divisor, *key, sampled)
        assert torch.equal(token, wanted)
        assert (logprob - wanted_logprob).abs().max() < 2e-5
        chosen.append(token.tolist())
    return chosen


def truncations(sizes: list[int], kind: str) -> list:
    """Asserts that what this rank keeps is its share of what is kept of whole rows; returns how many."""
    shard, scores = everything(sizes), scores_of(kind, sum(sizes))
    kept = []
    for top_k, tail, min_p in SETTINGS:
        settings = (
            torch.full((ROWS,), top_k), torch.full((ROWS,), tail, dtype=torch.float32), torch.full((ROWS,), min_p)
        )  # fmt: skip
        own = truncate_scores_on_shards(shard, shard.own(scores), *settings)
        wanted = shard.own(truncate_scores_reference(scores, *settings))
        assert torch.equal(own, wanted), (top_k, tail, min_p, (own != wanted).nonzero().tolist()[:5])
        kept.append(int(shard.everyones(own.isfinite().sum()[None]).sum()))
    return kept


@pytest.mark.parametrize("kind", ["noise", "ties", "holes"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_choices_are_those_from_whole_rows(ranks, sizes, kind):
    first, second = ranks.run("ops.test_sharded_choice:choices", sizes=sizes, kind=kind)
    assert first == second


@pytest.mark.parametrize("kind", ["noise", "ties", "holes"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_is_kept_is_what_is_kept_of_whole_rows(ranks, sizes, kind):
    first, second = ranks.run("ops.test_sharded_choice:truncations", sizes=sizes, kind=kind)
    assert first == second and min(first) >= ROWS


def test_vocabulary_beyond_exact_fp32_is_refused(one_process):
    with pytest.raises(ValueError, match=str(EXACT_IN_FP32 + 1)):
        VocabShard(deepspeed.comm.get_world_group(), [EXACT_IN_FP32 + 1])
