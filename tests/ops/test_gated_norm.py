# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gated_norm against float64: the op, and the kernel in the interpreter."""

import pytest
import torch
from decode_cases import same_bits
from gated_norm_cases import arguments_of, oracle
from gdn_decode_cases import interpreted
from glue_cases import DTYPES, poisoned_outputs
from tolerances import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_hybrid.ops.gated_norm import gated_norm, gated_norm_reference


def kernel(core, gate, weight, eps):
    from deepspeed_hybrid.ops.triton.gated_norm import launch  # under the interpreter only

    return launch(core, gate, weight, eps)


both = pytest.mark.parametrize(
    "op", [gated_norm, pytest.param(kernel, marks=[pytest.mark.interpreter, interpreted])], ids=["op", "kernel"]
)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("around", [0, 5], ids=["packed", "columns of a wider tensor"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 7), (3, 17, 2, 128), (1, 70, 4, 32)], ids=str)
def test_against_float64(op, shape, around, dtype):
    arguments = arguments_of(*shape, dtype=dtype, around=around)
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    with poisoned_outputs():
        out = op(**arguments)
    assert out.dtype == dtype and out.is_contiguous() and out.shape == arguments["gate"].shape
    assert_close(out, oracle(**arguments))
    assert all(same_bits(arguments[name], value) for name, value in before.items())


@both
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weights_of_any_dtype(op, weights):
    arguments = arguments_of(2, 3, 2, 32, dtype=torch.bfloat16, weights=weights)
    assert_close(op(**arguments), oracle(**arguments))


@both
def test_a_token_has_the_same_bits_among_others(op):
    arguments = arguments_of(2, 40, 3, 32, dtype=torch.bfloat16, around=3)
    whole = op(**arguments)
    part = arguments | {"core": arguments["core"][1:, 7:20].contiguous(), "gate": arguments["gate"][1:, 7:20]}
    assert same_bits(op(**part), whole[1:, 7:20])


@both
def test_extremes_stay_finite(op):
    arguments = arguments_of(1, 2, 2, 32)
    arguments["core"][0, 0] = 0
    arguments["gate"][0, 1] = torch.tensor([-80.0, 80.0]).repeat(32)
    assert op(**arguments).isfinite().all()


def test_no_tokens():
    assert gated_norm(**arguments_of(0, 4, 2, 8)).shape == (0, 4, 16)


def test_the_cpu_runs_the_reference():
    arguments = arguments_of(2, 3, 2, 16, dtype=torch.bfloat16)
    assert same_bits(gated_norm(**arguments), gated_norm_reference(**arguments))


def test_a_gradient_is_refused():
    arguments = arguments_of(1, 2, 2, 8)
    arguments["weight"].requires_grad_()
    with pytest.raises(RuntimeError, match="gated_norm is for inference and has no gradient"):
        gated_norm(**arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    torch.library.opcheck(gated_norm, (), arguments_of(2, 3, 2, 8, dtype=dtype, around=2))


def test_fake_tensors_need_no_kernel():
    with FakeTensorMode():
        arguments = {
            name: value.to("meta") if isinstance(value, torch.Tensor) else value
            for name, value in arguments_of(2, 3, 2, 8).items()
        }
        assert gated_norm(**arguments).shape == (2, 3, 16)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("core", lambda tensor: tensor[0], "core must be contiguous"),
        ("core", lambda tensor: tensor.double(), "core must be contiguous"),
        ("core", lambda tensor: tensor.transpose(1, 2), "core must be contiguous"),
        ("gate", lambda tensor: tensor[:, :-1], "gate must be"),
        ("gate", lambda tensor: tensor.half(), "gate must be"),
        ("gate", lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2), "last dimension of gate"),
        ("weight", lambda tensor: tensor[:-1], "weight must be"),
        ("weight", lambda tensor: tensor.int(), "weight must be"),
        ("weight", lambda tensor: tensor.to("meta"), "weight is on meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused(name, change, message):
    arguments = arguments_of(2, 3, 2, 8)
    with pytest.raises(RuntimeError, match=message):
        gated_norm_reference(**arguments | {name: change(arguments[name])})
