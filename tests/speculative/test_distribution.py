# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Sampled answers have the exact joint distribution of the model, whatever is proposed; and their logprobs are its."""

import itertools

import pytest
import torch
from harness import answers
from models import ragged_prompts, tiny_model
from speculative_cases import ScriptedDrafter, speculative_rollout
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from deepspeed_hybrid import RolloutRequest, SamplingConfig

WORDS, TOKENS, DRAWS = 5, 3, 3000
KINDS = {
    "temperature": (dict(temperature=0.8), [TemperatureLogitsWarper(0.8)]),
    "top_k": (dict(temperature=1.0, top_k=3), [TopKLogitsWarper(3)]),
    "top_p": (dict(temperature=1.3, top_p=0.8), [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.8)]),
    "min_p": (dict(temperature=1.0, min_p=0.2), [MinPLogitsWarper(0.2)]),
}


class Stubborn(ScriptedDrafter):
    """Always the same guess for every place, right by accident."""

    def __init__(self, guesses: list[int]):
        super().__init__({}, lambda *_: 0)
        self.guesses = guesses

    def propose(self, state, tokens: int, kv_length: int) -> torch.Tensor:
        return torch.tensor(self.guesses[: tokens - 1]).expand(state.token.numel(), -1)


@pytest.fixture(scope="module")
def speaker():
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=WORDS, pad_token_id=0, eos_token_id=None)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() == 2 else 1)
    return model.eval()


@torch.no_grad()
def joint(model, prompt: torch.Tensor, warpers: list) -> torch.Tensor:
    """[WORDS ** TOKENS], by Hugging Face's forward and warpers over every prefix."""
    warp, total = LogitsProcessorList(warpers), {(): 1.0}
    for _ in range(TOKENS):
        prefixes = list(total)
        ids = torch.stack([torch.cat([prompt, torch.tensor(prefix, dtype=torch.int64)]) for prefix in prefixes])
        probabilities = warp(ids, model(input_ids=ids).logits[:, -1]).softmax(-1)
        total = {
            (*prefix, word): total[prefix] * float(row[word])
            for prefix, row in zip(prefixes, probabilities, strict=True)
            for word in range(WORDS)
        }
    return torch.tensor([total[words] for words in itertools.product(range(WORDS), repeat=TOKENS)])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_joint_of_three_tokens(speaker, kind):
    """Chi-square over all answers that are expected at least five times, and one cell for the rest."""
    options, warpers = kind
    prompt = torch.tensor([3, 1, 4])
    expected = joint(speaker, prompt, warpers) * DRAWS
    likeliest = [int(word) for word in torch.unravel_index(expected.argmax(), (WORDS,) * TOKENS)]
    rollout = speculative_rollout(speaker, Stubborn(likeliest[1:] + [0] * 6), draft_block_size=4)
    sampling = SamplingConfig(max_new_tokens=TOKENS, n_samples_per_prompt=DRAWS, seed=12, **options)
    request = RolloutRequest(prompt[None], torch.ones(1, 3, dtype=torch.int64))
    batch = rollout.generate(request, sampling)
    said = torch.stack(answers(batch))
    cells = (said * torch.tensor([WORDS**2, WORDS, 1])).sum(dim=1)
    counts = torch.bincount(cells, minlength=WORDS**TOKENS).double()
    accepted = rollout.get_last_profile()["speculation"]["tokens_per_step"]
    assert 1.0 < accepted < 2.0  # some drafts were right, and some were not
    assert counts[expected == 0].sum() == 0
    often = expected >= 5
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    wanted = torch.cat([expected[often], expected[~often].sum()[None]]).double()
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    statistic = float(((observed - wanted).square() / wanted).sum())
    assert freedom > 3 and statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_logprobs_are_the_models(speaker):
    """Teacher forced, of what was sampled."""
    target = tiny_model()
    prompts = ragged_prompts([5, 1, 9])
    rollout = speculative_rollout(target)
    for sampling in (SamplingConfig(12, temperature=0.7, seed=3), SamplingConfig(12, temperature=1.0, seed=3)):
        batch = rollout.generate(RolloutRequest(*prompts), sampling)
        ids, mask = prompts
        for row, tokens in enumerate(answers(batch)):
            whole = torch.cat([ids[row][mask[row].bool()], tokens])[None]
            with torch.no_grad():
                logits = target(input_ids=whole, use_cache=False).logits[0, -len(tokens) - 1 : -1]
            expected = (logits / sampling.temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            torch.testing.assert_close(batch.logprobs[row], expected, atol=1e-4, rtol=1e-4)


def test_a_wrong_accept_rule_is_noticed(speaker, monkeypatch):
    """Else the chi-square above could pass without looking: here a draft counts as right wherever it is likely."""
    from deepspeed_hybrid.speculative import speculation

    original = speculation.accept

    def lenient(state, logits, drafts, kind, choose, truncate):
        favoured = logits.clone()
        favoured[:-1].scatter_add_(2, drafts.t()[..., None], torch.full((*drafts.t().shape, 1), 0.5))
        return original(state, favoured, drafts, kind, choose, truncate)

    monkeypatch.setattr(speculation, "accept", lenient)
    with pytest.raises(AssertionError):
        test_the_joint_of_three_tokens(speaker, KINDS["temperature"])
