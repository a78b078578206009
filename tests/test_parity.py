# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ragged greedy batches against Hugging Face, one prompt at a time: tokens, logits and logprobs of every family."""

from types import SimpleNamespace

import pytest
import torch
from harness import (
    answers,
    assert_same_answers,
    force_tokens,
    greedy,
    prompt,
    record_logits,
    rollout_of,
    stepwise_logits,
)
from models import FAMILIES, ragged_prompts, solo, tiny_model

pytestmark = pytest.mark.core

LENGTHS = [1, 2, 3, 5, 17, 40, 70]
NEW_TOKENS = 128
RELATIVE = 2e-5  # of the largest logit


# One worker has a family's tests: the oracle takes longer than all of them.
BY_FAMILY = [pytest.param(name, marks=pytest.mark.xdist_group(f"parity of {name}")) for name in FAMILIES]


@pytest.fixture(scope="module", params=BY_FAMILY)
def family(request):
    """A model, ragged prompts, and what plain Hugging Face answers to each prompt alone."""
    model = tiny_model(request.param)
    prompts = ragged_prompts(LENGTHS)
    oracle = [solo(model, prompt(prompts, row), NEW_TOKENS) for row in range(len(LENGTHS))]
    logits = torch.stack([row.logits for row in oracle], dim=1)  # [steps, rows, V]
    return SimpleNamespace(
        model=model, prompts=prompts, oracle=oracle, logits=logits, bound=RELATIVE * float(logits.abs().max())
    )


@pytest.mark.parametrize("samples", [1, 4])
def test_ragged_batch_is_every_prompt_alone(family, samples):
    rollout = rollout_of(family.model)
    seen = record_logits(rollout)

    batch = greedy(rollout, family.prompts, NEW_TOKENS, n_samples_per_prompt=samples)

    # An error of e in every logit moves a logprob by 2 e at most.
    assert_same_answers(batch, family.oracle, samples, atol=2 * family.bound)
    difference = stepwise_logits(seen, len(LENGTHS), samples) - family.logits.repeat_interleave(samples, dim=1)
    assert float(difference.abs().max()) <= family.bound
    assert len(seen) == NEW_TOKENS
    assert batch.finish_reasons == ["length"] * (len(LENGTHS) * samples)


def test_oracle_depends_on_the_context(family):
    """Else every comparison here would pass with a state that is lost."""
    tokens = torch.stack([row.tokens for row in family.oracle])
    assert all(not torch.equal(first, second) for index, first in enumerate(tokens) for second in tokens[:index])
    assert all(len(set(row.tolist())) > 8 for row in tokens)


@pytest.mark.parametrize("rows, length", [(1, 1), (1, 9), (3, 7), (5, 64), (2, 70)])
def test_prefill_without_padding_is_a_plain_forward_to_the_bit(family, rows, length):
    cacheless = set(getattr(family.model.config, "layer_types", None) or ()) == {"linear_attention"}
    if cacheless and length == 1:
        pytest.skip("for one token, transformers' forward without a cache rounds unlike its forward with one")
    prompts = ragged_prompts([length] * rows, seed=3)
    rollout = rollout_of(family.model, use_segki=False)
    seen = record_logits(rollout)

    greedy(rollout, prompts, 1)

    with torch.no_grad():
        plain = family.model(input_ids=prompts[0], use_cache=not cacheless, logits_to_keep=1).logits[:, -1]
    assert len(seen) == 1
    assert torch.equal(seen[0], plain)


@pytest.mark.parametrize("extra", [1, 2, 5, 30])
def test_common_padding_changes_no_bit(family, extra):
    """Columns that are padding in every row."""
    ids, mask = family.prompts
    rows = ids.shape[0]
    padded = (
        torch.cat([torch.full((rows, extra), 7), ids], dim=1),
        torch.cat([torch.zeros(rows, extra).long(), mask], dim=1),
    )
    rollout = rollout_of(family.model)

    plain, wide = greedy(rollout, (ids, mask), 8), greedy(rollout, padded, 8)

    assert torch.equal(wide.input_ids[:, extra:], plain.input_ids)
    assert torch.equal(wide.logprobs, plain.logprobs)


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_steps_are_as_close_to_fp32_as_hugging_face_in_bf16(name):
    """The same rounded weights in fp32 are the oracle; both bf16 runs are fed its tokens."""
    lengths, steps = [2, 9, 17], 12
    model = tiny_model(name).bfloat16()
    exact = tiny_model(name).bfloat16().float()
    prompts = ragged_prompts(lengths)
    oracle = [solo(exact, prompt(prompts, row), steps) for row in range(len(lengths))]
    script = torch.stack([row.tokens for row in oracle])
    exact_logits = torch.stack([row.logits for row in oracle], dim=1)

    rollout = rollout_of(model)
    seen = record_logits(rollout)
    force_tokens(rollout, script)
    batch = greedy(rollout, prompts, steps)

    plain = []
    for row, length in enumerate(lengths):
        fed = torch.cat([prompt(prompts, row), script[row, :-1]])
        with torch.no_grad():
            plain.append(model(input_ids=fed[None, :], use_cache=False).logits[0, length - 1 :].float())
    plain_error = (torch.stack(plain, dim=1) - exact_logits).abs()
    error = (stepwise_logits(seen, len(lengths)) - exact_logits).abs()
    assert answers(batch)[0].tolist() == script[0].tolist()
    assert bool(batch.logprobs.isfinite().all()) and bool((batch.logprobs < 0).all())
    assert float(error.mean()) <= 1.25 * float(plain_error.mean())
    assert float(error.max()) <= 2 * float(plain_error.max())
