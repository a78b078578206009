# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton gdn_block and gdn_commit on a GPU, at the sizes of a model: what as many launches of gdn_decode do."""

import pytest
import torch
from decode_cases import same_bits
from gdn_block_cases import BlockOps, block_of, step_by_step
from gdn_decode_cases import REAL, SHAPES
from glue_cases import moved, poisoned_outputs
from tolerances import assert_close, assert_close_but_for_roundings

from deepspeed_hybrid.ops.gdn_block import gdn_block, gdn_commit
from deepspeed_hybrid.ops.gdn_decode import gdn_decode
from deepspeed_hybrid.ops.gdn_heads import gdn_heads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OPS = BlockOps(gdn_heads, gdn_block, gdn_commit)


def alone(**arguments) -> torch.Tensor:
    """A decode step that the host waits for."""
    torch.cuda.synchronize()
    out = gdn_decode(**arguments)
    torch.cuda.synchronize()
    return out


def cuda_block(shape, counts: list[int], tokens: int, **options) -> dict:
    return moved(block_of(shape, counts, tokens, bias=False, **options), "cuda")


def run(arguments: dict, same_sums: bool = True) -> None:
    """Windows have the bits of decode steps, and so have states whose sums are added up in the same order;
    outputs pass a norm that adds otherwise."""
    out, window, state = step_by_step(alone, arguments)
    before = {name: arguments[name].clone() for name in ("window", "state")}
    with poisoned_outputs():
        mine = OPS.verify(arguments)
    assert_close_but_for_roundings(mine, out)
    assert all(same_bits(arguments[name], old) for name, old in before.items())
    OPS.take_over(arguments)
    assert same_bits(arguments["window"], window)
    assert_close(arguments["state"], state)
    assert not same_sums or same_bits(arguments["state"], state)
    untouched = arguments["counts"] == 0
    assert same_bits(arguments["state"][:-1][untouched], before["state"][:-1][untouched])


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[6]], ids=lambda shape: "-".join(map(str, shape)))
def test_other_sizes(shape):
    run(cuda_block(shape, [5, 0, 1, 3], 5), same_sums=False)


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize(
    "dtype, state_dtype",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_a_models_sizes(dtype, state_dtype, batch):
    counts = [(5 * row + 16) % 17 for row in range(batch)]
    arguments = cuda_block(REAL, counts, 16, dtype=dtype, state_dtype=state_dtype, weights=dtype)
    run(arguments, same_sums=state_dtype == torch.float32)


@pytest.mark.parametrize("lanes", [1, 4, 5, 64])
def test_a_row_has_the_same_bits_among_any_number_of_lanes(lanes):
    """Few lanes are read in narrower programs."""
    one, many = (cuda_block(REAL, [4] * rows, 4, dtype=torch.bfloat16) for rows in (1, lanes))
    for name in ("window", "state", "position"):
        many[name][0] = one[name][0]
    many["projected"][::lanes] = one["projected"]
    assert same_bits(OPS.verify(many)[::lanes], OPS.verify(one))
    OPS.take_over(one), OPS.take_over(many)
    assert same_bits(many["state"][0], one["state"][0])


def test_blocks_in_turn_without_waiting():
    """Layers one behind another, as in a step: kernels start before those ahead of them have ended."""
    layers = [cuda_block(REAL, [(row + layer) % 5 for row in range(8)], 4, seed=layer) for layer in range(6)]
    expected = [step_by_step(alone, layer) for layer in layers]
    torch.cuda.synchronize()
    outs = [OPS.verify(layer) for layer in layers]
    for layer in layers:
        OPS.take_over(layer)
    for layer, mine, (out, window, state) in zip(layers, outs, expected, strict=True):
        assert_close(mine, out)
        assert same_bits(layer["window"], window)
        assert same_bits(layer["state"], state)


def test_layers_are_committed_together():
    layers = [cuda_block(REAL, [4, 0, 2], 4, dtype=torch.bfloat16, seed=seed) for seed in range(24)]
    for layer in layers:
        layer["position"] = layers[0]["position"]
    expected = [step_by_step(alone, layer)[1:] for layer in layers]
    OPS.take_over_together(layers)
    for layer, (window, state) in zip(layers, expected, strict=True):
        assert same_bits(layer["window"], window) and same_bits(layer["state"], state)


def test_replays_of_a_graph():
    """Counts, positions and products change between replays; the slots go on."""
    arguments = cuda_block(REAL, [4, 2, 0, 3], 4, dtype=torch.bfloat16)
    twin = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    OPS.verify(twin), OPS.take_over(twin)
    twin["window"].copy_(arguments["window"]), twin["state"].copy_(arguments["state"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OPS.verify(twin)
        OPS.take_over(twin)
    for step in range(3):
        arguments["counts"].copy_(torch.tensor([step, 4 - step, 3, 1]))
        twin["counts"].copy_(arguments["counts"])
        expected = OPS.verify(arguments)
        OPS.take_over(arguments)
        graph.replay()
        assert same_bits(out, expected)
        assert all(same_bits(twin[name], arguments[name]) for name in ("window", "state"))
        for one in (arguments, twin):
            one["position"] += one["counts"]
            one["projected"].copy_(one["projected"].roll(1, dims=0))
