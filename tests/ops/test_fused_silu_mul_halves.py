# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""fused_silu_mul_halves on a CPU against float64: any size and stride, transformers' roundings, and no gradient."""

import pytest
import torch
import torch.nn.functional as F
from decode_cases import same_bits
from glue_cases import (
    DTYPES,
    SIZES,
    extreme_gate_up,
    gate_up_case,
    poisoned_outputs,
    silu_mul_oracle,
    slice_of_poison,
)
from tolerances import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_hybrid.ops.fused_silu_mul_halves import fused_silu_mul_halves, fused_silu_mul_halves_reference


def run(gate_up: torch.Tensor) -> torch.Tensor:
    """The op over poison; it must agree with float64 and leave its argument alone."""
    before = gate_up.clone()
    with poisoned_outputs():
        actual = fused_silu_mul_halves(gate_up)
    assert actual.dtype == gate_up.dtype and actual.is_contiguous()
    assert actual.shape == (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    assert_close(actual, silu_mul_oracle(gate_up))
    assert same_bits(gate_up, before)
    return actual


@pytest.mark.parametrize("half", SIZES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(half, rows, dtype):
    run(gate_up_case(rows, 2 * half, dtype=dtype))


@pytest.mark.parametrize("shape", [(6,), (2, 3, 8), (2, 1, 3, 8), (0, 8), (3, 0), (2, 0, 8)], ids=str)
def test_any_number_of_leading_dimensions(shape):
    run(gate_up_case(*shape))


@pytest.mark.parametrize("half", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows(half, dtype):
    packed = gate_up_case(2, 3, 2 * half, dtype=dtype)
    expected = run(packed)
    for gap, skipped in ((1, 0), (8, 8), (9, 4)):
        assert_close(run(slice_of_poison(packed, 2 * half + gap, skipped)), expected)
    assert_close(run(packed.transpose(0, 1)), expected.transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_values_stay_finite(dtype):
    assert run(extreme_gate_up(dtype)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_silu_is_rounded_as_in_transformers(dtype):
    gate, up = gate_up_case(16, 2048, dtype=dtype).chunk(2, dim=-1)
    assert torch.equal(fused_silu_mul_halves(torch.cat([gate, up], dim=-1)), F.silu(gate) * up)


def test_the_cpu_runs_the_reference():
    gate_up = gate_up_case(5, 66)
    assert same_bits(fused_silu_mul_halves(gate_up), fused_silu_mul_halves_reference(gate_up))


@pytest.mark.parametrize("shape", [(), (5,), (2, 7)], ids=str)
def test_an_odd_width_is_refused(shape):
    with pytest.raises(ValueError, match="gate_up must be two halves"):
        fused_silu_mul_halves(torch.zeros(shape))
    with FakeTensorMode(), pytest.raises(ValueError, match="gate_up must be two halves"):
        fused_silu_mul_halves(torch.zeros(shape))


def test_a_gradient_is_refused():
    gate_up = gate_up_case(2, 6).requires_grad_()
    with pytest.raises(RuntimeError, match="fused_silu_mul_halves is for inference and has no gradient"):
        fused_silu_mul_halves(gate_up)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(fused_silu_mul_halves(gate_up), silu_mul_oracle(gate_up.detach()))
    fused_silu_mul_halves_reference(gate_up).sum().backward()
    assert gate_up.grad is not None and gate_up.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    torch.library.opcheck(fused_silu_mul_halves, (gate_up_case(3, 10, dtype=dtype),))
    torch.library.opcheck(fused_silu_mul_halves, (slice_of_poison(gate_up_case(2, 3, 6, dtype=dtype), 9),))
    torch.library.opcheck(fused_silu_mul_halves, (gate_up_case(2, 3, 6, dtype=dtype).transpose(0, 1),))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(6,), (2, 3, 8), (0, 4)], ids=str)
def test_fake_tensors_need_no_kernel(dtype, shape):
    with FakeTensorMode():
        out = fused_silu_mul_halves(torch.empty(shape, dtype=dtype, device="meta"))
    assert out.shape == (*shape[:-1], shape[-1] // 2)
    assert out.dtype == dtype and out.device.type == "meta" and out.is_contiguous()
