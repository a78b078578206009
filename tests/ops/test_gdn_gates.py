# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gdn_gates on a CPU against float64: any size, stride and mix of dtypes, parked rows, and no gradient."""

import math

import pytest
import torch
import torch.nn.functional as F
from decode_cases import same_bits
from glue_cases import (
    DTYPES,
    SIZES,
    extreme_gate_arguments,
    gate_arguments,
    gates_oracle,
    moved,
    poisoned_outputs,
)
from tolerances import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_hybrid.ops.gdn_gates import gdn_gates, gdn_gates_reference


def run(arguments: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The op over poison; it must agree with float64 and leave its arguments alone."""
    before = moved(arguments, "cpu")
    with poisoned_outputs():
        actual = gdn_gates(**arguments)
    for gate, exact in zip(actual, gates_oracle(**arguments), strict=True):
        assert gate.dtype == torch.float32 and gate.is_contiguous() and gate.shape == arguments["b"].shape
        assert_close(gate, exact)
    assert all(value is None or same_bits(value, before[name]) for name, value in arguments.items())
    return actual


@pytest.mark.parametrize("heads", SIZES)
@pytest.mark.parametrize("batch, tokens", [(1, 1), (4, 1), (3, 5)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(heads, batch, tokens, dtype):
    run(gate_arguments(batch, tokens, heads, dtype=dtype))


@pytest.mark.parametrize("tokens", SIZES)
def test_many_tokens(tokens):
    run(gate_arguments(2, tokens, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("a_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_head", [*DTYPES, torch.float64], ids=str)
def test_dtypes_mix(dtype, a_dtype, per_head):
    run(gate_arguments(4, 2, 7, dtype=dtype, a_dtype=a_dtype, per_head=per_head))


@pytest.mark.parametrize("shape", [(0, 1, 4), (3, 0, 4), (3, 1, 0)], ids=str)
def test_nothing_to_do(shape):
    run(gate_arguments(*shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(dtype):
    arguments = gate_arguments(4, 3, 9, dtype=dtype)
    expected = run(arguments)
    packed = {name: value.contiguous() for name, value in arguments.items()}
    swapped = arguments | {name: packed[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("b", "a")}
    for other in (packed, swapped):
        for gate, same in zip(run(other), expected, strict=True):
            assert_close(gate, same)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_values_stay_finite(dtype):
    beta, g = run(extreme_gate_arguments(dtype))
    assert beta.isfinite().all() and g.isfinite().all()
    assert ((beta >= 0) & (beta <= 1)).all() and (g <= 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parked_rows_are_zero_whatever_they_hold(dtype):
    arguments = gate_arguments(7, 2, 5, dtype=dtype)
    parked = arguments["parked"]
    arguments["b"][parked], arguments["a"][parked] = float("nan"), float("inf")
    for gate in gdn_gates(**arguments):
        assert (gate[parked] == 0).all()
        assert (gate[~parked] != 0).all()


def test_no_row_is_parked_without_a_mask():
    for gate in run(gate_arguments(4, 1, 5, parked=False)):
        assert (gate != 0).all()


def test_beta_is_what_the_models_dtype_holds():
    half = torch.full((1, 1, 1), 0.5, dtype=torch.bfloat16)
    beta, _ = gdn_gates(half, half, torch.zeros(1), torch.zeros(1), None)
    assert beta.item() == half.sigmoid().item() == 0.62109375


def test_g_is_what_hugging_face_computes():
    arguments = gate_arguments(4, 3, 9, dtype=torch.bfloat16, parked=False)
    _, g = gdn_gates(**arguments)
    assert_close(g, -arguments["A_log"].exp() * F.softplus(arguments["a"].float() + arguments["dt_bias"]))


def test_softplus_keeps_its_tail():
    raw = torch.full((1, 1, 1), -30.0)
    _, g = gdn_gates(raw, raw, torch.zeros(1), torch.zeros(1), None)
    assert g.item() == pytest.approx(-math.exp(-30), rel=1e-6)


def test_the_cpu_runs_the_reference():
    arguments = gate_arguments(5, 2, 33)
    for gate, expected in zip(gdn_gates(**arguments), gdn_gates_reference(**arguments), strict=True):
        assert same_bits(gate, expected)


@pytest.mark.parametrize("name", ["b", "a", "A_log", "dt_bias"])
def test_a_gradient_is_refused(name):
    arguments = gate_arguments(2, 1, 3)
    arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="gdn_gates is for inference and has no gradient"):
        gdn_gates(**arguments)
    expected = gates_oracle(**arguments)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for gate, exact in zip(gdn_gates(**arguments), expected, strict=True):
                assert_close(gate, exact.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parked", [True, False], ids=["parked", "none parked"])
def test_opcheck(dtype, parked):
    torch.library.opcheck(gdn_gates, (), gate_arguments(4, 1, 3, dtype=dtype, parked=parked))
    torch.library.opcheck(gdn_gates, (), gate_arguments(2, 3, 5, dtype=dtype, per_head=dtype, parked=parked))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_tensors_need_no_kernel(dtype):
    with FakeTensorMode():
        arguments = {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta")
            for name, value in gate_arguments(2, 3, 5, dtype=dtype).items()
        }
        gates = gdn_gates(**arguments)
    for gate in gates:
        assert gate.shape == (2, 3, 5) and gate.dtype == torch.float32
        assert gate.device.type == "meta" and gate.is_contiguous()
