# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Truncation keeps what transformers' processors keep, and tokens come out of the engine as often as they should."""

from types import SimpleNamespace

import pytest
import torch
from harness import rollout_of
from hypothesis import given, settings
from hypothesis import strategies as st
from models import COMMON, GDN, MROPE
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation.sampling import penalise_repetition
from deepspeed_hybrid.ops.truncate_scores import truncate_scores

pytestmark = pytest.mark.core

ROUNDING = 1e-5  # how near a threshold, relatively, two correct implementations may differ


def warpers(
    top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 1.0, penalty: float = 1.0
) -> LogitsProcessorList:
    """transformers' own, in the order in which its generate() has them."""
    chosen = LogitsProcessorList()
    if penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(penalty))
    if temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(temperature))
    if top_k > 0:
        chosen.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chosen.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        chosen.append(MinPLogitsWarper(min_p))
    return chosen


def truncated(scores: torch.Tensor, rows: list[dict]) -> torch.Tensor:
    """Ours, with the options of each row."""
    return truncate_scores(
        scores,
        top_k=torch.tensor([row.get("top_k", 0) for row in rows]),
        top_p_tail=torch.tensor([1 - row.get("top_p", 1.0) for row in rows], dtype=torch.float32),
        min_p=torch.tensor([row.get("min_p", 0.0) for row in rows], dtype=torch.float32),
    )


def expected(scores: torch.Tensor, rows: list[dict]) -> torch.Tensor:
    """transformers', a row at a time."""
    none = torch.zeros(1, 1, dtype=torch.long)
    return torch.cat([warpers(**row)(none, scores[index : index + 1].clone()) for index, row in enumerate(rows)])


def random_scores(kind: str, rows: int, vocab_size: int) -> torch.Tensor:
    torch.manual_seed(vocab_size)
    scores = torch.randn(rows, vocab_size)
    return {
        "random": 3 * scores,
        "peaked": 30 * scores,
        "flat": 1e-3 * scores,
        "all equal": torch.zeros_like(scores),
        "ties": (2 * scores).round(),
        "far from zero": 3 * scores - 500,
    }[kind]


ROWS = [
    {},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"top_p": 1e-12},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 0.7},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.02},
    {"top_p": 0.5, "min_p": 0.3},
    {"top_k": 2, "min_p": 0.6},
]


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 33, 257, 1000])
@pytest.mark.parametrize("kind", ["random", "peaked", "flat", "all equal", "ties", "far from zero"])
def test_a_batch_of_rows_with_options_of_their_own(kind, vocab_size):
    scores = random_scores(kind, len(ROWS), vocab_size)
    before = scores.clone()

    kept, theirs = truncated(scores, ROWS), expected(scores, ROWS)

    if kind in ("ties", "all equal"):  # which of equally likely tokens they keep is the choice of an unstable sort
        kept, theirs = (side.sort(dim=1).values for side in (kept, theirs))
    assert torch.equal(kept, theirs)
    assert torch.equal(scores, before)
    assert bool((kept > float("-inf")).any(dim=1).all())


@pytest.mark.parametrize("row", ROWS[1:], ids=str)
def test_temperature_comes_before_truncation(row):
    logits = random_scores("random", 4, 50)
    kept = truncated(logits / 0.6, [row] * 4)
    assert torch.equal(kept, warpers(temperature=0.6, **row)(torch.zeros(4, 1).long(), logits.clone()))


def test_scores_masked_before_stay_out():
    scores = random_scores("random", 3, 20)
    scores[:, 4:] = float("-inf")
    rows = [{"top_k": 9}, {"top_p": 0.99}, {"min_p": 0.01}]
    assert torch.equal(truncated(scores, rows), expected(scores, rows))


