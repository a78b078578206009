# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton gdn_block and gdn_commit on a GPU, at the sizes of a model: what as many launches of gdn_decode do."""

import pytest
import torch
from decode_cases import same_bits
from gdn_decode_cases import REAL, SHAPES, arguments_of, tokens_of
from glue_cases import moved, poisoned_outputs
from tolerances import assert_close

from deepspeed_hybrid.ops.gdn_block import gdn_block, gdn_commit
from deepspeed_hybrid.ops.gdn_decode import gdn_decode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def block_of(shape, counts: list[int], tokens: int, **options) -> dict:
    rows = len(counts)
    arguments = arguments_of(shape, rows, slots=rows + 1, bias=False, **options)
    del arguments["parked"]
    projected = tokens_of(shape, rows, tokens, dtype=arguments["projected"].dtype)
    arguments |= {"projected": projected.transpose(0, 1).flatten(0, 1), "counts": torch.tensor(counts)}
    return moved(arguments, "cuda")


def step_by_step(arguments: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, and window and state behind the counted tokens, of decode steps, each of which the host waits for."""
    arguments = dict(arguments)
    counts, position, projected = (arguments.pop(name) for name in ("counts", "position", "projected"))
    window, state = (arguments.pop(name).clone() for name in ("window", "state"))
    out = []
    for index, rows in enumerate(projected.split(len(counts))):
        where = dict(projected=rows, position=position + index, parked=counts <= index)
        torch.cuda.synchronize()
        out.append(gdn_decode(**where, window=window, state=state, **arguments))
        torch.cuda.synchronize()
    return torch.cat(out), window, state


def run(arguments: dict) -> None:
    out, window, state = step_by_step(arguments)
    before = {name: arguments[name].clone() for name in ("window", "state")}
    with poisoned_outputs():
        mine = gdn_block(**arguments)
    assert_close(mine, out)
    assert all(same_bits(arguments[name], old) for name, old in before.items())
    gdn_commit(**arguments)
    assert same_bits(arguments["window"], window)
    assert_close(arguments["state"], state)
    untouched = arguments["counts"] == 0
    assert same_bits(arguments["state"][:-1][untouched], before["state"][:-1][untouched])


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[6]], ids=lambda shape: "-".join(map(str, shape)))
def test_other_sizes(shape):
    run(block_of(shape, [5, 0, 1, 3], 5))


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize(
    "dtype, state_dtype",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_a_models_sizes(dtype, state_dtype, batch):
    counts = [(5 * row + 16) % 17 for row in range(batch)]
    run(block_of(REAL, counts, 16, dtype=dtype, state_dtype=state_dtype, weights=dtype))


def test_blocks_in_turn_without_waiting():
    """Layers one behind another, as in a step: kernels start before those ahead of them have ended."""
    layers = [block_of(REAL, [(row + layer) % 5 for row in range(8)], 4, seed=layer) for layer in range(6)]
    expected = [step_by_step(layer) for layer in layers]
    torch.cuda.synchronize()
    outs = [gdn_block(**layer) for layer in layers]
    for layer in layers:
        gdn_commit(**layer)
    for layer, mine, (out, window, state) in zip(layers, outs, expected, strict=True):
        assert_close(mine, out)
        assert same_bits(layer["window"], window)
        assert_close(layer["state"], state)


def test_replays_of_a_graph():
    """Counts, positions and products change between replays; the slots go on."""
    arguments = block_of(REAL, [4, 2, 0, 3], 4, dtype=torch.bfloat16)
    twin = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    gdn_block(**twin), gdn_commit(**twin)
    twin["window"].copy_(arguments["window"]), twin["state"].copy_(arguments["state"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gdn_block(**twin)
        gdn_commit(**twin)
    for step in range(3):
        arguments["counts"].copy_(torch.tensor([step, 4 - step, 3, 1]))
        twin["counts"].copy_(arguments["counts"])
        expected = gdn_block(**arguments)
        gdn_commit(**arguments)
        graph.replay()
        assert same_bits(out, expected)
        assert all(same_bits(twin[name], arguments[name]) for name in ("window", "state"))
        for one in (arguments, twin):
            one["position"] += one["counts"]
            one["projected"].copy_(one["projected"].roll(1, dims=0))
