# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""rotary_tables against Hugging Face's modules: the op, and the kernel in the interpreter."""

import pytest
import torch
from decode_cases import same_bits
from gdn_decode_cases import interpreted
from glue_cases import DTYPES, poisoned_outputs
from models import tiny_model
from step_input_cases import POSITIONS, assert_same_tables, rotary_arguments, rotary_oracle
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_hybrid.ops.rotary_tables import rotary_tables, rotary_tables_reference


def kernel(positions, inv_freq, scaling, dtype):
    from deepspeed_hybrid.ops.triton.rotary_tables import launch  # under the interpreter only

    return launch(positions, inv_freq, scaling, dtype)


both = pytest.mark.parametrize(
    "op",
    [rotary_tables, pytest.param(kernel, marks=[pytest.mark.interpreter, interpreted])],
    ids=["op", "kernel"],
)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("half", [1, 3, 32, 64, 100])
@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (3, 70)], ids=str)
def test_as_hugging_face_computes_them(op, shape, half, dtype):
    arguments = rotary_arguments(shape, half, dtype=dtype)
    before = arguments["positions"].clone()
    with poisoned_outputs():
        tables = op(**arguments)
    assert_same_tables(tables, rotary_oracle(**arguments))
    assert torch.equal(arguments["positions"], before)


@both
@pytest.mark.parametrize("family", ["qwen3_5", "llama", "qwen3_next"])
def test_the_rotary_module_of_a_model(op, family):
    """Of Qwen3.5 the axes of time, height and width are one tensor, expanded."""
    module = tiny_model(family).model.rotary_emb
    positions = torch.tensor(POSITIONS)[:, None]
    axes = positions[None].expand(3, -1, -1) if family == "qwen3_5" else positions
    for dtype in DTYPES:
        expected = module(torch.empty(0, dtype=dtype), axes)
        assert_same_tables(op(positions, module.inv_freq, module.attention_scaling, dtype), expected)


@both
@pytest.mark.parametrize("inv_freq", DTYPES, ids=str)
@pytest.mark.parametrize("scaling", [1.0, 1.2079, 0.1], ids=str)
def test_frequencies_and_scaling(op, inv_freq, scaling):
    """A model cast as a whole has its frequencies cast; yarn scales both tables."""
    arguments = rotary_arguments(inv_freq=inv_freq, scaling=scaling)
    assert_same_tables(op(**arguments), rotary_oracle(**arguments))


@both
def test_a_token_has_the_same_bits_among_others(op):
    arguments = rotary_arguments((70, 1), 24)
    together = op(**arguments)
    for row in (0, 33, 69):
        alone = op(**arguments | {"positions": arguments["positions"][row : row + 1].clone()})
        assert all(same_bits(one[0], many[row]) for one, many in zip(alone, together, strict=True))


@both
def test_no_tokens(op):
    assert all(table.shape == (0, 1, 64) for table in op(**rotary_arguments((0, 1))))


def test_the_cpu_runs_the_reference():
    arguments = rotary_arguments(dtype=torch.bfloat16)
    for one, other in zip(rotary_tables(**arguments), rotary_tables_reference(**arguments), strict=True):
        assert same_bits(one, other)


def test_a_gradient_is_refused():
    arguments = rotary_arguments()
    arguments["inv_freq"].requires_grad_()
    with pytest.raises(RuntimeError, match="rotary_tables is for inference and has no gradient"):
        rotary_tables(**arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    torch.library.opcheck(rotary_tables, (), rotary_arguments((2, 3), 5, dtype=dtype))


def test_fake_tensors_need_no_kernel():
    with FakeTensorMode():
        positions, rates = torch.empty(2, 3, dtype=torch.int64, device="meta"), torch.empty(8, device="meta")
        for table in rotary_tables(positions, rates, 1.0, torch.bfloat16):
            assert table.shape == (2, 3, 16) and table.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("positions", lambda tensor: tensor[:, 0], "positions must be"),
        ("positions", torch.Tensor.int, "positions must be"),
        ("positions", lambda tensor: tensor.expand(-1, 2), "positions must be contiguous"),
        ("inv_freq", lambda tensor: tensor[None], "inv_freq must be"),
        ("inv_freq", torch.Tensor.double, "inv_freq must be"),
        ("inv_freq", lambda tensor: tensor[::2], "inv_freq must be"),
        ("inv_freq", lambda tensor: tensor.to("meta"), "inv_freq is on meta"),
        ("dtype", lambda dtype: torch.float64, "dtype must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused(name, change, message):
    arguments = rotary_arguments()
    with pytest.raises(RuntimeError, match=message):
        rotary_tables_reference(**arguments | {name: change(arguments[name])})