def margins(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """How far each token's probability, or cumulative probability, is from a threshold; [V], relative."""
    after_k = warpers(top_k=top_k)(torch.zeros(1, 1).long(), scores.clone())[0].double()
    ascending, order = after_k.sort()
    to_tail = (ascending.softmax(-1).cumsum(-1) - (1 - top_p)).abs()
    after_p = warpers(top_k=top_k, top_p=top_p)(torch.zeros(1, 1).long(), scores.clone())[0].double()
    probabilities = after_p.softmax(-1)
    to_floor = (probabilities / (min_p * probabilities.max()) - 1).abs() if min_p else torch.ones_like(probabilities)
    return torch.minimum(torch.empty_like(to_tail).scatter_(0, order, to_tail), to_floor)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    values=st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.floats(2**-10, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_any_row_keeps_what_transformers_keeps(values, top_k, top_p, min_p):
    scores = torch.tensor([values])
    options = dict(top_k=top_k, top_p=top_p, min_p=min_p)

    kept = truncated(scores, [options])[0]

    theirs = warpers(**options)(torch.zeros(1, 1).long(), scores.clone())[0]
    if not torch.equal(kept.sort().values, theirs.sort().values):
        assert bool((margins(scores, **options)[kept != theirs] < ROUNDING).all())
    assert bool(((kept == scores[0]) | (kept == float("-inf"))).all())
    assert float(kept.max()) == float(scores.max())


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(data=st.data(), vocab_size=st.integers(1, 40), penalty=st.floats(0.125, 8.0, width=32))
def test_repetition_penalty_is_transformers(data, vocab_size, penalty):
    values = st.floats(-60, 60, width=32)
    logits = torch.tensor([data.draw(st.lists(values, min_size=vocab_size, max_size=vocab_size)) for _ in range(2)])
    ids = torch.tensor([data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=5, max_size=5)) for _ in range(2)])
    seen = torch.zeros(2, vocab_size, dtype=torch.bool).scatter_(1, ids, True)

    scores = penalise_repetition(logits, seen, torch.tensor([penalty, 1.0]))

    assert torch.equal(scores[:1], RepetitionPenaltyLogitsProcessor(penalty)(ids[:1], logits[:1]))
    assert torch.equal(scores[1], logits[1])


def test_repetition_penalty_of_bf16_logits_is_fp32():
    logits = torch.tensor([[1.0, -3.0, 2.0]]).bfloat16()
    scores = penalise_repetition(logits, torch.tensor([[True, True, False]]), torch.tensor([1.3]))
    torch.testing.assert_close(scores, torch.tensor([[1 / 1.3, -3.9, 2.0]]), rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------------ the whole engine

VOCAB, SAMPLES = 17, 6000
PROMPT = torch.tensor([[3, 9, 9, 14, 5]])
OPTIONS = {
    "plain": {},
    "cold": dict(temperature=0.6),
    "hot": dict(temperature=2.5),
    "top-k": dict(top_k=5),
    "top-p": dict(top_p=0.7),
    "min-p": dict(min_p=0.15),
    "penalty": dict(repetition_penalty=1.9),
    "all": dict(temperature=1.4, top_k=11, top_p=0.92, min_p=0.03, repetition_penalty=1.3),
}


@pytest.fixture(scope="module")
def bench():
    """A hybrid model with 17 tokens, and Hugging Face's logits of the first token and of the second after each."""
    torch.manual_seed(3)
    small = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        rope_parameters={**MROPE, "partial_rotary_factor": 0.5},
    )
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**COMMON, **GDN, **small})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.01, 0.5).log())
        continued = torch.cat([PROMPT.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], dim=1)
        first = model(PROMPT).logits[:, -1].float()
        second = model(continued).logits[:, -1].float()
    return SimpleNamespace(model=model, rollout=rollout_of(model), continued=continued, first=first, second=second)


def distributions(
    bench, temperature: float = 1.0, repetition_penalty: float = 1.0, **truncation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact log-probabilities of the first token [1, V], and of the second after each first [V, V]."""
    processors = warpers(temperature=temperature, penalty=repetition_penalty, **truncation)
    return (
        processors(PROMPT, bench.first.clone()).log_softmax(-1),
        processors(bench.continued, bench.second.clone()).log_softmax(-1),
    )


def sample(bench, prompts: int = 1, **options):
    request = RolloutRequest(PROMPT.repeat(prompts, 1), torch.ones(prompts, PROMPT.shape[1]).long())
    options = {"max_new_tokens": 2, "n_samples_per_prompt": SAMPLES, "seed": 11, **options}
    return bench.rollout.generate(request, SamplingConfig(**options))


def chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The p-value of Pearson's test; cells that expect fewer than 5 are put together. None may be impossible."""
    counts, wanted = counts.double().flatten(), probabilities.double().flatten() * counts.sum()
    assert int(counts[wanted == 0].sum()) == 0, "a token came out that cannot"
    rare = wanted < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    possible = wanted > 1e-9
    counts, wanted = counts[possible], wanted[possible]
    assert len(wanted) >= 3, "too few cells to test anything"
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2).double(), statistic / 2))


def pair_counts(tokens: torch.Tensor) -> torch.Tensor:
    """[V, V] from answers [N, 2]."""
    return torch.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2).view(VOCAB, VOCAB)


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_come_as_often_as_they_should(bench, name):
    first, second = distributions(bench, **OPTIONS[name])

    tokens = sample(bench, **OPTIONS[name]).input_ids[:, PROMPT.shape[1] :]

    counts = pair_counts(tokens)
    assert chi_square_p(counts.sum(1), first.exp()) > 1e-4
    assert chi_square_p(counts, first[0].exp()[:, None] * second.exp()) > 1e-4


