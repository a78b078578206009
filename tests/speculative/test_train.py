# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Training a draft: what a block sees and is to say, that the policy is left alone, and that guesses become right."""

from types import SimpleNamespace

import pytest
import torch
from harness import answers, rollout_of
from models import ragged_prompts, tiny_model
from speculative_cases import (
    MASK,
    assert_gradients_are_slopes,
    figures,
    speculative_rollout,
    tiny_draft,
    with_head_bias,
)

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.speculative.config import FULL, SLIDING
from deepspeed_hybrid.speculative.train import Answered, DraftTrainer, block_masks, draft_loss, draw_anchors, visible

TOKENS = 8


@pytest.fixture(scope="module")
def target():
    return with_head_bias(tiny_model())


def rows_of(lengths: list[int], prompt: int, seed: int = 0) -> Answered:
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    columns = torch.arange(width)[None]
    real = columns < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, MASK, (len(lengths), width), generator=generator).masked_fill(~real, 0)
    return Answered(ids, real & (columns >= prompt))


# ---------------------------------------------------------------------------------------------------------------- rows


def test_rows_of_a_rollout_are_moved_to_the_left(target):
    prompts = ragged_prompts([5, 1, 9])
    limits = [4, 6, 2]
    sampling = SamplingConfig(max_new_tokens=6, temperature=0.0, max_new_tokens_per_row=limits)
    batch = rollout_of(target).generate(RolloutRequest(*prompts), sampling)
    rows = Answered.of(batch)
    ids, mask = prompts
    for row, tokens in enumerate(answers(batch)):
        whole = torch.cat([ids[row][mask[row].bool()], tokens])
        assert rows.ids[row, : len(whole)].tolist() == whole.tolist()
        assert rows.answered[row].nonzero()[:, 0].tolist() == list(range(len(whole) - len(tokens), len(whole)))


def test_anchors_are_answers_with_an_answer_behind_them():
    answered = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1]]).bool()
    drawn = [set(), set(), set()]
    for seed in range(30):
        anchors, found = draw_anchors(answered, 2, torch.Generator().manual_seed(seed))
        assert found.sum(dim=1).tolist() == [2, 0, 2]
        for row in (0, 2):
            assert anchors[row, 0] < anchors[row, 1]
            drawn[row].update(anchors[row].tolist())
    assert drawn == [{2, 3, 4}, set(), {1, 2, 3, 4, 5}]
    anchors, found = draw_anchors(answered, 99)
    assert [row[there].tolist() for row, there in zip(anchors, found, strict=True)] == [[2, 3, 4], [], [1, 2, 3, 4, 5]]


# --------------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(layer_types=(SLIDING, FULL)),
        dict(causal=(True, False)),
        dict(layer_types=(SLIDING,) * 2, causal=(False, True)),
    ],
    ids=["full", "mixed", "causal", "both"],
)
def test_what_blocks_see(target, options):
    """Position by position: nothing of the context from the anchor on, and nothing of another block."""
    config = tiny_draft(target, **options).config
    anchors, length = torch.tensor([[3, 4, 20], [1, 9, 0]]), 24
    for layer, mask in enumerate(block_masks(config, anchors, length)):
        for row in range(2):
            for block in range(3):
                start = int(anchors[row, block])
                for token in range(TOKENS):
                    at, window = start + token, config.sliding_window
                    slides = config.layer_types[layer] == SLIDING
                    context = [j for j in range(length) if j < start and (not slides or j > at - window)]
                    within = [
                        other
                        for other in range(TOKENS)
                        if (other <= token or not config.causal[layer]) and (not slides or start + other > at - window)
                    ]
                    expected = context + [length + block * TOKENS + other for other in within]
                    assert mask[row, block * TOKENS + token].nonzero()[:, 0].tolist() == expected


def test_blocks_in_training_are_blocks_in_decoding(target):
    """The hidden states of a block among others are those of the block behind a cache of its context alone."""
    for options in (dict(), dict(layer_types=(SLIDING, FULL))):
        draft = tiny_draft(target, **options)
        rows = rows_of([30, 18], 2)
        features = torch.randn(2, 30, draft.fc.in_features)
        anchors = torch.tensor([[4, 7, 19], [2, 9, 15]])
        seen = []
        handle = draft.norm.register_forward_hook(lambda *args, seen=seen: seen.append(args[2]))
        loss_of(target, draft, features, rows, anchors)
        handle.remove()
        together = seen[0].unflatten(1, (3, TOKENS))
        for row in range(2):
            for block, start in enumerate(anchors[row].tolist()):
                torch.testing.assert_close(
                    together[row, block],
                    alone(target, draft, features[row, :start], int(rows.ids[row, start])),
                    atol=1e-5,
                    rtol=1e-4,
                )


