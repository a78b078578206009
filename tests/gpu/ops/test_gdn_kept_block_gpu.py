# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gdn_kept_block on a GPU at the sizes of a model, next to decode steps in fp32, and to itself token by token."""

import pytest
import torch
from decode_cases import same_bits
from gdn_decode_cases import REAL, Shape, oracle
from glue_cases import moved, poisoned_outputs
from kept_block_cases import RINGS, Rollout, by_chance, kept_layer, one_by_one, roll, rows_of_tokens
from tolerances import assert_close_but_for_roundings

from deepspeed_hybrid.ops.gdn_decode import gdn_decode, gdn_decode_reference
from deepspeed_hybrid.ops.gdn_kept_block import gdn_kept_block, gdn_kept_block_reference
from deepspeed_hybrid.ops.gdn_windows import gdn_windows, gdn_windows_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = Shape(1, 2, 128, 128)
BLOCKS = [(8,), (4,), (16,), (5, 3, 1, 7), (1, 16, 11)]


def models_layer(shape: Shape, positions: list[int], **options) -> dict:
    """In bf16, behind prompts of these lengths."""
    options = {"dtype": torch.bfloat16, "weights": torch.bfloat16} | options
    return moved(kept_layer(shape, positions, True, bias=False, **options), "cuda")


def rolled(layer: dict, tokens: torch.Tensor, schedule, block=gdn_kept_block, windows=gdn_windows) -> Rollout:
    layer = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in layer.items()}
    with poisoned_outputs():
        return roll(Rollout(layer, tokens, block, windows), schedule)


def tokens_for(shape: Shape, rows: int, length: int) -> torch.Tensor:
    return rows_of_tokens(shape, rows, length, torch.bfloat16).cuda()


def assert_same(one: Rollout, other: Rollout) -> None:
    """Outputs, windows, states, and what is beside them."""
    assert same_bits(one.outputs(), other.outputs())
    assert all(same_bits(one.layer[name], other.layer[name]) for name in ("window", "state"))
    assert all(map(same_bits, one.beside(), other.beside()))


