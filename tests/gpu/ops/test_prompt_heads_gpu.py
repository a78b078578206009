# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""prompt_heads and gated_heads on a GPU against float64, at a model's sizes and odd ones, and in a graph."""

import pytest
import torch
from decode_cases import same_bits
from glue_cases import DTYPES, moved, poisoned_outputs
from prompt_heads_cases import SHAPES, gate_arguments, gate_oracle, heads_arguments, heads_oracle
from tolerances import assert_close, assert_close_but_for_roundings

from deepspeed_hybrid.ops.gated_heads import gated_heads
from deepspeed_hybrid.ops.prompt_heads import prompt_heads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODELS = [(1, 2048, 16, 4, 256, 64, True), (16, 65, 16, 4, 256, 64, True), (2, 127, 32, 8, 128, 128, False)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [True, False], ids=["norms", "no norms"])
@pytest.mark.parametrize("shape", SHAPES + MODELS, ids=str)
def test_heads_against_float64(shape, norms, dtype):
    arguments = moved(heads_arguments(*shape, dtype=dtype, norms=norms, around=8, shared=norms), "cuda")
    with poisoned_outputs():
        results = prompt_heads(**arguments)
    for actual, expected in zip(results, heads_oracle(**arguments), strict=True):
        assert actual.is_contiguous()
        assert_close_but_for_roundings(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_one_kind_have_the_bits_they_have_beside_the_other(dtype):
    """As a last layer asks for them: keys of all tokens, queries of the last one."""
    arguments = moved(heads_arguments(3, 65, 16, 4, 256, 64, True, dtype=dtype, shared=False), "cuda")
    query, key = prompt_heads(**arguments)
    last = {name: arguments[name][:, -1:] for name in ("projected", "cos", "sin")}
    last["projected"] = last["projected"][..., : 2 * 16 * 256]
    with poisoned_outputs():
        asked, _ = prompt_heads(**arguments | last | {"kv_heads": 0})
        _, told = prompt_heads(
            **arguments | {"projected": arguments["projected"][..., 2 * 16 * 256 :], "query_heads": 0}
        )
    assert same_bits(asked, query[:, -1:].contiguous()) and same_bits(told, key)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2048, 16, 256), (16, 33, 32, 128)], ids=str)
def test_gates_against_float64(shape, dtype):
    arguments = moved(gate_arguments(*shape, dtype=dtype), "cuda")
    with poisoned_outputs():
        out = gated_heads(**arguments)
    assert out.is_contiguous()
    assert_close(out, gate_oracle(**arguments))


def test_in_a_graph_with_other_inputs():
    """Both, one behind the other, as in a layer."""

    def run() -> torch.Tensor:
        query, _ = prompt_heads(**static)
        return gated_heads(query, gate)

    def inputs(seed: int) -> dict:
        return heads_arguments(2, 40, 16, 4, 256, 64, True, dtype=torch.bfloat16, seed=seed)

    static, gate = moved(inputs(0), "cuda"), torch.randn(2, 40, 16, 256, device="cuda").bfloat16()
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in (1, 2):
        for name, value in inputs(seed).items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        assert same_bits(out, run())
        assert_close(out, gate_oracle(heads_oracle(**static)[0].bfloat16(), gate))
