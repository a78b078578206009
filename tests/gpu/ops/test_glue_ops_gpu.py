# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The CUDA fused_silu_mul_halves and gdn_gates against float64 on the CPU."""

import pytest
import torch
from decode_cases import same_bits
from glue_cases import (
    DTYPES,
    SIZES,
    extreme_gate_arguments,
    extreme_gate_up,
    gate_arguments,
    gate_up_case,
    gates_oracle,
    moved,
    poisoned_outputs,
    silu_mul_oracle,
    slice_of_poison,
)
from tolerances import assert_close

from deepspeed_hybrid.ops.fused_silu_mul_halves import fused_silu_mul_halves, fused_silu_mul_halves_reference
from deepspeed_hybrid.ops.gdn_gates import gdn_gates, gdn_gates_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def run_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """On the GPU over poison; it must agree with float64."""
    with poisoned_outputs():
        actual = fused_silu_mul_halves(gate_up)
    assert actual.dtype == gate_up.dtype and actual.is_contiguous()
    assert actual.shape == (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    assert_close(actual, silu_mul_oracle(gate_up))
    return actual


def run_gates(arguments: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """On the GPU over poison; it must agree with float64. ``arguments`` are on the CPU."""
    on_gpu = moved(arguments, "cuda")
    with poisoned_outputs():
        actual = gdn_gates(**on_gpu)
    for gate, exact in zip(actual, gates_oracle(**arguments), strict=True):
        assert gate.dtype == torch.float32 and gate.is_contiguous() and gate.shape == arguments["b"].shape
        assert_close(gate, exact)
    return actual


# ------------------------------------------------------------------------------------------- fused_silu_mul_halves


@pytest.mark.parametrize("half", [*SIZES, 8, 4096, 9216])
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_against_float64(half, rows, dtype):
    run_silu_mul(gate_up_case(rows, 2 * half, dtype=dtype).cuda())


@pytest.mark.parametrize("shape", [(6,), (2, 3, 8), (2, 1, 3, 8), (70000, 6), (0, 8), (3, 0)], ids=str)
def test_silu_mul_of_any_shape(shape):
    run_silu_mul(gate_up_case(*shape).cuda())


@pytest.mark.parametrize("half", [*SIZES, 8, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_of_strided_rows(half, dtype):
    packed = gate_up_case(2, 3, 2 * half, dtype=dtype).cuda()
    expected = run_silu_mul(packed)
    for gap, skipped in ((1, 0), (8, 8), (8, 3), (9, 4)):
        assert same_bits(run_silu_mul(slice_of_poison(packed, 2 * half + gap, skipped)), expected)
    uneven = slice_of_poison(packed, 2 * half + 8).transpose(0, 1)
    assert same_bits(run_silu_mul(uneven), expected.transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_of_extreme_values_stays_finite(dtype):
    gate_up = extreme_gate_up(dtype)
    assert run_silu_mul(gate_up.cuda()).isfinite().all()
    # 22 columns are read one by one; 24 in packs.
    gate, up = (torch.nn.functional.pad(half, (0, 2)) for half in gate_up.chunk(2, dim=-1))
    assert run_silu_mul(torch.cat([gate, up], dim=-1).cuda()).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_silu_is_rounded_as_in_transformers(dtype):
    gate_up = gate_up_case(64, 2 * 9216, dtype=dtype).cuda()
    gate, up = gate_up.chunk(2, dim=-1)
    same = fused_silu_mul_halves(gate_up) == torch.nn.functional.silu(gate) * up
    assert same.double().mean() > 0.999


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_silu_mul_has_the_same_bits_in_any_batch(dtype):
    gate_up = gate_up_case(64, 2 * 9216, dtype=dtype).cuda()
    together = fused_silu_mul_halves(gate_up)
    for row in (0, 5, 63):
        assert same_bits(fused_silu_mul_halves(gate_up[row]), together[row])


def test_silu_mul_inside_a_graph():
    gate_up = gate_up_case(7, 2 * 9216, dtype=torch.bfloat16).cuda()
    fused_silu_mul_halves(gate_up)  # builds the op and loads its kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = fused_silu_mul_halves(gate_up)
    for seed in range(1, 4):
        gate_up.copy_(gate_up_case(7, 2 * 9216, dtype=torch.bfloat16, seed=seed))
        actual.fill_(float("nan"))
        graph.replay()
        assert_close(actual, silu_mul_oracle(gate_up))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensor: tensor.double(), "must be float32, bfloat16 or float16"),
        (lambda tensor: tensor.t().contiguous().t(), "last dimension of gate_up must be contiguous"),
        (lambda tensor: tensor[:, :-1], "must be two halves"),
        (lambda tensor: tensor[0, 0], "must be two halves"),
    ],
)
def test_silu_mul_refuses_bad_arguments(change, message):
    with pytest.raises(RuntimeError, match=message):
        fused_silu_mul_halves(change(gate_up_case(4, 8).cuda()))


# ------------------------------------------------------------------------------------------------------- gdn_gates


@pytest.mark.parametrize("heads", [*SIZES, 32])
@pytest.mark.parametrize("batch, tokens", [(1, 1), (3, 5), (64, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_against_float64(heads, batch, tokens, dtype):
    run_gates(gate_arguments(batch, tokens, heads, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("a_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_head", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("parked", [True, False], ids=["parked", "none parked"])
def test_gates_of_mixed_dtypes(dtype, a_dtype, per_head, parked):
    run_gates(gate_arguments(4, 2, 7, dtype=dtype, a_dtype=a_dtype, per_head=per_head, parked=parked))


@pytest.mark.parametrize("shape", [(0, 1, 4), (3, 0, 4), (3, 1, 0)], ids=str)
def test_gates_with_nothing_to_do(shape):
    run_gates(gate_arguments(*shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_of_the_gates_do_not_matter(dtype):
    arguments = gate_arguments(5, 3, 32, dtype=dtype)
    expected = run_gates(arguments)
    packed = {name: value.contiguous().cuda() for name, value in arguments.items()}
    swapped = packed | {name: packed[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("b", "a")}
    for other in (packed, swapped):
        assert all(same_bits(gate, same) for gate, same in zip(gdn_gates(**other), expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_gates_stay_finite(dtype):
    beta, g = run_gates(extreme_gate_arguments(dtype))
    assert beta.isfinite().all() and g.isfinite().all()
    assert ((beta >= 0) & (beta <= 1)).all() and (g <= 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parked_rows_are_zero_whatever_they_hold(dtype):
    arguments = gate_arguments(7, 2, 5, dtype=dtype)
    parked = arguments["parked"]
    arguments["b"][parked], arguments["a"][parked] = float("nan"), float("inf")
    for gate in gdn_gates(**moved(arguments, "cuda")):
        assert (gate[parked.cuda()] == 0).all()
        assert (gate[~parked.cuda()] != 0).all()


def test_beta_is_what_the_models_dtype_holds():
    half = torch.full((1, 1, 1), 0.5, dtype=torch.bfloat16, device="cuda")
    beta, _ = gdn_gates(half, half, torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda"), None)
    assert beta.item() == 0.62109375


def test_gates_inside_a_graph():
    arguments = moved(gate_arguments(7, 1, 32, dtype=torch.bfloat16), "cuda")
    gdn_gates(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = gdn_gates(**arguments)
    for seed in range(1, 4):
        fresh = gate_arguments(7, 1, 32, dtype=torch.bfloat16, seed=seed)
        fresh["parked"] = fresh["parked"].roll(seed)
        for name, value in fresh.items():
            arguments[name].copy_(value)
        for gate in actual:
            gate.fill_(float("nan"))
        graph.replay()
        for gate, exact in zip(actual, gates_oracle(**fresh), strict=True):
            assert_close(gate, exact)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("b", lambda tensor: tensor.double(), "b must be float32, bfloat16 or float16"),
        ("b", lambda tensor: tensor[0], "b must be"),
        ("a", lambda tensor: tensor[:, :, :-1], "a must be"),
        ("a", lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2), "heads of a must be adjacent"),
        ("A_log", lambda tensor: tensor[:-1], "A_log must be contiguous with one value a head"),
        ("dt_bias", lambda tensor: tensor.int(), "dt_bias must be float64, float32"),
        ("dt_bias", lambda tensor: tensor.cpu(), "dt_bias is on cpu"),
        ("parked", lambda tensor: tensor.byte(), "parked must be Bool"),
        ("parked", lambda tensor: tensor[:-1], "parked must be contiguous with one value a row"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gates_refuse_bad_arguments(name, change, message):
    arguments = moved(gate_arguments(4, 3, 5), "cuda")
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        gdn_gates(**arguments)


# ------------------------------------------------------------------------------------------------------------ both


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_sync_is_needed():
    gate_up, arguments = gate_up_case(3, 20).cuda(), moved(gate_arguments(3, 1, 5), "cuda")
    fused_silu_mul_halves(gate_up), gdn_gates(**arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_silu_mul_halves(gate_up), gdn_gates(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_references_agree_on_the_gpu():
    gate_up, arguments = gate_up_case(16, 2 * 9216).cuda(), moved(gate_arguments(16, 1, 32), "cuda")
    assert_close(fused_silu_mul_halves_reference(gate_up), fused_silu_mul_halves(gate_up))
    for reference, gate in zip(gdn_gates_reference(**arguments), gdn_gates(**arguments), strict=True):
        assert_close(reference, gate)


def test_a_gradient_is_refused():
    with pytest.raises(RuntimeError, match="fused_silu_mul_halves is for inference and has no gradient"):
        fused_silu_mul_halves(gate_up_case(2, 6).cuda().requires_grad_())
    arguments = moved(gate_arguments(2, 1, 3), "cuda")
    arguments["A_log"].requires_grad_()
    with pytest.raises(RuntimeError, match="gdn_gates is for inference and has no gradient"):
        gdn_gates(**arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    torch.library.opcheck(fused_silu_mul_halves, (gate_up_case(3, 10, dtype=dtype).cuda(),))
    torch.library.opcheck(gdn_gates, (), moved(gate_arguments(4, 2, 3, dtype=dtype), "cuda"))
    torch.library.opcheck(gdn_gates, (), moved(gate_arguments(4, 2, 3, dtype=dtype, parked=False), "cuda"))
