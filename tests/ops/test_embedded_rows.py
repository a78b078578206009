# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""embedded_rows against float64: the op, and the kernel in the interpreter."""

import pytest
import torch
from decode_cases import same_bits
from fused_linear_cases import rms_norm_oracle
from gdn_decode_cases import interpreted
from glue_cases import DTYPES, poisoned_outputs
from step_input_cases import embedded_arguments
from tolerances import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_hybrid.ops.embedded_rows import embedded_rows, embedded_rows_reference


def kernel(ids, table, norm, norm_offset, eps):
    from deepspeed_hybrid.ops.triton.rms_norm import launch_embedded  # under the interpreter only

    hidden, scaled = launch_embedded(ids, table, norm, norm_offset, eps)
    return hidden, scaled, table.new_empty(0, len(ids), dtype=torch.float32)


both = pytest.mark.parametrize(
    "op",
    [embedded_rows, pytest.param(kernel, marks=[pytest.mark.interpreter, interpreted])],
    ids=["op", "kernel"],
)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, size", [(1, 1), (1, 128), (5, 24), (70, 32), (3, 2049)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_against_float64(op, rows, size, offset, dtype):
    arguments = embedded_arguments(rows, size, offset=offset, dtype=dtype)
    with poisoned_outputs():
        hidden, scaled, squares = op(**arguments)
    expected = arguments["table"][arguments["ids"]]
    assert same_bits(hidden, expected) and hidden.is_contiguous()
    assert scaled.dtype == dtype and scaled.is_contiguous() and squares.shape == (0, rows)
    assert_close(scaled, rms_norm_oracle(expected, arguments["norm"], offset, arguments["eps"]))


@both
def test_a_row_has_the_same_bits_among_any_others(op):
    arguments = embedded_arguments(70, 24)
    _, together, _ = op(**arguments)
    for first, last in ((0, 1), (69, 70), (5, 22)):
        part = op(**arguments | {"ids": arguments["ids"][first:last].clone()})
        assert same_bits(part[1], together[first:last])


@pytest.mark.interpreter
@interpreted
def test_the_bits_of_a_norm_on_its_own():
    from deepspeed_hybrid.ops.triton.rms_norm import launch

    arguments = embedded_arguments(70, 24)
    hidden, scaled, _ = kernel(**arguments)
    assert same_bits(launch(hidden, arguments["norm"], 1.0, arguments["eps"]), scaled)


@pytest.mark.interpreter
@interpreted
def test_an_id_that_is_not_there_reads_nothing():
    arguments = embedded_arguments(4, 24)
    arguments["ids"] = torch.tensor([3, 50, -1, 2**40])
    hidden, scaled, _ = kernel(**arguments)
    assert same_bits(hidden[0], arguments["table"][3]) and scaled[0].isfinite().all()
    assert hidden[1:].isnan().all() and scaled[1:].isnan().all()


@both
def test_no_rows(op):
    hidden, scaled, squares = op(**embedded_arguments(0, 24))
    assert hidden.shape == scaled.shape == (0, 24) and squares.shape == (0, 0)


def test_the_cpu_runs_the_reference():
    arguments = embedded_arguments(5, 24, dtype=torch.bfloat16)
    for one, other in zip(embedded_rows(**arguments), embedded_rows_reference(**arguments), strict=True):
        assert same_bits(one, other)


def test_a_gradient_is_refused():
    arguments = embedded_arguments(2, 8)
    arguments["table"].requires_grad_()
    with pytest.raises(RuntimeError, match="embedded_rows is for inference and has no gradient"):
        embedded_rows(**arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    torch.library.opcheck(embedded_rows, (), embedded_arguments(3, 8, dtype=dtype))


def test_fake_tensors_need_no_kernel():
    with FakeTensorMode():
        arguments = {
            name: value.to("meta") if isinstance(value, torch.Tensor) else value
            for name, value in embedded_arguments(3, 8, dtype=torch.bfloat16).items()
        }
        hidden, scaled, squares = embedded_rows(**arguments)
        assert hidden.shape == scaled.shape == (3, 8) and hidden.dtype == scaled.dtype == torch.bfloat16
        assert squares.shape == (0, 3) and squares.dtype == torch.float32


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("ids", lambda tensor: tensor[None], "ids must be"),
        ("ids", torch.Tensor.int, "ids must be"),
        ("ids", lambda tensor: tensor[::2], "ids must be"),
        ("ids", lambda tensor: tensor.to("meta"), "ids is on meta"),
        ("table", lambda tensor: tensor[:, :-1], "table must be contiguous"),
        ("table", torch.Tensor.double, "table must be"),
        ("norm", lambda tensor: tensor[:-1], "norm must be"),
        ("norm", torch.Tensor.half, "norm must be"),
        ("norm", lambda tensor: tensor.to("meta"), "norm is on meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused(name, change, message):
    arguments = embedded_arguments(4, 8)
    with pytest.raises(RuntimeError, match=message):
        embedded_rows_reference(**arguments | {name: change(arguments[name])})