def test_tokens_of_equal_prompts_are_independent(bench):
    """The noise must differ between requests as it does between samples."""
    first, second = distributions(bench)
    batch = sample(bench, prompts=1000, n_samples_per_prompt=1, seed=-4)
    counts = pair_counts(batch.input_ids[:, PROMPT.shape[1] :])
    assert chi_square_p(counts, first[0].exp()[:, None] * second.exp()) > 1e-4


@pytest.mark.parametrize("name, other", [("plain", "cold"), ("plain", "hot"), ("plain", "penalty"), ("hot", "all")])
def test_the_statistic_tells_distributions_apart(bench, name, other):
    """Else the tests above would pass with an option that is ignored."""
    tokens = sample(bench, **OPTIONS[name]).input_ids[:, PROMPT.shape[1] :]
    first, second = (table.exp().clamp(min=1e-6) for table in distributions(bench, **OPTIONS[other]))
    assert chi_square_p(pair_counts(tokens), first[0][:, None] * second) < 1e-8


@pytest.mark.parametrize("name", OPTIONS)
def test_truncation_drops_tokens(bench, name):
    """Else the truncation cases would be the plain one."""
    possible = (distributions(bench, **OPTIONS[name])[1] > float("-inf")).sum(1)
    truncating = {"top_k", "top_p", "min_p"} & set(OPTIONS[name])
    assert bool((possible.float().mean() < VOCAB - 1) == bool(truncating))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_logprobs_are_hugging_faces(bench, name, mode):
    first, second = distributions(bench, **(OPTIONS[name] if mode == "processed" else {}))

    batch = sample(bench, logprobs_mode=mode, n_samples_per_prompt=64, **OPTIONS[name])

    tokens = batch.input_ids[:, PROMPT.shape[1] :]
    wanted = torch.stack([first[0][tokens[:, 0]], second[tokens[:, 0], tokens[:, 1]]], dim=1)
    assert batch.logprobs.dtype == torch.float32
    torch.testing.assert_close(batch.logprobs, wanted, atol=5e-5, rtol=0)


@pytest.mark.parametrize("penalty", [1.0, 1.9])
@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_greedy_logprobs_are_those_of_temperature_one(bench, mode, penalty):
    """Truncation says nothing at temperature 0; the penalty does."""
    first, second = distributions(bench, repetition_penalty=penalty)

    batch = sample(
        bench,
        n_samples_per_prompt=1,
        temperature=0.0,
        top_k=2,
        top_p=0.1,
        min_p=0.9,
        logprobs_mode=mode,
        repetition_penalty=penalty,
    )

    one, two = batch.input_ids[0, PROMPT.shape[1] :].tolist()
    assert (one, two) == (int(first.argmax()), int(second[one].argmax()))
    if mode == "raw":
        first, second = distributions(bench)
    wanted = torch.stack([first[0, one], second[one, two]])
    torch.testing.assert_close(batch.logprobs[0], wanted, atol=5e-5, rtol=0)


def test_logprobs_are_zero_after_the_end(bench):
    """Rows that stop at the first token, and rows that do not."""
    likeliest = int(bench.first.argmax())
    batch = sample(bench, n_samples_per_prompt=64, stop_token_ids=[likeliest], max_new_tokens=4)
    lengths = batch.response_lengths
    ended = torch.arange(batch.logprobs.shape[1])[None, :] >= lengths[:, None]
    assert 0 < int((lengths == 1).sum()) < 64
    assert torch.equal(batch.logprobs == 0.0, ended)


def test_own_repetition_penalty_overrules_generation_configs(bench):
    config = bench.model.generation_config
    plain = sample(bench, n_samples_per_prompt=50)
    penalised = sample(bench, n_samples_per_prompt=50, repetition_penalty=1.9)
    try:
        config.repetition_penalty = 1.9
        inherited = sample(bench, n_samples_per_prompt=50)
        switched_off = sample(bench, n_samples_per_prompt=50, repetition_penalty=1.0)
    finally:
        config.repetition_penalty = None
    assert not torch.equal(plain.logprobs, penalised.logprobs)
    assert torch.equal(inherited.logprobs, penalised.logprobs)
    assert torch.equal(switched_off.logprobs, plain.logprobs)


@pytest.mark.parametrize("temperature", [1e-8, 1e-30, 1e-42])
def test_a_tiny_temperature_is_greedy(bench, temperature):
    greedy = sample(bench, n_samples_per_prompt=8, temperature=0.0)
    cold = sample(bench, n_samples_per_prompt=8, temperature=temperature)
    assert torch.equal(cold.input_ids, greedy.input_ids)
    assert bool((cold.logprobs == 0.0).all())
