# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The demo's task cannot be solved without reading the prompt, and its parts say what they promise."""

import itertools

import pytest
import torch

from deepspeed_hybrid.tools.grpo import group_advantages, policy_loss
from deepspeed_hybrid.tools.task import (
    FORMAT_POINTS,
    LENGTH,
    LETTERS,
    ByteTokenizer,
    ReverseTask,
    transformers_tokenizer,
)

TOKENIZER = ByteTokenizer()
TASK = ReverseTask(TOKENIZER)
PAD, BOS, EOS = TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id
ALL_PROMPTS = ["".join(letters) + "=" for letters in itertools.product(LETTERS, repeat=LENGTH)]


def reward(prompts: list[str], answers: list[list[int]]) -> torch.Tensor:
    """[R]; short answers are padded behind their end."""
    lengths = torch.tensor([len(answer) for answer in answers])
    rows = [answer + [PAD] * (TASK.answer_width - len(answer)) for answer in answers]
    return TASK.points(prompts, torch.tensor(rows), lengths).mean(dim=1)


@pytest.mark.parametrize("text", ["", "abc=", "naïve Ω 漢字 🙂", "\x00\x7f"])
def test_tokenizer_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text.encode())
    assert all(TOKENIZER.first_byte <= token < TOKENIZER.vocab_size for token in ids)
    assert TOKENIZER.decode([BOS, *ids, EOS, PAD]) == text


@pytest.mark.parametrize("text", ["abc=", "naïve Ω 漢字 🙂", " two  spaces\n", "\x00\x7f"])
def test_transformers_tokenizer_has_the_same_ids(text):
    tokenizer = transformers_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == [BOS, *TOKENIZER.encode(text)]
    assert tokenizer.decode([*ids, EOS, PAD], skip_special_tokens=True) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (PAD, BOS, EOS)
    assert len(tokenizer) == TOKENIZER.vocab_size


def test_tokenizer_survives_bytes_that_are_no_text():
    assert TOKENIZER.decode([TOKENIZER.first_byte + 0xFF]) == "\ufffd"


def test_prompts_are_padded_on_the_left():
    ids, mask = TOKENIZER.pad(["ab", "abcd"])
    assert ids.tolist() == [[PAD, PAD, BOS, *TOKENIZER.encode("ab")], [BOS, *TOKENIZER.encode("abcd")]]
    assert mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]


def test_prompts_follow_the_generator_and_differ():
    first, again = (TASK.prompts(50, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first == again
    assert set(first) <= set(ALL_PROMPTS) and len(set(first)) > 20


def test_the_right_answer_is_worth_one():
    right = [[*TOKENIZER.encode(prompt[:LENGTH][::-1]), EOS] for prompt in ALL_PROMPTS]
    assert reward(ALL_PROMPTS, right).tolist() == pytest.approx([1.0] * len(ALL_PROMPTS))


@pytest.mark.parametrize(
    "answer, expected",
    [
        pytest.param([*TOKENIZER.encode("dba"), 80], 0.75, id="no-end"),
        pytest.param([*TOKENIZER.encode("dbb"), EOS], 0.75 + FORMAT_POINTS / 4, id="one-letter-wrong"),
        pytest.param([*TOKENIZER.encode("dbz"), EOS], 0.75, id="not-a-letter"),
        pytest.param([*TOKENIZER.encode("d"), EOS], 0.25, id="too-short"),
        pytest.param([EOS], 0.0, id="nothing"),
        pytest.param([PAD] * 4, 0.0, id="sampled-pads"),
    ],
)
def test_partial_credit(answer, expected):
    assert float(reward(["abd="], [answer])) == pytest.approx(expected)


def test_what_stands_behind_the_end_is_worth_nothing():
    answers = torch.tensor([[*TOKENIZER.encode("dba"), EOS]])
    points = TASK.points(["abd="], answers, torch.tensor([2]))
    assert points.tolist() == [[1.0, 1.0, 0.0, 0.0]]


def test_random_bytes_and_constant_answers_are_far_from_learned():
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(TOKENIZER.vocab_size, (4096, TASK.answer_width), generator=generator)
    prompts = TASK.prompts(4096, generator)
    assert float(TASK.points(prompts, random, torch.full((4096,), TASK.answer_width)).mean()) < 0.05
    for constant in ALL_PROMPTS:
        answer = [*TOKENIZER.encode(constant[:LENGTH]), EOS]
        assert float(reward(ALL_PROMPTS, [answer] * len(ALL_PROMPTS)).mean()) < 0.5


def test_advantages_compare_the_samples_of_one_prompt():
    points = torch.tensor([[1.0, 0.5], [0.0, 0.5], [0.3, 0.0], [0.3, 1.0]])
    advantages = group_advantages(points, samples=2)
    assert advantages.view(2, 2, 2).sum(dim=1).abs().max() < 1e-6
    assert advantages[:2, 1].tolist() == [0.0, 0.0]  # equal samples teach nothing
    assert advantages[0, 0] > 0 > advantages[1, 0] and advantages[3, 1] > 0 > advantages[2, 1]


def policy_inputs() -> dict[str, torch.Tensor]:
    """Two rows of three tokens, the second of them one token shorter; on policy."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 7, generator=generator).requires_grad_()
    tokens = torch.tensor([[1, 5, 2], [6, 0, 3]])
    logprobs = logits.detach().log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]
    advantages = torch.randn(2, 3, generator=generator)
    real = torch.tensor([[True, True, True], [True, True, False]])
    return dict(logits=logits, tokens=tokens, rollout_logprobs=logprobs, advantages=advantages, real=real)


def test_on_policy_loss_has_the_gradient_of_reinforce():
    inputs = policy_inputs()
    loss, logprobs = policy_loss(**inputs, clip=0.2, entropy_weight=0.0)
    assert torch.equal(logprobs, inputs["rollout_logprobs"])
    (gradient,) = torch.autograd.grad(loss, inputs["logits"])

    score = torch.nn.functional.one_hot(inputs["tokens"], 7) - inputs["logits"].softmax(-1)
    expected = -score * (inputs["advantages"] * inputs["real"])[:, :, None] / 5
    torch.testing.assert_close(gradient, expected.detach(), atol=1e-7, rtol=1e-5)


def test_clipped_tokens_and_tokens_behind_the_end_have_no_gradient():
    inputs = policy_inputs()
    inputs["advantages"] = inputs["advantages"].abs()
    inputs["rollout_logprobs"] = inputs["rollout_logprobs"] - torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    loss, _ = policy_loss(**inputs, clip=0.2, entropy_weight=0.0)
    (gradient,) = torch.autograd.grad(loss, inputs["logits"])
    moved = gradient.abs().amax(dim=-1) > 0
    assert moved.tolist() == [[False, True, True], [True, True, False]]


def test_entropy_bonus_pulls_towards_the_uniform_distribution():
    inputs = policy_inputs()
    inputs["advantages"] = torch.zeros(2, 3)
    loss, _ = policy_loss(**inputs, clip=0.2, entropy_weight=0.5)
    distribution = inputs["logits"].softmax(-1)
    entropy = -(distribution * distribution.log()).sum(-1)
    assert float(loss.detach()) == pytest.approx(-0.5 * float(entropy[inputs["real"]].detach().mean()), rel=1e-5)
