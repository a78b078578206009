# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gated_norm on a GPU against float64, at a model's sizes and odd ones, and in a graph."""

import pytest
import torch
from decode_cases import same_bits
from gated_norm_cases import EPS, arguments_of, oracle
from glue_cases import DTYPES, moved, poisoned_outputs
from tolerances import assert_close

from deepspeed_hybrid.ops.gated_norm import gated_norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (3, 17, 2, 128), (1, 2048, 32, 128), (16, 33, 32, 128)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape, dtype):
    arguments = moved(arguments_of(*shape, dtype=dtype, around=5), "cuda")
    with poisoned_outputs():
        out = gated_norm(**arguments)
    assert out.is_contiguous()
    assert_close(out, oracle(**arguments))


def test_in_a_graph_with_other_inputs():
    static = moved(arguments_of(2, 40, 32, 128, dtype=torch.bfloat16), "cuda")
    gated_norm(**static)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_norm(**static)
    for seed in (1, 2):
        for name, value in arguments_of(2, 40, 32, 128, dtype=torch.bfloat16, seed=seed).items():
            if name != "eps":
                static[name].copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, oracle(**static))
        assert same_bits(out, gated_norm(**static))


def test_places_beyond_two_to_the_31():
    wide = torch.zeros(3, 1, 2**30 + 2**28, dtype=torch.bfloat16, device="cuda")
    gate = wide[:, :, :256]
    gate.normal_()
    core = torch.randn(3, 1, 2, 128, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(128, device="cuda")
    assert_close(gated_norm(core, gate, weight, EPS), oracle(core, gate, weight, EPS))
