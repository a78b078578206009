# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""prompt_heads and gated_heads against float64: the ops, and the kernels in the interpreter."""

import pytest
import torch
from decode_cases import same_bits
from gdn_decode_cases import interpreted
from glue_cases import DTYPES, poisoned_outputs
from prompt_heads_cases import SHAPES, gate_arguments, gate_oracle, heads_arguments, heads_oracle
from tolerances import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_hybrid.ops.gated_heads import gated_heads, gated_heads_reference
from deepspeed_hybrid.ops.prompt_heads import prompt_heads, prompt_heads_reference


def heads_kernel(**arguments):
    from deepspeed_hybrid.ops.triton.prompt_heads import launch  # under the interpreter only

    return launch(**arguments)


def gate_kernel(**arguments):
    from deepspeed_hybrid.ops.triton.gated_heads import launch

    return launch(**arguments)


def both(op, kernel):
    marked = pytest.param(kernel, marks=[pytest.mark.interpreter, interpreted])
    return pytest.mark.parametrize("op", [op, marked], ids=["op", "kernel"])


both_heads, both_gates = both(prompt_heads, heads_kernel), both(gated_heads, gate_kernel)


@both_heads
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [True, False], ids=["norms", "no norms"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_against_float64(op, shape, norms, dtype):
    arguments = heads_arguments(*shape, dtype=dtype, norms=norms, around=3, shared=not norms)
    with poisoned_outputs():
        results = op(**arguments)
    for actual, expected in zip(results, heads_oracle(**arguments), strict=True):
        assert actual.dtype == dtype and actual.is_contiguous()
        assert_close(actual, expected)


@both_heads
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64], ids=str)
def test_weights_and_tables_of_another_dtype(op, other):
    arguments = heads_arguments(*SHAPES[1], dtype=torch.float16, weights=other, tables=other)
    for actual, expected in zip(op(**arguments), heads_oracle(**arguments), strict=True):
        assert_close(actual, expected)


@both_heads
def test_heads_of_a_token_have_the_same_bits_among_others(op):
    arguments = heads_arguments(2, 40, 3, 1, 32, 8, True, dtype=torch.bfloat16, shared=False)
    part = {name: arguments[name][1:, 7:20] for name in ("projected", "cos", "sin")}
    for some, whole in zip(op(**arguments | part), op(**arguments), strict=True):
        assert same_bits(some, whole[1:, 7:20])


@both_heads
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_one_kind_have_the_bits_they_have_beside_the_other(op, dtype, gated):
    """As a last layer asks for them: keys of all tokens, queries of the last one."""
    arguments = heads_arguments(2, 9, 5, 3, 32, 8, gated, dtype=dtype, shared=False)
    of_queries = (1 + gated) * 5 * 32
    query, key = op(**arguments)
    last = {name: arguments[name][:, -1:] for name in ("projected", "cos", "sin")}
    last["projected"] = last["projected"][..., :of_queries]
    asked, none = op(**arguments | last | {"kv_heads": 0})
    assert same_bits(asked, query[:, -1:].contiguous()) and none.shape == (2, 1, 0, 32)
    none, told = op(**arguments | {"projected": arguments["projected"][..., of_queries:], "query_heads": 0})
    assert same_bits(told, key) and none.shape == (2, 9, 0, 32)


@both_gates
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 7), (3, 17, 2, 128), (1, 70, 4, 32)], ids=str)
def test_gates_against_float64(op, shape, dtype):
    arguments = gate_arguments(*shape, dtype=dtype)
    with poisoned_outputs():
        actual = op(**arguments)
    assert actual.dtype == dtype and actual.is_contiguous()
    assert_close(actual, gate_oracle(**arguments))


