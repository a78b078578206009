# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""embedded_rows and rotary_tables on a GPU against float64 and Hugging Face, at a model's sizes, and in graphs."""

import pytest
import torch
from decode_cases import same_bits
from fused_linear_cases import rms_norm_oracle
from glue_cases import DTYPES, moved, poisoned_outputs
from step_input_cases import (
    POSITIONS,
    assert_same_tables,
    embedded_arguments,
    rotary_arguments,
    rotary_oracle,
)
from tolerances import assert_close

from deepspeed_hybrid.ops.embedded_rows import embedded_rows
from deepspeed_hybrid.ops.fused_linear import normed_rows
from deepspeed_hybrid.ops.rotary_tables import rotary_tables

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HIDDEN, VOCAB = 2560, 4096


# ------------------------------------------------------------------------------------------------------ embedded_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, size", [(1, HIDDEN), (3, 24), (64, HIDDEN), (5, 8192)])
def test_rows_against_float64(rows, size, dtype):
    arguments = moved(embedded_arguments(rows, size, vocab=VOCAB, dtype=dtype), "cuda")
    with poisoned_outputs():
        hidden, scaled, squares = embedded_rows(**arguments)
    expected = arguments["table"][arguments["ids"]]
    assert same_bits(hidden, expected) and squares.shape == (0, rows)
    assert_close(scaled, rms_norm_oracle(expected, arguments["norm"], 1.0, arguments["eps"]))
    assert same_bits(scaled, normed_rows(expected, arguments["norm"], 1.0, arguments["eps"])[0])


def test_ids_that_are_not_there_read_nothing():
    arguments = moved(embedded_arguments(4, HIDDEN, vocab=VOCAB, dtype=torch.bfloat16), "cuda")
    arguments["ids"].copy_(torch.tensor([3, VOCAB, -1, 2**40]))
    hidden, scaled, _ = embedded_rows(**arguments)
    assert scaled[0].isfinite().all() and hidden[1:].isnan().all() and scaled[1:].isnan().all()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_rows_in_a_graph_with_other_ids():
    """Ids that are not aligned compile nothing anew, and nothing waits for the host."""
    arguments = moved(embedded_arguments(8, HIDDEN, vocab=VOCAB, dtype=torch.bfloat16), "cuda")
    embedded_rows(**arguments)  # compiles
    buffer = torch.zeros(9, dtype=torch.int64, device="cuda")
    static = arguments | {"ids": buffer[1:]}
    torch.cuda.set_sync_debug_mode("error")
    try:
        embedded_rows(**static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden, scaled, _ = embedded_rows(**static)
    for seed in (1, 2):
        static["ids"].copy_(embedded_arguments(8, 1, vocab=VOCAB, seed=seed)["ids"])
        hidden.fill_(float("nan")), scaled.fill_(float("nan"))
        graph.replay()
        for one, other in zip((hidden, scaled), embedded_rows(**static), strict=False):
            assert same_bits(one, other)


# ------------------------------------------------------------------------------------------------------ rotary_tables


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, half", [((1, 1), 32), ((8, 1), 32), ((64, 1), 64), ((3, 700), 32), ((2, 5), 50)])
@pytest.mark.parametrize("scaling", [1.0, 1.2079])
def test_tables_as_hugging_face_computes_them(shape, half, scaling, dtype):
    arguments = moved(rotary_arguments(shape, half, dtype=dtype, scaling=scaling), "cuda")
    with poisoned_outputs():
        tables = rotary_tables(**arguments)
    assert_same_tables(tables, rotary_oracle(**arguments))


@pytest.mark.parametrize("inv_freq", [torch.bfloat16, torch.float16], ids=str)
def test_frequencies_that_were_cast(inv_freq):
    arguments = moved(rotary_arguments(inv_freq=inv_freq), "cuda")
    assert_same_tables(rotary_tables(**arguments), rotary_oracle(**arguments))


def test_every_position_of_a_long_context():
    """Up to where angles need the long reduction of their range, and beyond."""
    arguments = moved(rotary_arguments((1, 1)), "cuda")
    arguments["positions"] = torch.arange(2**18, device="cuda")[None]
    cos, sin = rotary_tables(**arguments)
    assert_same_tables((cos, sin), rotary_oracle(**arguments))
    angles = arguments["positions"][..., None].float() * arguments["inv_freq"]
    assert_close(cos, torch.cat([angles.double().cos()] * 2, dim=-1))
    assert_close(sin, torch.cat([angles.double().sin()] * 2, dim=-1))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_tables_in_a_graph_with_other_positions():
    arguments = moved(rotary_arguments((8, 1), dtype=torch.bfloat16), "cuda")
    rotary_tables(**arguments)  # compiles
    buffer = torch.zeros(9, dtype=torch.int64, device="cuda")
    static = arguments | {"positions": buffer[1:, None]}
    torch.cuda.set_sync_debug_mode("error")
    try:
        rotary_tables(**static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tables = rotary_tables(**static)
    for offset in (0, 1234):
        buffer[1:].copy_(torch.tensor(POSITIONS) + offset)
        for table in tables:
            table.fill_(float("nan"))
        graph.replay()
        assert_same_tables(tables, rotary_oracle(**static))
        for one, other in zip(tables, rotary_tables(**static), strict=True):
            assert same_bits(one, other)
