# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""An MTP head over slots is transformers' layer over whole sequences, in every pass of every step of a call."""

import pytest
import torch
from harness import LateFlags, greedy, rollout_of
from models import VOCAB, ragged_prompts
from mtp_cases import Oracle, assert_as_by_the_oracle, mtp_rollout, taught_mtp, tiny_mtp, tiny_target, watch_proposals
from prompt_ops import reference_ops
from speculative_cases import Schedule, figures

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.compat import ModelCall
from deepspeed_hybrid.generation import loop, prefill, tail
from deepspeed_hybrid.speculative.mtp_drafter import MtpDrafter

LENGTHS, NEW_TOKENS = [5, 1, 17, 2], 12
CASES = {  # who proposes, tokens of a prefill forward, and of each block in turn
    "blocks": ("taught", 8192, (4,), dict(temperature=0.0)),
    "long blocks": ("taught", 4, (7, 2), dict(temperature=0.0)),
    "beyond limits": ("random", 8192, (4,), dict(temperature=0.0)),
    "plain steps between": ("random", 8192, (1, 4, 2, 1, 1, 3), dict(temperature=1.0)),
    "samples": ("random", 4, (3, 1), dict(temperature=1.0, n_samples_per_prompt=2)),
    "refills": ("taught", 4, (4, 1, 2), dict(temperature=0.0, n_samples_per_prompt=2, continuous_batch_size=3)),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def taught(target):
    return taught_mtp(target, ragged_prompts(LENGTHS), NEW_TOKENS)


@pytest.mark.parametrize(("proposes", "budget", "blocks", "case"), CASES.values(), ids=CASES)
def test_every_pass_is_the_oracles(target, taught, proposes, budget, blocks, case, monkeypatch):
    """So that the context is that of the committed tokens, whatever was proposed, rejected, or moved before."""
    monkeypatch.setattr(prefill.prefill, "__defaults__", (budget, None, False))
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)
    monkeypatch.setattr(loop, "StopFlags", LateFlags)
    draft = taught if proposes == "taught" else tiny_mtp(target)
    prompts, sampling = ragged_prompts(LENGTHS, width=19), SamplingConfig(NEW_TOKENS, seed=3, **case)
    rollout = mtp_rollout(target, draft, Schedule(*blocks), draft_block_size=max(blocks), poll_every=2)
    seen = watch_proposals(rollout)
    batch = rollout.generate(RolloutRequest(*prompts), sampling)
    plain = rollout_of(target).generate(RolloutRequest(*prompts), sampling)
    assert torch.equal(batch.input_ids, plain.input_ids)
    samples = case.get("n_samples_per_prompt", 1)
    assert assert_as_by_the_oracle(seen, Oracle(target, draft), prompts, batch, samples) >= 8
    if proposes == "taught":
        assert figures(rollout)["tokens_per_step"] > 1.5


def test_behind_prompts_that_run_as_on_a_gpu(target, taught):
    """Where no draft watches, only rows' last tokens go on behind the last mixer."""
    prompts, rollout = ragged_prompts([18, 9, 30]), mtp_rollout(target, taught)
    rollout._injection.prompt = reference_ops()
    rollout._injection.follow()
    seen = watch_proposals(rollout)
    batch = greedy(rollout, prompts, 4)
    assert assert_as_by_the_oracle(seen, Oracle(target, taught), prompts, batch, 1) >= 3


def test_made_in_inference_mode(target):
    draft = tiny_mtp(target)
    with torch.inference_mode():
        drafter = MtpDrafter(draft, ModelCall(target), 4)
    drafter.refresh()
    assert not any(part.is_inference() for part in drafter.draft.parameters())


@torch.no_grad()
def test_only_what_the_embedding_can_read_is_guessed():
    """A head may have more rows, and a bias, here one that likes these."""
    target = tiny_target()
    target.lm_head = torch.nn.Linear(target.lm_head.in_features, VOCAB + 64)
    target.lm_head.weight.zero_()
    target.lm_head.bias.copy_(torch.arange(VOCAB + 64))
    drafter = MtpDrafter(tiny_mtp(target), ModelCall(target), 4)
    assert drafter._guesses(torch.randn(3, 1, target.lm_head.in_features)).tolist() == [[VOCAB - 1]] * 3
