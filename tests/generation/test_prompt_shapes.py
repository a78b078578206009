# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Shapes of prompt forwards: few of them, every prompt in one, little padding, and never over the budget."""

import random
from types import SimpleNamespace

import pytest
import torch

from deepspeed_hybrid.generation.prefill import TOKEN_BUDGET, token_budget_of
from deepspeed_hybrid.generation.prompt_shapes import (
    MOST_PADDING,
    ROW_BUCKETS,
    SMALL_FORWARD,
    PromptShape,
    next_shape,
    width_bucket,
)


def groups(lengths: list[int], budget: int = TOKEN_BUDGET) -> list[tuple[int, PromptShape | None]]:
    found = []
    while lengths:
        count, shape = next_shape(lengths, budget)
        found.append((count, shape))
        lengths = lengths[count:]
    return found


def test_widths():
    lengths = (1, 31, 32, 33, 96, 97, 128, 129, 256, 257, 320, 321, 512, 513, 1025, 2048, 2049, 8192)
    widths = (32, 32, 32, 64, 96, 128, 128, 160, 256, 320, 320, 384, 512, 640, 1280, 2048, 2560, 8192)
    assert tuple(map(width_bucket, lengths)) == widths
    assert len({width_bucket(length) for length in range(1, TOKEN_BUDGET + 1)}) == 28


def test_a_width_has_little_padding():
    for length in range(1, TOKEN_BUDGET + 1):
        width = width_bucket(length)
        assert length <= width == width_bucket(width)
        assert width - length < 32 or width <= MOST_PADDING * length


@pytest.mark.parametrize(
    "lengths, shapes",
    [
        ([128], [(1, 1, 128, False)]),
        ([100], [(1, 1, 128, True)]),
        ([3, 7, 5], [(3, 3, 32, True)]),
        ([32, 32], [(2, 2, 32, False)]),
        ([128] * 5, [(5, 6, 128, True)]),  # a small forward: a row of padding costs nothing
        ([512] * 5, [(5, 6, 512, True)]),  # a fifth is padding
        ([512] * 9, [(8, 8, 512, False), (1, 1, 512, False)]),
        ([257] * 5, [(4, 4, 320, True), (1, 1, 320, True)]),  # with the columns it would be half
        ([512] * 64, [(16, 16, 512, False)] * 4),
        ([2048] * 5, [(4, 4, 2048, False), (1, 1, 2048, False)]),
        ([10, 8192, 10], [(1, 1, 32, True), (1, 1, 8192, False), (1, 1, 32, True)]),
    ],
    ids=str,
)
def test_groups(lengths, shapes):
    assert groups(lengths) == [(count, PromptShape(*shape)) for count, *shape in shapes]


@pytest.mark.parametrize(
    "lengths, shapes",
    [
        ([512] * 64, [(32, 32, 512, False)] * 2),
        ([2048] * 5, [(4, 4, 2048, False), (1, 1, 2048, False)]),  # a row of padding would be a sixth
        ([512] * 23, [(23, 24, 512, True)]),
        ([512] * 17, [(16, 16, 512, False), (1, 1, 512, False)]),
        ([10, 16384, 10], [(1, 1, 32, True), (1, 1, 16384, False), (1, 1, 32, True)]),
    ],
    ids=str,
)
def test_groups_of_a_large_card(lengths, shapes):
    assert groups(lengths, 2 * TOKEN_BUDGET) == [(count, PromptShape(*shape)) for count, *shape in shapes]


@pytest.mark.parametrize("memory, tokens", [(24, TOKEN_BUDGET), (63, TOKEN_BUDGET), (80, 2 * TOKEN_BUDGET)])
def test_a_large_card_takes_twice_as_many_tokens(monkeypatch, memory, tokens):
    card = SimpleNamespace(total_memory=memory * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert token_budget_of(torch.device("cuda", 0), shared=False) == tokens
    for device, shared in (("cuda:0", True), ("cpu", False)):
        assert token_budget_of(torch.device(device), shared) == TOKEN_BUDGET


def test_a_prompt_over_the_budget_has_no_shape():
    assert groups([8193, 20]) == [(1, None), (1, PromptShape(1, 32, True))]
    assert groups([33], budget=60) == [(1, None)]


def test_any_prompts():
    """Every prompt is in one group, in order; no forward is over the budget, and none pads more than it may."""
    generator = random.Random(0)
    for _ in range(500):
        longest = generator.choice([20, 200, 2000, 10000])
        lengths = [generator.randint(1, longest) for _ in range(generator.randint(1, 300))]
        for count, shape in groups(lengths):
            taken, lengths = lengths[:count], lengths[count:]
            if shape is None:
                assert count == 1 and taken[0] > TOKEN_BUDGET
                continue
            tokens, widest = shape.rows * shape.width, max(taken)
            assert shape.rows in ROW_BUCKETS and count <= shape.rows
            assert shape.width == width_bucket(widest) and tokens <= TOKEN_BUDGET
            assert shape.padded == (count < shape.rows or min(taken) < shape.width)
            assert count == shape.rows or tokens <= max(SMALL_FORWARD, MOST_PADDING * count * widest)
        assert not lengths