def decoded(layer: dict, tokens: torch.Tensor, op=gdn_decode) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs [B, L, HV * DV], windows and states of decode steps."""
    names = "conv_weight", "conv_bias", "A_log", "dt_bias", "norm_weight", "eps", "key_heads", "rounded_heads"
    named, out = {name: layer[name] for name in names}, []
    named |= {name: layer[name].clone() for name in ("window", "state")}
    parked = torch.zeros(len(tokens), dtype=torch.bool, device="cuda")
    for index, rows in enumerate(tokens.unbind(1)):
        out.append(op(rows, **named, position=layer["position"] + index, parked=parked))
    return torch.stack(out, dim=1), named["window"], named["state"]


@pytest.mark.parametrize("shape", [SMALL, Shape(3, 3, 128, 128), Shape(2, 6, 128, 128), REAL], ids=str)
def test_as_many_decode_steps(shape):
    """Queries meet keys that are rounded, where decode steps meet a whole state: a rounding more."""
    positions = list(range(9, 27, 2))
    layer, tokens = models_layer(shape, positions), tokens_for(shape, len(positions), 40)
    out, window, state = decoded(layer, tokens, gdn_decode_reference)
    rollout = rolled(layer, tokens, by_chance(len(positions), (1, 4, 8, 16)))
    assert_close_but_for_roundings(rollout.outputs(), out)
    assert_close_but_for_roundings(rollout.settled().bfloat16(), state[: len(positions)].bfloat16())
    assert same_bits(rollout.layer["window"], window)


def test_as_near_to_float64_as_decode_steps():
    """Whole sequences from their beginning, in float64 but for what comes in."""
    shape, rows = Shape(2, 4, 128, 128), 40
    layer, tokens = models_layer(shape, [0] * rows), tokens_for(shape, rows, 60)
    for name in ("window", "state"):
        layer[name].zero_()
    exact, exact_state = oracle(shape, moved(layer, "cpu"), tokens.cpu(), dtype=torch.bfloat16)

    def apart(actual: torch.Tensor, expected: torch.Tensor) -> float:
        return float((actual.cpu().double() - expected).norm() / expected.norm())

    out, _, state = decoded(layer, tokens)
    for lengths in ((1,), (8,), (16, 5)):
        rollout = rolled(layer, tokens, by_chance(rows, lengths))
        assert apart(rollout.outputs(), exact) < 1.05 * apart(out, exact)
        assert apart(rollout.settled(), exact_state) < 1.001 * apart(state[:rows], exact_state)


def test_the_reference():
    layer, tokens = models_layer(SMALL, [14, 3, 30]), tokens_for(SMALL, 3, 60)
    expected = rolled(layer, tokens, by_chance(3, (8,)), gdn_kept_block_reference, gdn_windows_reference)
    rollout = rolled(layer, tokens, by_chance(3, (8,)))
    assert_close_but_for_roundings(rollout.outputs(), expected.outputs())
    assert float((rollout.outputs() == expected.outputs()).float().mean()) > 0.99


@pytest.mark.parametrize("lengths", BLOCKS, ids=str)
def test_bits_are_those_of_single_tokens(lengths):
    """From every place of a block of sixteen, over two of them and more, several turns of each group."""
    positions = list(range(11, 29)) * 2
    layer, tokens = models_layer(Shape(8, 16, 128, 128), positions), tokens_for(Shape(8, 16, 128, 128), 36, 45)
    expected = rolled(layer, tokens, one_by_one(36))
    for seed in range(2):
        assert_same(rolled(layer, tokens, by_chance(36, lengths, seed)), expected)


def test_a_row_has_the_same_bits_among_any_number_of_rows():
    many, tokens = models_layer(SMALL, [14] * 300), tokens_for(SMALL, 300, 40)
    one = many | {name: many[name][:2].clone() for name in ("window", "state", *RINGS)}
    one |= {"position": many["position"][:1]}
    schedule = [(8, 3), (8, 8), (8, 1), (4, 4)]

    def steps(rows: int):
        return lambda step: (schedule[step % 4][0], torch.full((rows,), schedule[step % 4][1]))

    alone, among = rolled(one, tokens[:1], steps(1)), rolled(many, tokens, steps(300))
    assert same_bits(alone.outputs(), among.outputs()[:1])
    assert same_bits(alone.layer["state"][:1], among.layer["state"][:1])


@pytest.mark.parametrize("length", [1, 4, 8, 16])
def test_many_launches_have_the_same_bits(length):
    """A piece of a state that a warp has not read yet is not overwritten by the one that comes in its place: with
    states in the L2 cache, that is soon there."""
    rows = 16
    layer = models_layer(REAL, [14] * rows)
    projected = tokens_for(REAL, rows, length).transpose(0, 1).flatten(0, 1)
    numbers = {name: torch.ones_like(layer["position"]) for name in ("answered", "stepped", "counts")}
    numbers["counts"].fill_(length)
    start, outs = layer["state"].clone(), []
    for _ in range(100):
        layer["state"].copy_(start)
        outs.append(gdn_kept_block(projected, **layer, **numbers))
    assert all(same_bits(out, outs[0]) for out in outs)


def test_weights_in_fp32():
    """Of the gates and the norm, which then rounds once less."""
    layer, tokens = models_layer(SMALL, [14, 3]), tokens_for(SMALL, 2, 40)
    for name in ("norm_weight", "dt_bias", "A_log"):
        layer[name] = layer[name].float()
    expected = rolled(layer, tokens, by_chance(2, (8,)), gdn_kept_block_reference, gdn_windows_reference)
    assert_close_but_for_roundings(rolled(layer, tokens, by_chance(2, (8,))).outputs(), expected.outputs())


@pytest.mark.parametrize("length", [1, 4, 8, 16])
def test_rows_that_are_none_keep_their_bits_whatever_they_hold(length):
    rows = 40
    layer = models_layer(SMALL, [14] * rows)
    none = torch.arange(rows, device="cuda") % 3 == 0
    for name in ("window", "state"):
        layer[name][:-1][none] = float("nan")
    layer["position"][none] = -7
    names = "window", "state", *RINGS
    before = {name: layer[name][:-1][none].clone() for name in names}
    rollout = Rollout(layer, tokens_for(SMALL, rows, 60), gdn_kept_block, gdn_windows)
    for _ in range(3):
        rollout.step(length, torch.where(none, 0, length))
    assert all(bool(out.isfinite().all()) for kept in rollout.out for out in kept)
    assert all(same_bits(layer[name][:-1][none], old) for name, old in before.items())


@pytest.mark.parametrize("length", [1, 8, 16])
def test_replays_of_a_graph(length):
    """Positions go on between replays, as far as a step says, and what every replay leaves is what a step leaves."""
    rows, shape = 20, Shape(4, 8, 128, 128)
    eager = models_layer(shape, list(range(rows)))
    projected = tokens_for(shape, rows, length).transpose(0, 1).flatten(0, 1).contiguous()
    numbers = {name: torch.ones(rows, dtype=torch.int64, device="cuda") for name in ("answered", "stepped", "counts")}
    numbers["counts"].fill_(length)
    for name in RINGS:
        eager[name].zero_()
    eager |= numbers
    captured = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in eager.items()}

    def step(arguments: dict, right: torch.Tensor) -> torch.Tensor:
        out = gdn_kept_block(projected, **arguments)
        if length > 1:
            gdn_windows([projected], [arguments["window"]], arguments["position"], right)
        arguments["position"].add_(right)
        arguments["answered"].add_(right)
        arguments["stepped"].copy_(right)
        return out

    right = torch.ones(rows, dtype=torch.int64, device="cuda")
    step({name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in eager.items()}, right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(captured, right)
    for index in range(20):
        right.copy_(torch.arange(rows, device="cuda") * (index + 3) % length + 1)
        expected = step(eager, right)
        graph.replay()
        assert same_bits(out, expected)
    assert all(same_bits(captured[name], eager[name]) for name in ("window", "state", *RINGS))


@pytest.mark.parametrize("kernel", [1, 3, 4, 8])
def test_windows(kernel):
    rows, tokens = 37, 8
    layers = [tokens_for(Shape(2, 4, 64, 64, kernel), rows * tokens, 1)[:, 0] for _ in range(3)]
    windows = [torch.randn(rows + 1, 512, kernel, device="cuda", dtype=torch.bfloat16) for _ in layers]
    expected = [window.clone() for window in windows]
    position = torch.arange(rows, device="cuda") * 3
    counts = torch.arange(rows, device="cuda") % (tokens + 1)
    gdn_windows(layers, windows, position, counts)
    gdn_windows_reference(layers, expected, position, counts)
    assert all(map(same_bits, windows, expected))