@torch.no_grad()
def alone(target, draft, features: torch.Tensor, anchor: int) -> torch.Tensor:
    """[T, D] of one block behind its context, by one concatenation."""
    start = len(features)
    keys, values = draft.context_keys_values(draft.context(features[None]), torch.arange(start)[None])
    positions = start + torch.arange(TOKENS)[None]

    def attend(layer, queries, own_keys, own_values):
        both = torch.cat([keys[:, :, layer], own_keys], 1), torch.cat([values[:, :, layer], own_values], 1)
        places = torch.arange(start + TOKENS)[None]
        mask = visible(draft.config, layer, positions, places)
        scores = torch.einsum("bthe,bnhe->bhtn", queries, both[0].repeat_interleave(2, 2)) / 4
        weights = scores.masked_fill(~mask[:, None], -1e9).softmax(-1)
        return torch.einsum("bhtn,bnhe->bthe", weights, both[1].repeat_interleave(2, 2))

    ids = torch.tensor([[anchor] + [MASK] * (TOKENS - 1)])
    return draft.block(target.get_input_embeddings()(ids), positions, attend)[0]


# ---------------------------------------------------------------------------------------------------------------- loss


def loss_of(target, draft, features, rows, anchors, found=None, decay=4.0):
    found = torch.ones_like(anchors, dtype=torch.bool) if found is None else found
    head, embedding = target.get_output_embeddings(), target.get_input_embeddings()
    return draft_loss(draft, features, rows, anchors, found, embedding.weight, head.weight, head.bias, decay)


def test_the_loss_by_hand(target):
    """Labels at the very places, the anchor's own left out; what lies behind an answer, and unfound anchors, too."""
    draft = tiny_draft(target)
    rows = rows_of([14, 9], 2)
    features = torch.randn(2, 14, draft.fc.in_features)
    anchors, found = torch.tensor([[3, 10], [6, 0]]), torch.tensor([[True, True], [True, False]])
    total = weights = 0.0
    right = torch.zeros(TOKENS - 1, 2)
    for row, start in ((0, 3), (0, 10), (1, 6)):
        hidden = alone(target, draft, features[row, :start], int(rows.ids[row, start]))
        logprobs = target.lm_head(hidden).detach().log_softmax(-1)
        for token in range(1, TOKENS):
            if start + token < (14, 9)[row]:
                label, weight = int(rows.ids[row, start + token]), 2.718281828 ** (-(token - 1) / 3.0)
                total, weights = total - weight * float(logprobs[token, label]), weights + weight
                right[token - 1] += torch.tensor([float(logprobs[token].argmax() == label), 1.0])
    outcome = loss_of(target, draft, features, rows, anchors, found, decay=3.0)
    assert float(outcome.loss.detach()) == pytest.approx(total / weights, rel=1e-4)
    assert outcome.right.tolist() == pytest.approx((right[:, 0] / right[:, 1].clamp(min=1)).tolist())


def test_gradients_go_through_the_context(target):
    assert_gradients_are_slopes(DraftTrainer(target, tiny_draft(target)), rows_of([14, 9], 2))


def test_no_gradient_reaches_the_policy():
    target = with_head_bias(tiny_model())
    draft = tiny_draft(target)
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    trainer = DraftTrainer(target, draft, anchors=4)
    rows = rows_of([20, 12], 3)
    with trainer.watching() as seen:  # the policy's own forward, with its graph
        loss = target(input_ids=rows.ids, use_cache=False).logits.square().mean()
    assert not seen[0].requires_grad
    trainer.update(rows, seen[0])
    trainer.update(rows)
    assert all(parameter.grad is None for parameter in target.parameters())
    assert all(torch.equal(weight, target.state_dict()[name]) for name, weight in before.items())
    assert all(parameter.grad is not None for parameter in draft.parameters())
    given = seen[0].clone().requires_grad_()
    trainer.update(rows, given)
    assert given.grad is None
    loss.backward()  # which the draft's has left whole
    assert target.lm_head.weight.grad is not None