@both_gates
def test_extreme_gates_stay_finite(op):
    arguments = gate_arguments(1, 2, 2, 32)
    arguments["gate"].copy_(torch.tensor([-85.0, 85.0]).repeat(16))
    out = op(**arguments).view(1, 2, 2, 16, 2)
    assert (out[..., 0].abs() < 1e-30).all() and torch.equal(
        out[..., 1], arguments["mixed"].reshape(1, 2, 2, 16, 2)[..., 1]
    )


def test_no_tokens():
    query, key = prompt_heads(**heads_arguments(0, 4, 2, 1, 8, 4, True))
    assert query.shape == (0, 4, 2, 8) and key.shape == (0, 4, 1, 8)
    assert gated_heads(**gate_arguments(2, 0, 3, 4)).shape == (2, 0, 12)


def test_the_cpu_runs_the_references():
    arguments, gates = heads_arguments(*SHAPES[2]), gate_arguments(2, 3, 2, 16)
    assert all(map(same_bits, prompt_heads(**arguments), prompt_heads_reference(**arguments)))
    assert same_bits(gated_heads(**gates), gated_heads_reference(**gates))


def test_a_gradient_is_refused():
    arguments = heads_arguments(*SHAPES[1])
    arguments["q_norm"].requires_grad_()
    with pytest.raises(RuntimeError, match="prompt_heads is for inference and has no gradient"):
        prompt_heads(**arguments)
    gates = gate_arguments(1, 2, 2, 4)
    with pytest.raises(RuntimeError, match="gated_heads is for inference and has no gradient"):
        gated_heads(gates["mixed"].requires_grad_(), gates["gate"])


def test_opcheck():
    torch.library.opcheck(prompt_heads, (), heads_arguments(2, 3, 2, 1, 8, 4, True, around=2))
    torch.library.opcheck(gated_heads, (), gate_arguments(2, 3, 2, 8))


def test_fake_tensors_need_no_kernel():
    with FakeTensorMode():
        moved = {
            name: value.to("meta") if isinstance(value, torch.Tensor) else value
            for name, value in heads_arguments(*SHAPES[2]).items()
        }
        assert [part.shape[2] for part in prompt_heads(**moved)] == [4, 2]


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("projected", lambda tensor: tensor[0], "projected must be"),
        ("projected", lambda tensor: tensor.double(), "projected must be"),
        ("projected", lambda tensor: tensor[..., :-30], "columns or more"),
        ("projected", lambda tensor: tensor[..., ::2], "contiguous in the last"),
        ("cos", lambda tensor: tensor[:, :-1], "cos must be"),
        ("sin", lambda tensor: tensor[..., :-1], "sin must be"),
        ("sin", lambda tensor: tensor.int(), "sin must be"),
        ("q_norm", lambda tensor: tensor[:-1], "q_norm must be"),
        ("k_norm", lambda tensor: None, "both be"),
        ("k_norm", lambda tensor: tensor.to("meta"), "k_norm is on another device"),
        ("kv_heads", lambda number: -1, "must be positive"),
        ("query_heads", lambda number: -1, "must be positive"),
        ("head_dim", lambda number: 0, "must be positive"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_heads_are_refused(name, change, message):
    arguments = heads_arguments(2, 5, 3, 1, 10, 4, True)
    with pytest.raises(RuntimeError, match=message):
        prompt_heads_reference(**arguments | {name: change(arguments[name])})


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("mixed", lambda tensor: tensor.flatten(2), "mixed must be"),
        ("mixed", lambda tensor: tensor.int(), "mixed must be"),
        ("gate", lambda tensor: tensor[..., :-1], "gate must be"),
        ("gate", lambda tensor: tensor.half(), "gate must be"),
        ("gate", lambda tensor: tensor.to("meta"), "gate must be"),
        ("gate", lambda tensor: tensor.mT.contiguous().mT, "last dimension of gate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_gates_are_refused(name, change, message):
    arguments = gate_arguments(2, 3, 2, 8)
    with pytest.raises(RuntimeError, match=message):
        gated_heads_reference(**arguments | {name: change(arguments[name])})
