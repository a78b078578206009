# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Two ranks with a whole model each and prompts of their own, under every ZeRO stage."""

import copy
import time

import deepspeed
import pytest
import torch
from harness import assert_same_answers, force_tokens, prompt
from models import ragged_prompts, solo
from tensor_parallel_cases import counted, engine_over, hybrid, plain, rollout_over, train

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.ops.collectives import post, posted

pytestmark = pytest.mark.xdist_group("two_ranks")
HERE = "parallel.test_data_parallel"
NEW_TOKENS = 12


def rank() -> int:
    return torch.distributed.get_rank()


def own_answers(stage: int) -> list:
    """Unlike batches, as often as a rank likes, each stopping when its rows end; what went between ranks meanwhile."""
    whole = hybrid()
    engine = engine_over(copy.deepcopy(whole).train(), stage, shared=False)
    rollout = rollout_over(engine)
    train(engine, rank())
    rollout.sync_segki_weights()
    prompts = ragged_prompts([[3, 7], [5, 2, 9]][rank()], seed=rank())
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, temperature=0.0, stop_token_ids=list(range(rank(), 256, 9)))
    with counted() as collectives:
        for _ in range(1 + 2 * rank()):
            batch = rollout.generate(RolloutRequest(*prompts), sampling)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        whole.load_state_dict(
            {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
        )
    stops = set(sampling.stop_token_ids)
    rows = range(len(prompts[0]))
    assert_same_answers(batch, [solo(whole, prompt(prompts, row), NEW_TOKENS, stops) for row in rows], atol=2e-4)
    return [collectives.counts, batch.response_lengths.tolist()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_answer_their_own_prompts_without_a_word(replicas, stage):
    (first, lengths), (second, others) = replicas.run(f"{HERE}:own_answers", stage=stage)
    assert first == second == {}
    assert lengths != others and min(lengths + others) < NEW_TOKENS


def scripted_stop(stage: int) -> list:
    """Rank 0 is made to stop at its second token and rank 1 at its fifth, of eight."""
    rollout = rollout_over(engine_over(plain().train(), stage, shared=False))
    stop, last = 255, [2, 5][rank()]
    force_tokens(rollout, torch.tensor([[stop if step == last else 7 for step in range(1, 9)]]))
    forwards = rollout._paths.call.forwards
    sampling = SamplingConfig(max_new_tokens=8, temperature=0.0, stop_token_ids=[stop])
    batch = rollout.generate(RolloutRequest(*ragged_prompts([4])), sampling)
    return [rollout._paths.call.forwards - forwards, batch.response_lengths.tolist()]


@pytest.mark.parametrize("stage", [2, 3])
def test_each_rank_stops_when_its_rows_end(replicas, stage):
    """DeepSpeed#8262, #8321. No rank runs a forward for another: under ZeRO-3, too, weights are whole meanwhile."""
    assert replicas.run(f"{HERE}:scripted_stop", stage=stage) == [[2, [2]], [5, [5]]]


def refused_first_call() -> list:
    """Rank 0's first call, by which weights are gathered, is bad; it makes no other until rank 1's is done, which
    fails where it waits in vain."""
    rollout = rollout_over(engine_over(plain().train(), 3, shared=False))
    ids, mask = ragged_prompts([4])
    sampling = SamplingConfig(max_new_tokens=3, temperature=0.0)
    done = "test_data_parallel/rank 1 has its answer"
    if rank() == 0:
        with pytest.raises(ValueError, match="all padding"):
            rollout.generate(RolloutRequest(ids, 0 * mask), sampling)
        while posted(done) is None:
            time.sleep(0.01)
    else:
        rollout.generate(RolloutRequest(ids, mask), sampling)
        post(done, "at once")
    return rollout.generate(RolloutRequest(ids, mask), sampling).input_ids.tolist()


def test_rank_that_refuses_its_first_call_does_not_keep_the_others_waiting(replicas):
    first, second = replicas.run(f"{HERE}:refused_first_call")
    assert first == second


def losses(stage: int, rollouts: bool) -> list[float]:
    """Of five steps, with rollouts before each, as many as the rank's number says, or with none."""
    engine = engine_over(hybrid().train(), stage, shared=False)
    rollout = rollout_over(engine)
    seen = []
    for step in range(5):
        for _ in range(1 + rank() if rollouts else 0):
            request = RolloutRequest(*ragged_prompts([3, 6], seed=rank()))
            rollout.generate(request, SamplingConfig(max_new_tokens=4, seed=step))
        seen.append(train(engine, 2 * step + rank()))
        if rollouts:
            rollout.sync_segki_weights()
    return seen


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_rollouts_leave_training_as_it_is(replicas, stage):
    without = replicas.run(f"{HERE}:losses", stage=stage, rollouts=False)
    assert without[0] != without[1] and len(set(without[0])) == 5
    assert replicas.run(f"{HERE}:losses", stage=stage, rollouts=True) == without
