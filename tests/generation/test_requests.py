# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""From a request to checked rows and options."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.runtime.rollout import base
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Tokenizer
from transformers import GenerationConfig

from deepspeed_hybrid import SamplingConfig
from deepspeed_hybrid.generation.loop import seen_tokens
from deepspeed_hybrid.generation.requests import (
    Prompts,
    check_positions,
    check_prompts,
    check_sampling,
    fresh_seed,
    needed_tokens,
    pad_id,
    refuse_processors,
    stop_ids,
)
from deepspeed_hybrid.generation.sampling import SamplingKind

VOCAB, CPU = 20, torch.device("cpu")
CALM = settings(max_examples=300, deadline=None, derandomize=True, database=None)

rows_of_bits = st.integers(1, 6).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=1, max_size=4)
)


@CALM
@given(mask=rows_of_bits, data=st.data())
def test_exactly_the_left_padded_masks_are_accepted(mask, data):
    width = len(mask[0])
    ids = torch.tensor([[data.draw(st.integers(0, VOCAB - 1)) for _ in range(width)] for _ in mask])
    left_padded = all(any(row) and row == sorted(row) for row in mask)
    try:
        prompts = check_prompts(ids, torch.tensor(mask), VOCAB, CPU)
    except ValueError as error:
        assert not left_padded and "prompt_attention_mask row" in str(error)
        return
    assert left_padded
    assert prompts.lengths == [sum(row) for row in mask]
    assert torch.equal(prompts.ids, ids * torch.tensor(mask))


@CALM
@given(ids=st.lists(st.integers(-3, VOCAB + 3), min_size=1, max_size=5), pads=st.integers(0, 4))
def test_exactly_the_vocabulary_is_accepted_where_it_is_read(ids, pads):
    ids, mask = torch.tensor([ids]), (torch.arange(len(ids)) >= min(pads, len(ids) - 1)).long()[None, :]
    inside = all(0 <= token < VOCAB for token in ids[mask.bool()].tolist())
    try:
        check_prompts(ids, mask, VOCAB, CPU)
    except ValueError as error:
        assert not inside and "prompt_ids row 0" in str(error)
        return
    assert inside


def test_prompts_are_a_copy():
    ids, mask = torch.tensor([[5, 1, 2]]), torch.tensor([[0, 1, 1]])
    prompts = check_prompts(ids, mask, VOCAB, CPU)
    prompts.ids.zero_()
    assert ids.tolist() == [[5, 1, 2]]


@pytest.mark.parametrize("shape, mask_shape", [((2, 3), (2, 4)), ((3,), (3,)), ((1, 2, 3), (1, 2, 3))])
def test_shapes(shape, mask_shape):
    with pytest.raises(ValueError, match=r"prompt_ids and prompt_attention_mask must both be \[B, T\]"):
        check_prompts(torch.ones(shape).long(), torch.ones(mask_shape).long(), VOCAB, CPU)


@pytest.mark.parametrize(
    "ids, mask, name", [(None, None, "prompt_ids"), (torch.ones(1, 1), [[1]], "prompt_attention_mask")]
)
def test_what_is_no_tensor(ids, mask, name):
    with pytest.raises(ValueError, match=f"{name} must be a tensor; got (NoneType|list)"):
        check_prompts(ids, mask, VOCAB, CPU)


def test_the_first_bad_row_is_named():
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 1], [0, 0, 0]])
    with pytest.raises(ValueError, match="row 2 has holes"):
        check_prompts(torch.ones(4, 3).long(), mask, VOCAB, CPU)


def plan(generation_config=None, tokenizer=None, sampling=SamplingConfig, **options):
    config = sampling(**{"max_new_tokens": 4, **options})
    return check_sampling(config, VOCAB, generation_config, tokenizer or Tokenizer())


@pytest.mark.parametrize(
    "options, kind",
    [
        (dict(temperature=0.0), SamplingKind()),
        (dict(temperature=0.0, top_k=3, top_p=0.5, min_p=0.1), SamplingKind()),
        (dict(), SamplingKind(sampled=True)),
        (dict(top_k=0), SamplingKind(sampled=True)),
        (dict(top_k=VOCAB), SamplingKind(sampled=True)),
        (dict(top_k=VOCAB - 1), SamplingKind(sampled=True, truncated=True)),
        (dict(top_p=0.99), SamplingKind(sampled=True, truncated=True)),
        (dict(min_p=0.01), SamplingKind(sampled=True, truncated=True)),
        (dict(repetition_penalty=1.0), SamplingKind(sampled=True)),
        (dict(repetition_penalty=0.9, temperature=0.0), SamplingKind(penalised=True)),
        (dict(logprobs_mode="raw"), SamplingKind(sampled=True, raw_logprobs=True)),
    ],
    ids=str,
)
def test_kinds(options, kind):
    assert plan(**options).kind == kind


def test_deepspeeds_sampling_has_our_defaults():
    ours, theirs = plan(seed=3), plan(sampling=base.SamplingConfig)
    assert {**vars(ours), "seed": 0} == {**vars(theirs), "seed": 0}
    assert theirs.penalty == 1.0 and theirs.min_p == 0.0 and theirs.stop_ids == ()


