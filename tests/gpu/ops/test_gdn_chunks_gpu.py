# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton gdn_chunks on a GPU against the recurrence in float64, at the sizes of a model."""

import pytest
import torch
from decode_cases import same_bits
from gdn_chunks_cases import (
    REAL,
    Heads,
    arguments_of,
    as_training_rounds,
    assert_near,
    assert_same_roundings,
    oracle,
)
from glue_cases import moved, poisoned_outputs

from deepspeed_hybrid.ops.gdn_chunks import CHUNK_DTYPES, HEAD_DIMS, gdn_chunks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = Heads(2, 4, 16, 32)


def run(arguments: dict) -> torch.Tensor:
    """On the GPU, over poison, against the oracle. ``arguments`` are on the CPU, and stay."""
    core, memory = oracle(**arguments)
    on_gpu = moved(arguments, "cuda")
    with poisoned_outputs():
        result = gdn_chunks(**on_gpu)
    dtype, state = arguments["value"].dtype, on_gpu["state"].cpu()
    assert result.dtype == dtype and result.is_contiguous() and result.shape == core.shape
    assert_near(result, core, dtype)
    assert_near(state[arguments["slots"]], memory, dtype)
    others = [slot for slot in range(len(state)) if slot not in arguments["slots"].tolist()]
    assert same_bits(state[others], arguments["state"][others])
    return result


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("rows, tokens", [(1, 1), (1, 128), (3, 300), (5, 64)])
@pytest.mark.parametrize("dtype", CHUNK_DTYPES, ids=str)
def test_a_models_sizes(dtype, rows, tokens, first):
    run(arguments_of(REAL, rows, tokens, dtype=dtype, first=first))


@pytest.mark.parametrize("value_dim", HEAD_DIMS)
@pytest.mark.parametrize("key_dim", HEAD_DIMS)
def test_other_heads(key_dim, value_dim, monkeypatch):
    """In programs of few columns, and of many as where there are many programs: each is compiled by itself."""
    from deepspeed_hybrid.ops.triton import gdn_chunks as kernels

    for enough in (kernels.MANY_PROGRAMS, 0):
        monkeypatch.setattr(kernels, "MANY_PROGRAMS", enough)
        run(arguments_of(Heads(1, 3, key_dim, value_dim), 2, 130, dtype=torch.bfloat16))


@pytest.mark.parametrize("heads", [REAL, Heads(2, 4, 64, 64), SMALL], ids=lambda heads: "-".join(map(str, heads)))
@pytest.mark.parametrize("dtype", CHUNK_DTYPES, ids=str)
def test_roundings_are_those_of_the_training_forward(dtype, heads):
    arguments = arguments_of(heads, 2, 130, dtype=dtype, first=True)
    expected, _ = as_training_rounds(**arguments)
    assert_same_roundings(gdn_chunks(**moved(arguments, "cuda")), expected)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_state_of_fewer_bits(state_dtype):
    run(arguments_of(SMALL, 2, 100, dtype=torch.bfloat16, state_dtype=state_dtype))


@pytest.mark.parametrize("a, b", [(-30.0, 30.0), (30.0, 30.0), (-30.0, -30.0)], ids=["kept", "forgotten", "ignored"])
@pytest.mark.parametrize("dtype", CHUNK_DTYPES, ids=str)
def test_extreme_gates(dtype, a, b):
    """One key over and over is the worst for the inverse of a chunk's triangle: all of it is one where gates are."""
    arguments = arguments_of(REAL, 1, 130, dtype=dtype)
    arguments["key"].copy_(arguments["key"][:, :1].clone())
    arguments["a"].fill_(a)
    arguments["b"].fill_(b)
    run(arguments)


def test_a_row_has_the_same_bits_in_any_batch():
    """Also where fewer rows are fewer programs, which then take half as many columns each."""
    together = moved(arguments_of(REAL, 6, 130, dtype=torch.bfloat16), "cuda")
    alone = {**together, "state": together["state"].clone()}
    results = gdn_chunks(**together)
    for row in (0, 5):
        one = {name: alone[name][row : row + 1] for name in ("query", "key", "value", "b", "a", "slots")}
        assert same_bits(gdn_chunks(**{**alone, **one})[0], results[row])
    for row in (0, 5):
        slot = together["slots"][row]
        assert same_bits(alone["state"][slot], together["state"][slot])


def test_replays_of_a_graph():
    arguments = moved(arguments_of(REAL, 2, 100, dtype=torch.bfloat16), "cuda")
    before = arguments["state"].clone()
    expected = gdn_chunks(**arguments)
    after = arguments["state"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gdn_chunks(**arguments)
    for _ in range(2):
        arguments["state"].copy_(before)
        result.fill_(float("nan"))
        graph.replay()
        assert same_bits(result, expected) and same_bits(arguments["state"], after)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_sync_is_needed():
    arguments = moved(arguments_of(SMALL, 2, 5, dtype=torch.bfloat16), "cuda")
    gdn_chunks(**arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gdn_chunks(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_the_kernels_do_not_take_is_refused():
    arguments = moved(arguments_of(SMALL, 2, 5, dtype=torch.float32), "cuda")
    with pytest.raises(RuntimeError, match="query must be bfloat16 or float16 on this device"):
        gdn_chunks(**arguments)
