# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gdn_kept_block: what comes out for accepted tokens, and is left of them, is what single tokens leave."""

import pytest
import torch
from decode_cases import same_bits
from gdn_decode_cases import SHAPES, Shape
from kept_block_cases import Rollout, by_chance, kept_layer, one_by_one, roll, rows_of_tokens
from tolerances import assert_close, assert_close_but_for_roundings

from deepspeed_hybrid.ops.gdn_decode import gdn_decode_reference
from deepspeed_hybrid.ops.gdn_kept_block import (
    LAG,
    MOST_BESIDE,
    MOST_TOKENS,
    PLACES,
    TAKEN,
    gdn_kept_block,
    gdn_kept_block_op,
    in_state,
)
from deepspeed_hybrid.ops.gdn_windows import gdn_windows

SMALL = Shape(1, 2, 16, 16)
LENGTH = 70


def rolled(layer: dict, tokens: torch.Tensor, schedule, block=gdn_kept_block) -> Rollout:
    layer = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in layer.items()}
    return roll(Rollout(layer, tokens, block, gdn_windows), schedule)


def decoded(layer: dict, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs [B, L, HV * DV], windows and states of decode steps."""
    names = "conv_weight", "conv_bias", "A_log", "dt_bias", "norm_weight", "eps", "key_heads", "rounded_heads"
    named, out = {name: layer[name] for name in names}, []
    named |= {name: layer[name].clone() for name in ("window", "state")}
    for index, rows in enumerate(tokens.unbind(1)):
        where = dict(position=layer["position"] + index, parked=torch.zeros(len(rows), dtype=torch.bool))
        out.append(gdn_decode_reference(rows, **named, **where))
    return torch.stack(out, dim=1), named["window"], named["state"]


@pytest.mark.parametrize(
    "shape", [SHAPES[0], SHAPES[3], SHAPES[4], SHAPES[6]], ids=lambda shape: "-".join(map(str, shape))
)
def test_as_many_decode_steps(shape):
    layer = kept_layer(shape, [14, 3, 40])
    tokens = rows_of_tokens(shape, 3, LENGTH, torch.float32)
    out, window, state = decoded(layer, tokens)
    rollout = rolled(layer, tokens, by_chance(3, (1, 4, 8, 16)))
    assert_close(rollout.outputs(), out)
    assert_close(rollout.settled(), state[:3])
    assert same_bits(rollout.layer["window"], window)


def test_heads_of_16_bits():
    layer = kept_layer(SMALL, [14, 3], True, dtype=torch.float16, weights=torch.float16)
    tokens = rows_of_tokens(SMALL, 2, LENGTH, torch.float16)
    out, *_ = decoded(layer, tokens)
    rollout = rolled(layer, tokens, by_chance(2, (1, 4, 8)))
    assert_close_but_for_roundings(rollout.outputs(), out)


@pytest.mark.parametrize("lengths", [(8,), (1, 8), (4,), (5, 3, 1, 7), (16,), (13, 1, 4, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_those_of_single_tokens(lengths, dtype):
    """Outputs, windows, states and what is beside them, whatever was right, from any position on."""
    positions = list(range(11, 29))
    layer = kept_layer(SMALL, positions, dtype == torch.bfloat16, dtype=dtype, weights=dtype, bias=False)
    tokens = rows_of_tokens(SMALL, len(positions), LENGTH, dtype)
    expected = rolled(layer, tokens, one_by_one(len(positions)))
    for seed in range(2):
        rollout = rolled(layer, tokens, by_chance(len(positions), lengths, seed))
        assert same_bits(rollout.outputs(), expected.outputs())
        assert all(same_bits(rollout.layer[name], expected.layer[name]) for name in ("window", "state"))
        assert all(map(same_bits, rollout.beside(), expected.beside()))


def test_all_rejected_and_all_accepted():
    layer = kept_layer(SMALL, [14, 15, 16])
    tokens = rows_of_tokens(SMALL, 3, LENGTH, torch.float32)
    expected = rolled(layer, tokens, one_by_one(3))
    for length, right in ((8, 1), (8, 8), (16, 16)):
        rollout = rolled(layer, tokens, lambda step, size=length, right=right: (size, torch.full((3,), right)))
        assert same_bits(rollout.outputs(), expected.outputs())


def test_rows_that_are_none_keep_their_bits_whatever_they_hold():
    layer = kept_layer(SMALL, [14, -7])
    for name in ("window", "state"):
        layer[name][1] = float("nan")
    before = {name: layer[name][1].clone() for name in ("window", "state", "keys", "deltas", "decays")}
    rollout = Rollout(layer, rows_of_tokens(SMALL, 2, LENGTH, torch.float32), gdn_kept_block, gdn_windows)
    for _ in range(3):
        rollout.step(8, torch.tensor([5, 0]))
    assert all(torch.isfinite(out).all() for out in rollout.out[0])
    assert all(same_bits(layer[name][1], old) for name, old in before.items())


def test_how_much_is_beside_a_state():
    """No state has any of eight tokens in it, these see two at most, and rings hold what steps find and bring."""
    for prompt in (0, 3, 16, 30):
        position = torch.arange(prompt, prompt + 80)
        begin, last = (in_state(position + index, torch.tensor(prompt)) for index in (0, LAG))
        assert bool((last <= position).all()) and bool((last - begin <= TAKEN).all())
        found = in_state(position - MOST_TOKENS, torch.tensor(prompt))
        assert int((position - found).max()) <= MOST_BESIDE <= PLACES - MOST_TOKENS
        assert bool((begin - found <= TAKEN).all())


def test_opcheck():
    layer = kept_layer(SMALL, [14, 3], True, dtype=torch.bfloat16)
    for name in ("keys", "deltas", "decays"):  # opcheck compares bits, which no NaN has in common with itself
        layer[name].zero_()

    def checked(*args, **named):
        args = (args[0].nan_to_num(), *args[1:])
        torch.library.opcheck(gdn_kept_block_op, args, named)
        return gdn_kept_block_op(*args, **named)

    rollout = Rollout(layer, rows_of_tokens(SMALL, 2, LENGTH, torch.bfloat16), checked, gdn_windows)
    rollout.step(4, torch.tensor([3, 2]))
