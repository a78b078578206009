# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Training an MTP head: passes are those of decoding, the policy is left alone, and guesses become right."""

import pytest
import torch
from harness import answers, greedy, prompt, rollout_of
from models import ragged_prompts
from mtp_cases import Oracle, mtp_rollout, tiny_mtp, tiny_target
from speculative_cases import assert_gradients_are_slopes, figures, with_head_bias

from deepspeed_hybrid.speculative.mtp_train import MtpTrainer
from deepspeed_hybrid.speculative.train import Answered

TOKENS = 4


@pytest.fixture(scope="module")
def target():
    return with_head_bias(tiny_target())


@pytest.fixture(scope="module")
def spoken(target):
    """Prompts and what the model says to them."""
    prompts = ragged_prompts([6, 3, 1])
    return prompts, greedy(rollout_of(target), prompts, 10)


@torch.no_grad()
def test_the_loss_is_that_of_the_oracles_passes(target, spoken):
    """Of chains that run past a row's end the passes that have a label; and no chain begins at a row's first token."""
    prompts, batch = spoken
    draft, rows = tiny_mtp(target), Answered.of(batch)
    oracle, trainer = Oracle(target, draft), MtpTrainer(target, draft, tokens=TOKENS, decay=0.5)
    anchors, found = torch.tensor([[6, 9, 14], [3, 11, 0], [0, 1, 9]]), torch.ones(3, 3, dtype=torch.bool)
    found[1, 2] = False
    total = weights = 0.0
    right = torch.zeros(TOKENS - 1, 2)
    for row, tokens in enumerate(answers(batch)):
        whole = torch.cat([prompt(prompts, row), tokens, torch.zeros(TOKENS, dtype=torch.int64)])
        length, hidden = len(whole) - TOKENS, oracle.hidden(whole)
        for anchor, there in zip(anchors[row].tolist(), found[row].tolist(), strict=True):
            if not there or anchor == 0:
                continue
            outputs = oracle.passes(whole[: anchor + TOKENS - 1], hidden[:anchor], TOKENS - 1)
            logprobs = target.lm_head(outputs).log_softmax(-1)
            for index in range(TOKENS - 1):
                if anchor + index + 1 < length:
                    label = int(whole[anchor + index + 1])
                    total, weights = total - 0.5**index * float(logprobs[index, label]), weights + 0.5**index
                    right[index] += torch.tensor([float(logprobs[index].argmax() == label), 1.0])
    outcome = trainer.loss(trainer.features(rows), rows, anchors, found)
    assert float(outcome.loss) == pytest.approx(total / weights, rel=1e-4)
    assert outcome.right.tolist() == pytest.approx((right[:, 0] / right[:, 1]).tolist())


def test_gradients_go_through_a_chain_and_its_context(target, spoken):
    assert_gradients_are_slopes(MtpTrainer(target, tiny_mtp(target)), Answered.of(spoken[1]))


def test_no_gradient_reaches_the_policy(spoken):
    target = with_head_bias(tiny_target())
    draft, rows = tiny_mtp(target), Answered.of(spoken[1])
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    trainer = MtpTrainer(target, draft)
    with trainer.watching() as seen:  # the policy's own forward, with its graph
        loss = target(input_ids=rows.ids, use_cache=False).logits.square().mean()
    trainer.update(rows, seen[0])
    trainer.update(rows)
    assert all(parameter.grad is None for parameter in target.parameters())
    assert all(torch.equal(weight, target.state_dict()[name]) for name, weight in before.items())
    assert all(parameter.grad is not None for parameter in draft.parameters())
    given = seen[0].clone().requires_grad_()
    trainer.update(rows, given)
    assert given.grad is None
    loss.backward()  # which the head's has left whole
    assert target.lm_head.weight.grad is not None


def test_rows_of_two_tokens(target):
    """Whose only chain would begin at the first: nothing to learn, and no NaN."""
    draft = tiny_mtp(target)
    trainer = MtpTrainer(target, draft)
    rows = Answered(torch.tensor([[5, 6]]), torch.ones(1, 2, dtype=torch.bool))
    outcome = trainer.update(rows)
    assert float(outcome.loss) == 0 and outcome.right.tolist() == [0.0] * (TOKENS - 1)
    assert all(parameter.isfinite().all() for parameter in draft.parameters())


def test_a_head_learns_while_it_serves(target, spoken):
    prompts, plain = spoken
    draft = tiny_mtp(target)
    rollout, rates = mtp_rollout(target, draft), []

    def answered() -> None:
        batch = greedy(rollout, prompts, 10)
        assert torch.equal(batch.input_ids, plain.input_ids)
        torch.testing.assert_close(batch.logprobs, plain.logprobs, atol=5e-5, rtol=0)
        rates.append(figures(rollout)["tokens_per_step"])

    answered()
    trainer, rows = MtpTrainer(target, draft, learning_rate=3e-3, anchors=16), Answered.of(plain)
    features = trainer.features(rows)
    losses = [float(trainer.update(rows, features).loss) for _ in range(25)]
    answered()
    rollout.sync_weights(1)
    answered()
    assert losses[-1] < 0.2 * losses[0]
    assert rates[0] < 1.3 and rates[1] < 1.3 and rates[2] > 2.5