@pytest.mark.parametrize(
    "own, theirs, penalty", [(None, None, 1.0), (None, 1.3, 1.3), (1.2, 1.3, 1.2), (1.0, 1.3, 1.0), (None, 1.0, 1.0)]
)
def test_whose_repetition_penalty(own, theirs, penalty):
    made = plan(GenerationConfig(repetition_penalty=theirs), repetition_penalty=own)
    assert made.penalty == penalty and made.kind.penalised == (penalty != 1.0)


@pytest.mark.parametrize("tokenizer_eos", [None, 7, [7, 3], []])
@pytest.mark.parametrize("config_eos", [None, 3, [3, 9]])
@pytest.mark.parametrize("extra", [None, [], [1, 3]])
def test_stop_ids_are_the_union(tokenizer_eos, config_eos, extra):
    def ids(source) -> set[int]:
        return {source} if isinstance(source, int) else set(source or ())

    wanted = ids(tokenizer_eos) | ids(config_eos) | ids(extra)
    assert stop_ids(Tokenizer(eos=tokenizer_eos), GenerationConfig(eos_token_id=config_eos), extra) == tuple(
        sorted(wanted)
    )
    assert stop_ids(SimpleNamespace(), None, None) == ()


@pytest.mark.parametrize("pad, eos, wanted", [(0, 7, 0), (5, None, 5), (None, 7, 7), (None, [7, 3], 7), (None, 0, 0)])
def test_pad_id(pad, eos, wanted):
    assert pad_id(Tokenizer(pad=pad, eos=eos)) == wanted


def test_positions_at_the_limit():
    check_positions([3, 7], plan(max_new_tokens=5), 12)
    check_positions([3, 7], plan(max_new_tokens=500), None)
    with pytest.raises(ValueError, match="7 tokens.*max_new_tokens=6.*13.*12"):
        check_positions([3, 7], plan(max_new_tokens=6), 12)


def test_rows_are_not_listed_before_anybody_knows_that_they_fit():
    many = plan(max_new_tokens=5, n_samples_per_prompt=2**31 - 1)
    assert needed_tokens([3, 7], many) == 12
    check_positions([3, 7], many, 12)


def test_a_new_generation_config_is_accepted():
    refuse_processors(GenerationConfig())
    refuse_processors(None)
    refuse_processors(
        GenerationConfig(
            do_sample=True,
            temperature=0.6,
            top_k=20,
            top_p=0.8,
            max_length=20,
            max_new_tokens=8,
            eos_token_id=[1, 2],
            pad_token_id=1,
            use_cache=True,
        )
    )


def test_empty_lists_in_a_generation_config_set_nothing():
    refuse_processors(
        SimpleNamespace(suppress_tokens=[], begin_suppress_tokens=(), sequence_bias={}, bad_words_ids=None)
    )


@pytest.mark.parametrize(
    "eos, ids",
    [(3, (3,)), (np.int64(3), (3,)), ([4, np.int32(2)], (2, 4)), ((7,), (7,)), (torch.tensor(5), (5,)), ([], ())],
    ids=str,
)
def test_stop_ids_come_as_any_integers(eos, ids):
    assert stop_ids(SimpleNamespace(eos_token_id=eos), None, None) == ids
    assert stop_ids(SimpleNamespace(), SimpleNamespace(eos_token_id=eos), [9]) == tuple(sorted((*ids, 9)))


@pytest.mark.parametrize(
    "pad, eos, expected", [(np.int64(6), 2, 6), ([5, 6], 2, 5), (None, [8, 9], 8), (0, 2, 0)], ids=str
)
def test_pad_id_is_the_first_that_there_is(pad, eos, expected):
    chosen = pad_id(SimpleNamespace(pad_token_id=pad, eos_token_id=eos))
    assert chosen == expected and type(chosen) is int


@pytest.mark.parametrize("wrong", [-1, "</s>", 1.5, [3, None]], ids=str)
def test_what_is_no_id_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match="tokenizer.eos_token_id"):
        stop_ids(SimpleNamespace(eos_token_id=wrong), None, None)
    with pytest.raises(ValueError, match="tokenizer.pad_token_id"):
        pad_id(SimpleNamespace(pad_token_id=wrong, eos_token_id=2))


def test_fresh_seeds_follow_torch():
    torch.manual_seed(1)
    first = [fresh_seed() for _ in range(4)]
    torch.manual_seed(1)
    assert [fresh_seed() for _ in range(4)] == first
    assert len(set(first)) == 4 and all(0 <= seed < 2**63 for seed in first)


def test_seen_tokens_leave_padding_out():
    prompts = Prompts(ids=torch.tensor([[0, 0, 4, 4], [3, 0, 5, 6]]), lengths=[2, 4])
    seen = seen_tokens(prompts, [1, 0, 0], 8)
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [[0, 3, 5, 6], [4], [4]]
