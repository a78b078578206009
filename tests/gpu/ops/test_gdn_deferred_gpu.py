# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton gdn_deferred on a GPU, at the sizes of a model: what as many launches of gdn_decode do."""

import pytest
import torch
from decode_cases import same_bits
from gdn_block_cases import step_by_step
from gdn_decode_cases import REAL, SHAPES
from gdn_deferred_cases import deferred_block, one_by_one, settled, without_rings
from glue_cases import moved, poisoned_outputs
from tolerances import assert_close, assert_close_but_for_roundings

from deepspeed_hybrid.ops.gdn_decode import gdn_decode_reference
from deepspeed_hybrid.ops.gdn_deferred import PLACES, gdn_deferred

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def cuda_block(shape, counts: list[int], tokens: int, **options) -> dict:
    return moved(deferred_block(shape, counts, tokens, bias=False, **options), "cuda")


def run(arguments: dict) -> None:
    """Layer behind layer without waiting, next to the reference of decode steps over fp32 states."""
    wide = without_rings(arguments) | {"state": arguments["state"].float()}
    out, window, state = step_by_step(gdn_decode_reference, wide)
    live = (torch.arange(len(out) // len(arguments["counts"]), device="cuda")[:, None] < arguments["counts"]).flatten()
    with poisoned_outputs():
        mine = one_by_one(gdn_deferred, arguments)
    assert (mine[~live] == 0).all()
    assert_close_but_for_roundings(mine[live], out[live])
    assert same_bits(arguments["window"], window)
    if arguments["state"].dtype == torch.float32:
        near = assert_close if mine.dtype == torch.float32 else assert_close_but_for_roundings  # of keys
        near(settled(arguments)[:-1].to(mine.dtype), state[:-1])


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[6]], ids=lambda shape: "-".join(map(str, shape)))
def test_other_sizes(shape):
    run(cuda_block(shape, [19, 0, 1, 16], 19))


@pytest.mark.parametrize("batch", [1, 24])
@pytest.mark.parametrize(
    "dtype, state_dtype",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
    ids=str,
)
def test_a_models_sizes(dtype, state_dtype, batch):
    counts = [(5 * row + 20) % 21 for row in range(batch)]
    run(cuda_block(REAL, counts, 20, dtype=dtype, state_dtype=state_dtype, weights=dtype, rounded=True))


def test_a_state_of_16_bits_is_rounded_once_in_16_tokens():
    arguments = cuda_block(REAL, [14, 12], 14, dtype=torch.bfloat16, state_dtype=torch.bfloat16, rounded=True)
    arguments["position"] = torch.tensor([32, 65], device="cuda")
    run(arguments)


def test_a_row_has_the_same_bits_among_any_number_of_rows():
    many = cuda_block(REAL, [18] * 65, 18, dtype=torch.bfloat16, rounded=True)
    slots = {name: many[name][:2].clone() for name in ("window", "state", "keys", "deltas", "decays")}
    rows = {name: many[name][:1] for name in ("counts", "position")}
    one = many | slots | rows | {"projected": many["projected"][::65]}
    assert same_bits(one_by_one(gdn_deferred, one), one_by_one(gdn_deferred, many)[::65])
    assert same_bits(one["state"][:1], many["state"][:1])


def test_replays_of_a_graph():
    """Positions go on between replays, over more than a ring."""
    eager = cuda_block(REAL, [1] * 4, 1, dtype=torch.bfloat16, rounded=True)
    eager["answered"] = torch.ones_like(eager["counts"])
    captured = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in eager.items()}

    def step(arguments: dict) -> torch.Tensor:
        def counted(*args, **named):
            return gdn_deferred(*args, **named | {"answered": arguments["answered"]})

        out = one_by_one(counted, arguments)
        arguments["position"].add_(1)
        arguments["answered"].add_(1)
        return out

    step({name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in eager.items()})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(captured)
    for _ in range(2 * PLACES + 3):
        expected = step(eager)
        graph.replay()
        assert same_bits(out, expected)
    assert same_bits(captured["state"], eager["state"])
