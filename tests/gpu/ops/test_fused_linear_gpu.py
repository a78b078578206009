# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""normed_rows, normed_linear and residual_linear on a GPU against float64, at the sizes of a 4B model."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from decode_cases import same_bits
from fused_linear_cases import (
    EPS,
    finished,
    hidden_oracle,
    normal,
    normed_arguments,
    normed_linear_oracle,
    residual_arguments,
    rms_norm_oracle,
)
from glue_cases import DTYPES, moved, poisoned_outputs, slice_of_poison
from tolerances import assert_close, assert_close_but_for_roundings

from deepspeed_hybrid.ops import few_rows, warpgroup
from deepspeed_hybrid.ops.fused_linear import normed_linear, normed_rows, residual_linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HIDDEN, INNER = 2560, 9216
INPUTS = 12352  # columns of the input projections of a GatedDeltaNet layer
ROWS = [1, 2, 16, 40, 64, 80]
BIG = [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def exact_fp32():
    """Tensor cores would round the products of fp32 to TF32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(precision)


def on_gpu(arguments: dict) -> dict:
    return moved(arguments, "cuda")


def input_product(rows: int, dtype: torch.dtype, parts: int = 640, seed: int = 0) -> dict:
    return on_gpu(normed_arguments(rows, INPUTS, HIDDEN, dtype=dtype, parts=parts, seed=seed))


def gate_up(rows: int, dtype: torch.dtype, parts: int = 640, seed: int = 0) -> dict:
    return on_gpu(normed_arguments(rows, INNER, HIDDEN, dtype=dtype, parts=parts, glu=True, seed=seed))


def down(rows: int, dtype: torch.dtype, bias: bool = False, seed: int = 0) -> dict:
    return on_gpu(residual_arguments(rows, HIDDEN, INNER, dtype=dtype, bias=bias, seed=seed))


SHAPES = {
    "inputs": (normed_linear, input_product),
    "gate and up": (normed_linear, gate_up),
    "down": (residual_linear, down),
}
every_shape = pytest.mark.parametrize("op, arguments_of", SHAPES.values(), ids=SHAPES)


def tensors(output) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def check(op: Callable, arguments: dict, output) -> None:
    """Against float64, computed on the GPU as well: the weights are large."""
    if op is normed_linear:
        assert_close(output, normed_linear_oracle(**arguments))
        return
    hidden, scaled, squares = output
    assert_close_but_for_roundings(hidden, hidden_oracle(**arguments))
    norm = (arguments["next_norm"], arguments["next_offset"], arguments["next_eps"])
    assert_close(finished(scaled, squares, norm[2]).to(scaled.dtype), rms_norm_oracle(hidden, *norm))


def one_launch(arguments: dict) -> bool:
    """Whether a kernel of ours does all of it; two runs then have the same bits anywhere."""
    if "x" in arguments and arguments["x"].dtype == torch.float16:
        return False
    x = arguments["x"] if "x" in arguments else arguments["scaled"]
    glu = arguments.get("glu", False)
    return len(x) == 1 or any(kind.takes(x, arguments["weight"], glu) for kind in (few_rows, warpgroup))


def run(op: Callable, arguments: dict) -> tuple[torch.Tensor, ...]:
    """Twice, over poison where no library's product is in it: those refuse the mode that poisons."""
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    with poisoned_outputs() if one_launch(arguments) else nullcontext():
        output, again = op(**arguments), op(**arguments)
    check(op, arguments, output)
    for one, other in zip(tensors(output), tensors(again), strict=True):
        assert same_bits(one, other) and one.is_contiguous()
    assert all(same_bits(arguments[name], value) for name, value in before.items())
    return tensors(output)


# ----------------------------------------------------------------------------------------------------- against float64


@every_shape
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", BIG, ids=str)
def test_a_models_sizes(op, arguments_of, rows, dtype):
    """Two runs have the same bits."""
    run(op, arguments_of(rows, dtype))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("parts", [0, 1, 70])
@pytest.mark.parametrize("kind", ["plain", "bias", "glu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_sizes_of_normed_linear(dtype, kind, parts, rows):
    for n, k in ((1, 1), (3, 127), (127, 3), (37, 100)):
        arguments = normed_arguments(rows, n, k, dtype=dtype, parts=parts, bias=kind == "bias", glu=kind == "glu")
        run(normed_linear, on_gpu(arguments))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_sizes_of_residual_linear(dtype, bias, offset, rows):
    for n, k in ((1, 1), (3, 127), (127, 3), (37, 100)):
        run(residual_linear, on_gpu(residual_arguments(rows, n, k, dtype=dtype, bias=bias, offset=offset)))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 3, 127, 128, 256, HIDDEN, INNER])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_normed_rows(dtype, size, offset):
    hidden, norm = normal(64, size, dtype=dtype, seed=1, scale=4).cuda(), normal(size, dtype=dtype, seed=2).cuda()
    with poisoned_outputs():
        normed, squares = normed_rows(hidden, norm, offset, EPS)
    assert_close(normed, rms_norm_oracle(hidden, norm, offset, EPS))
    assert squares.shape == (0, 64)
    wider = slice_of_poison(hidden, 2 * size + 3)
    assert same_bits(normed_rows(wider, norm, offset, EPS)[0], normed)
    for first, last in ((0, 1), (63, 64), (5, 18)):  # among any others, and in programs that are not full
        assert same_bits(normed_rows(hidden[first:last], norm, offset, EPS)[0], normed[first:last])


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_rows_are_rounded_behind_the_bias(dtype, rows):
    arguments = on_gpu(normed_arguments(rows, INNER, HIDDEN, dtype=dtype, parts=70, bias=True))
    exact = normed_linear_oracle(**arguments)
    error = (normed_linear(**arguments).double() - exact).abs()
    assert (error <= exact.abs() * (torch.finfo(dtype).eps / 2) + 2e-5).all()


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_rows_round_between_operations(dtype, rows):
    """Product, SiLU, product of the two; product with bias, sum with the residual: as modules do, one by one."""
    arguments = on_gpu(normed_arguments(rows, INNER, HIDDEN, dtype=dtype, parts=70, glu=True))
    gate, up = normed_linear_oracle(**arguments | {"glu": False}).to(dtype).chunk(2, dim=-1)
    same = normed_linear(**arguments) == torch.nn.functional.silu(gate) * up
    assert same.double().mean() > 0.98

    arguments = on_gpu(residual_arguments(rows, HIDDEN, INNER, dtype=dtype, bias=True))
    product = arguments["x"].double() @ arguments["weight"].double().t() + arguments["bias"].double()
    same = residual_linear(**arguments)[0] == arguments["residual"] + product.to(dtype)
    assert same.double().mean() > 0.98


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", BIG, ids=str)
def test_products_in_a_chain(dtype, rows):
    """down and residual, norm, inputs of the next layer, from op to op; each is held to what it was given."""
    first, second = down(rows, dtype), input_product(rows, dtype)
    hidden, scaled, squares = residual_linear(**first)
    out = normed_linear(scaled, squares, first["next_eps"], second["weight"], None, False)
    normed = rms_norm_oracle(hidden, first["next_norm"], first["next_offset"], first["next_eps"])
    expected = normed @ second["weight"].double().t()
    scale = float(expected.abs().max())
    assert_close(out / scale, expected / scale)
    check(residual_linear, first, (hidden, scaled, squares))


@pytest.mark.parametrize("rows", ROWS)
def test_large_hidden_states_of_fp16(rows):
    """Their product with the norm's weight is beyond fp16, and the norm is not."""
    arguments = down(rows, torch.float16)
    arguments["residual"].mul_(6000)
    arguments["next_norm"].fill_(15.0)
    hidden, scaled, squares = residual_linear(**arguments)
    norm = (arguments["next_norm"], arguments["next_offset"], arguments["next_eps"])
    assert bool(hidden.isfinite().all())
    assert_close(finished(scaled, squares, norm[2]).to(scaled.dtype), rms_norm_oracle(hidden, *norm))


# ------------------------------------------------------------------------------------------------------------- graphs


@every_shape
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", BIG, ids=str)
def test_in_a_graph_with_other_inputs(op, arguments_of, rows, dtype):
    static = arguments_of(rows, dtype)
    op(**static)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = op(**static)
    for seed in (10, 20, 10):
        for name, value in arguments_of(rows, dtype, seed=seed).items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        for one in tensors(output):
            if one.numel():
                one.fill_(float("nan"))
        graph.replay()
        check(op, static, output)
        if one_launch(static):  # otherwise the library may choose another kernel while capturing
            for one, other in zip(tensors(output), tensors(op(**static)), strict=True):
                assert same_bits(one, other)


@pytest.mark.parametrize("rows", ROWS)
def test_a_chain_in_a_graph(rows):
    """Kernels that start before the one ahead has ended still read what it wrote."""
    first, second = down(rows, torch.bfloat16), input_product(rows, torch.bfloat16)

    def chain() -> torch.Tensor:
        x, residual = first["x"], first["residual"]
        for _ in range(8):
            residual, scaled, squares = residual_linear(**(first | {"x": x, "residual": residual}))
            out = normed_linear(scaled, squares, EPS, second["weight"], None, False)
            x = out[:, :INNER].contiguous()
        return out

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for seed in (1, 2, 3):
        for name in ("x", "residual"):
            first[name].copy_(down(rows, torch.bfloat16, seed=seed)[name])
        replays = []
        for _ in range(2):
            out.fill_(float("nan"))
            graph.replay()
            replays.append(out.clone())
        eager = chain()
        assert same_bits(*replays) and bool(eager.isfinite().all())
        if one_launch(first):
            assert same_bits(replays[0], eager)
        else:
            scale = float(eager.abs().max())
            torch.testing.assert_close(replays[0] / scale, eager / scale, rtol=0, atol=0.05)  # rounded 16 times


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@every_shape
@pytest.mark.parametrize("rows", ROWS)
def test_no_sync_is_needed(op, arguments_of, rows):
    arguments = arguments_of(rows, torch.bfloat16)
    op(**arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------------------------- as ops


@every_shape
@pytest.mark.parametrize("rows", [1, 2])
def test_opcheck(op, arguments_of, rows):
    small = (
        residual_arguments(rows, 16, 32, bias=True)
        if op is residual_linear
        else normed_arguments(rows, 16, 32, glu=arguments_of is gate_up)
    )
    torch.library.opcheck(op, (), on_gpu(small))


@every_shape
def test_a_gradient_is_refused(op, arguments_of):
    arguments = arguments_of(1, torch.bfloat16)
    arguments["weight"].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{op._name} is for inference and has no gradient"):
        op(**arguments)
    with torch.no_grad():
        assert not any(one.requires_grad for one in tensors(op(**arguments)))


@pytest.mark.parametrize("rows", [1, 2])
def test_bad_arguments_are_refused(rows):
    normed, residual = (
        on_gpu(normed_arguments(rows, 6, 12, bias=True)),
        on_gpu(residual_arguments(rows, 6, 12, bias=True)),
    )
    with pytest.raises(RuntimeError, match="weight is on cpu, and x on cuda:0"):
        normed_linear(**normed | {"weight": normed["weight"].cpu()})
    with pytest.raises(RuntimeError, match=r"bias must be \[6\]"):
        normed_linear(**normed | {"bias": normed["bias"][:-1]})
    with pytest.raises(RuntimeError, match="residual must be torch.float32"):
        residual_linear(**residual | {"residual": residual["residual"].half()})
    with pytest.raises(RuntimeError, match="weight must be contiguous"):
        residual_linear(**residual | {"weight": residual["weight"].t().contiguous().t()})