def test_features_of_a_forward_of_the_trainers_own(target):
    """Of padded rows as they train, they are those that the trainer would make itself."""
    draft = tiny_draft(target, target_layer_ids=(3, 0))
    trainer, rows = DraftTrainer(target, draft), rows_of([20, 12], 3)
    with trainer.watching() as seen, torch.no_grad():
        target(input_ids=rows.ids, attention_mask=(rows.ids != 0).long(), use_cache=False)
    torch.testing.assert_close(seen[0][1, :12], trainer.features(rows)[1, :12], atol=1e-5, rtol=1e-4)
    turned = DraftTrainer(target, tiny_draft(target, target_layer_ids=(0, 3))).features(rows)
    assert torch.equal(torch.cat(turned.chunk(2, dim=-1)[::-1], dim=-1), trainer.features(rows))


def test_rows_without_two_tokens_of_an_answer(target):
    trainer = DraftTrainer(target, tiny_draft(target))
    with pytest.raises(ValueError, match="at least two tokens"):
        trainer.update(Answered(torch.ones(2, 5, dtype=torch.int64), torch.tensor([[False] * 4 + [True]] * 2)))


def test_settings_of_a_trainer(target):
    """Long blocks are trained further out; a gradient cut to nothing changes nothing, though Adam scales it."""
    assert [DraftTrainer(target, tiny_draft(target, block_size=size)).decay for size in (8, 16)] == [4.0, 7.0]
    draft, rows = tiny_draft(target), rows_of([14, 9], 2)
    before = draft.fc.weight.clone()
    DraftTrainer(target, draft, learning_rate=1e-2, decay=2.0, clip=1e-12).update(rows)
    assert (draft.fc.weight - before).abs().max() < 1e-5
    assert DraftTrainer(target, draft, learning_rate=1e-2).update(rows).loss.isfinite()
    assert (draft.fc.weight - before).abs().max() > 5e-3


# ------------------------------------------------------------------------------------------------------------ learning


@pytest.mark.slow
def test_a_draft_learns_while_it_serves():
    """A policy of fixed answers: guesses become right, in the same rollout, once it is told of the new weights."""
    target = tiny_model()
    draft = tiny_draft(target, target_layer_ids=(1, 2, 3))
    prompts, greedily = ragged_prompts([6, 3, 9, 4]), SamplingConfig(max_new_tokens=40, temperature=0.0)
    plain = rollout_of(target).generate(RolloutRequest(*prompts), greedily)
    rollout = speculative_rollout(target, draft)
    untrained = rollout.generate(RolloutRequest(*prompts), greedily)
    assert figures(rollout)["tokens_per_step"] < 1.3
    trainer = DraftTrainer(target, draft, learning_rate=3e-3, anchors=16)
    rows = Answered.of(plain)
    features = trainer.features(rows)
    losses = [float(trainer.update(rows, features).loss) for _ in range(150)]
    assert losses[-1] < 0.2 * losses[0]
    stale = rollout.generate(RolloutRequest(*prompts), greedily)
    assert figures(rollout)["tokens_per_step"] < 1.3
    rollout.sync_weights(1)
    trained = rollout.generate(RolloutRequest(*prompts), greedily)
    assert figures(rollout)["tokens_per_step"] > 4
    for batch in (untrained, stale, trained):
        assert torch.equal(batch.input_ids, plain.input_ids)
        torch.testing.assert_close(batch.logprobs, plain.logprobs, atol=5e-5, rtol=0)


def test_policy_and_draft_train_in_turn(make_engine):
    """As an RL loop has it: answers stay the plain path's for the policy's weights of each step."""
    target = tiny_model()
    draft = tiny_draft(target)
    engine = make_engine(target.train(), learning_rate=1e-3)
    prompts = ragged_prompts([5, 2])
    rollout = speculative_rollout(target, draft)
    trainer = DraftTrainer(target, draft, learning_rate=1e-3, anchors=8)
    for step in range(3):
        sampling = SamplingConfig(max_new_tokens=10, temperature=1.0, seed=step, n_samples_per_prompt=2)
        batch = rollout.generate(RolloutRequest(*prompts), sampling)
        plain = rollout_of(target).generate(RolloutRequest(*prompts), sampling)
        assert torch.equal(batch.input_ids, plain.input_ids)
        torch.testing.assert_close(batch.logprobs, plain.logprobs, atol=5e-5, rtol=0)
        rows = Answered.of(batch)
        with trainer.watching() as seen:
            loss = engine(input_ids=rows.ids, use_cache=False).logits.log_softmax(-1)[..., 3].mean()
        engine.backward(loss)
        engine.step()
        trainer.update(rows, seen[0])
        rollout.sync_weights(step + 1)
        served = SimpleNamespace(draft=rollout._speculation.drafter.draft.model)
        for mine, theirs in zip(served.draft.parameters(), draft.parameters(), strict=True):
            assert torch.equal(mine, theirs)
