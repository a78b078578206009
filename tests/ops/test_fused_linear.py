# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""normed_rows, normed_linear and residual_linear on a CPU, and the Triton kernels of one row and of norms in the
interpreter, against float64."""

import pytest
import torch
import torch.nn.functional as F
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
    silu_mul_oracle,
)
from gdn_decode_cases import interpreted
from glue_cases import DTYPES, poisoned_outputs, slice_of_poison
from tolerances import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from deepspeed_hybrid.ops.fused_linear import (
    normed_linear,
    normed_linear_reference,
    normed_rows,
    normed_rows_reference,
    residual_linear,
    residual_linear_reference,
)

SIZES = [1, 3, 127]
SQUARES = [0, 1, 70]
kernel_alone = [pytest.mark.interpreter, interpreted]


def kernel_rows(hidden, norm, norm_offset, eps):
    from deepspeed_hybrid.ops.triton.rms_norm import launch  # under the interpreter only

    return launch(hidden, norm, norm_offset, eps), hidden.new_empty(0, len(hidden), dtype=torch.float32)


def kernel_normed(scaled, squares, eps, weight, bias, glu, how=None):
    from deepspeed_hybrid.ops.triton.row_linear import launch

    given = squares if len(squares) else None
    out, *others = launch(scaled, weight, given, eps, bias, None, None, 0.0, glu, how)
    assert others == [None, None]
    return out


def kernel_residual(x, weight, bias, residual, next_norm, next_offset, next_eps, how=None):
    from deepspeed_hybrid.ops.triton.row_linear import launch

    return launch(x, weight, None, 0.0, bias, residual, next_norm, next_offset, False, how)


def both(op, kernel):
    return pytest.mark.parametrize("op", [op, pytest.param(kernel, marks=kernel_alone)], ids=["op", "kernel"])


def rows_for(op, rows: int) -> int:
    """The kernel of a product has one row."""
    return 1 if op in (kernel_normed, kernel_residual) else rows


def run_normed(op, arguments: dict) -> torch.Tensor:
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    with poisoned_outputs():
        out = op(**arguments)
    assert out.dtype == arguments["scaled"].dtype and out.is_contiguous()
    exact = normed_linear_oracle(**arguments)
    assert out.shape == exact.shape
    assert_close(out, exact)
    assert all(same_bits(arguments[name], value) for name, value in before.items())
    return out


def run_residual(op, arguments: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The hidden state must agree with float64, and the prepared norm with the norm of just this hidden state."""
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    with poisoned_outputs():
        hidden, scaled, squares = op(**arguments)
    for one in (hidden, scaled):
        assert one.dtype == arguments["x"].dtype and one.shape == arguments["residual"].shape and one.is_contiguous()
    assert squares.dtype == torch.float32 and squares.shape[1] == len(hidden) and squares.is_contiguous()
    assert_close(hidden, hidden_oracle(**arguments))
    norm = (arguments["next_norm"], arguments["next_offset"], arguments["next_eps"])
    assert_close(finished(scaled, squares, norm[2]).to(scaled.dtype), rms_norm_oracle(hidden, *norm))
    assert all(same_bits(arguments[name], value) for name, value in before.items())
    return hidden, scaled, squares


# ------------------------------------------------------------------------------------------------------------- norms


@both(normed_rows, kernel_rows)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [*SIZES, 2560])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_normalised(op, dtype, size, offset):
    hidden, norm = normal(3, size, dtype=dtype, seed=1, scale=4), normal(size, dtype=dtype, seed=2)
    before = hidden.clone()
    with poisoned_outputs():
        normed, squares = op(hidden, norm, offset, EPS)
    assert_close(normed, rms_norm_oracle(hidden, norm, offset, EPS))
    assert normed.dtype == dtype and normed.is_contiguous()
    assert squares.shape == (0, 3) and squares.dtype == torch.float32
    assert same_bits(hidden, before)


@both(normed_rows, kernel_rows)
def test_a_norm_reads_rows_of_a_wider_tensor(op):
    """The last position of a prefill, say."""
    hidden, norm = normal(4, 127, dtype=torch.float32, seed=1), normal(127, dtype=torch.float32, seed=2)
    normed, _ = op(slice_of_poison(hidden, 300), norm, 1.0, EPS)
    assert same_bits(normed, op(hidden, norm, 1.0, EPS)[0]) and normed.is_contiguous()


@both(normed_rows, kernel_rows)
def test_a_row_of_zeros_is_divided_by_its_epsilon(op):
    normed, _ = op(torch.zeros(2, 5), torch.ones(5), 1.0, EPS)
    assert (normed == 0).all()
    small = torch.full((1, 4), 1e-4)
    assert_close(op(small, torch.ones(4), 0.0, 0.25)[0], small / 0.25**0.5)


# ---------------------------------------------------------------------------------------------------------- products


@both(normed_linear, kernel_normed)
@pytest.mark.parametrize("parts", SQUARES)
@pytest.mark.parametrize("kind", ["plain", "bias", "glu"])
@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("n", SIZES)
def test_normed_linear(op, n, k, kind, parts):
    arguments = normed_arguments(rows_for(op, 3), n, k, parts=parts, bias=kind == "bias", glu=kind == "glu")
    run_normed(op, arguments)


@both(residual_linear, kernel_residual)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("n", SIZES)
def test_residual_linear(op, n, k, bias, offset):
    run_residual(op, residual_arguments(rows_for(op, 3), n, k, bias=bias, offset=offset))


@both(normed_linear, kernel_normed)
@pytest.mark.parametrize("parts", SQUARES)
@pytest.mark.parametrize("kind", ["plain", "bias", "glu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_of_normed_linear(op, dtype, kind, parts):
    run_normed(
        op,
        normed_arguments(rows_for(op, 2), 40, 200, dtype=dtype, parts=parts, bias=kind == "bias", glu=kind == "glu"),
    )


@both(residual_linear, kernel_residual)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # of bf16 the interpreter cuts bits off
def test_dtypes_of_residual_linear(op, dtype, bias):
    run_residual(op, residual_arguments(rows_for(op, 2), 40, 200, dtype=dtype, bias=bias))


@both(normed_linear, kernel_normed)
def test_parts_of_the_squares_are_added_up(op):
    """However a sum is cut into parts, and in whatever order."""
    arguments = normed_arguments(rows_for(op, 2), 5, 64, parts=70)
    whole = arguments | {"squares": arguments["squares"].sum(0, keepdim=True)}
    turned = arguments | {"squares": arguments["squares"].flip(0).contiguous()}
    expected = op(**arguments)
    for other in (whole, turned):
        assert_close(op(**other), expected)
    halved = arguments | {"squares": arguments["squares"][:35].contiguous()}
    assert not torch.allclose(op(**halved), expected, rtol=0.1)


@both(residual_linear, kernel_residual)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_next_norm_sees_what_its_layer_sees(op, dtype):
    """The hidden state as it was rounded, so that only the rounding of ``scaled`` itself is between the two."""
    arguments = residual_arguments(1, 256, 32, dtype=dtype)
    hidden, scaled, squares = op(**arguments)
    norm = (arguments["next_norm"], arguments["next_offset"], arguments["next_eps"])
    exact = rms_norm_oracle(hidden, *norm)
    # The interpreter cuts bf16 off where a GPU rounds to nearest; fp32 has a few roundings inside.
    unit = torch.finfo(dtype).eps * {torch.float16: 0.501, torch.bfloat16: 1.01, torch.float32: 4}[dtype]
    assert ((finished(scaled, squares, norm[2]) - exact).abs() <= exact.abs() * unit + 1e-7).all()
    if len(squares):
        torch.testing.assert_close(squares.double().sum(0), hidden.double().square().sum(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("glu", [False, True], ids=["bias", "glu"])
@both(residual_linear, kernel_residual)
def test_two_products_in_a_chain_are_plain_torch(op, dtype, glu):
    """residual + linear, RMSNorm, linear: whatever lies between the two ops, its end is that of plain torch."""
    second = normed_linear if op is residual_linear else kernel_normed
    one = residual_arguments(rows_for(op, 3), 96, 127, dtype=dtype, bias=True)
    two = normed_arguments(1, 33, 96, dtype=dtype, bias=not glu, glu=glu)
    hidden, scaled, squares = op(**one)
    out = second(scaled, squares, one["next_eps"], two["weight"], two["bias"], glu)

    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in one.items()}
    expected = wide["residual"] + F.linear(wide["x"], wide["weight"], wide["bias"])
    expected = F.rms_norm(expected, (96,), wide["next_norm"] + 1.0, EPS)
    expected = F.linear(expected, two["weight"].double(), None if glu else two["bias"].double())
    if glu:
        gate, up = expected.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    scale = float(expected.abs().max())  # every element of the row takes part in each output
    assert_close(out / scale, expected / scale)


def test_oracles_agree_with_torch():
    """The formulas above, once, against the functions that they stand for."""
    hidden, norm = normal(3, 20, dtype=torch.float64, seed=1), normal(20, dtype=torch.float64, seed=2)
    assert torch.allclose(rms_norm_oracle(hidden, norm, 1.0, 0.1), F.rms_norm(hidden, (20,), norm + 1, 0.1))
    assert torch.allclose(silu_mul_oracle(hidden), F.silu(hidden[:, :10]) * hidden[:, 10:])


# ------------------------------------------------------------------------------------------- the kernel of one row


@pytest.mark.interpreter
@interpreted
@pytest.mark.parametrize("block_n, warps", [(1, 4), (2, 8), (4, 4), (8, 4)])
@pytest.mark.parametrize("n, k", [(7, 33), (40, 64), (37, 100), (16, 2560)])
def test_tiles_of_any_size(n, k, block_n, warps):
    from deepspeed_hybrid.ops.triton.row_linear import Launch

    how = Launch(block_n, warps)
    for dtype in (torch.float32, torch.float16):
        run_normed(lambda **kw: kernel_normed(**kw, how=how), normed_arguments(1, n, k, dtype=dtype, parts=70))
        run_normed(lambda **kw: kernel_normed(**kw, how=how), normed_arguments(1, n, k, dtype=dtype, glu=True))
        _, _, squares = run_residual(
            lambda **kw: kernel_residual(**kw, how=how), residual_arguments(1, n, k, dtype=dtype, bias=True)
        )
        assert squares.shape == (-(-n // block_n), 1)


@pytest.mark.interpreter
@interpreted
def test_the_kernel_rounds_once_behind_its_bias():
    arguments = normed_arguments(1, 64, 127, dtype=torch.float16, parts=3, bias=True)
    exact = normed_linear_oracle(**arguments)
    error = (kernel_normed(**arguments).double() - exact).abs()
    assert (error <= exact.abs() * (torch.finfo(torch.float16).eps / 2) + 1e-6).all()


@pytest.mark.interpreter
@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_extreme_gates_stay_finite():
    """An exponential that is infinite divides to zero; NumPy, which stands in for a GPU, warns of it."""
    arguments = normed_arguments(1, 5, 3, parts=0, glu=True)
    for extreme in (-1e4, -90.0, 90.0, 1e4):
        arguments["scaled"].fill_(extreme)
        arguments["weight"].fill_(1 / 3)
        assert_close(kernel_normed(**arguments), normed_linear_oracle(**arguments))


# ----------------------------------------------------------------------------------------------------------- as ops


def rows_arguments(dtype: torch.dtype = torch.float32) -> dict:
    return {
        "hidden": normal(3, 12, dtype=dtype, seed=1),
        "norm": normal(12, dtype=dtype, seed=2),
        "norm_offset": 1.0,
        "eps": EPS,
    }


OPS = {
    "normed_rows": (normed_rows, normed_rows_reference, rows_arguments),
    "normed_linear": (
        normed_linear,
        normed_linear_reference,
        lambda dtype=torch.float32: normed_arguments(3, 6, 12, dtype=dtype, parts=2, bias=True),
    ),
    "glu": (
        normed_linear,
        normed_linear_reference,
        lambda dtype=torch.float32: normed_arguments(3, 6, 12, dtype=dtype, glu=True),
    ),
    "residual_linear": (
        residual_linear,
        residual_linear_reference,
        lambda dtype=torch.float32: residual_arguments(3, 6, 12, dtype=dtype, bias=True),
    ),
}
every_op = pytest.mark.parametrize("op, reference, arguments_of", OPS.values(), ids=OPS)


def tensors(output) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


@every_op
def test_the_cpu_runs_the_reference(op, reference, arguments_of):
    for one, other in zip(tensors(op(**arguments_of())), tensors(reference(**arguments_of())), strict=True):
        assert same_bits(one, other)


@every_op
def test_a_gradient_is_refused(op, reference, arguments_of):
    arguments = arguments_of()
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    for name in names:
        asking = arguments | {name: arguments[name].clone().requires_grad_()}
        with pytest.raises(RuntimeError, match=rf"{op._name} is for inference and has no gradient"):
            op(**asking)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                outputs = tensors(op(**asking))
            assert not any(output.requires_grad for output in outputs)


@every_op
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(op, reference, arguments_of, dtype):
    torch.library.opcheck(op, (), arguments_of(dtype))


@every_op
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_tensors_need_no_kernel(op, reference, arguments_of, dtype):
    """Only how many parts the squares of residual_linear have is not known before it runs."""
    real = tensors(reference(**arguments_of(dtype)))
    with FakeTensorMode(shape_env=ShapeEnv()):
        arguments = {
            name: torch.empty(value.shape, dtype=value.dtype, device="cuda")
            if isinstance(value, torch.Tensor)
            else value
            for name, value in arguments_of(dtype).items()
        }
        fakes = tensors(op(**arguments))
    for index, (fake, expected) in enumerate(zip(fakes, real, strict=True)):
        assert fake.dtype == expected.dtype and fake.device.type == "cuda" and fake.is_contiguous()
        known = slice(1, None) if op is residual_linear and index == 2 else slice(None)
        assert fake.dim() == 2 and fake.shape[known] == expected.shape[known]


def noncontiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


WRONG = [
    ("glu", "scaled", lambda tensor: tensor.double(), "x must be contiguous"),
    ("glu", "scaled", lambda tensor: tensor[0], "x must be contiguous"),
    ("normed_linear", "scaled", noncontiguous, "x must be contiguous"),
    ("normed_linear", "squares", lambda tensor: tensor[:, :2].contiguous(), r"squares must be \[2, 3\]"),
    ("normed_linear", "squares", lambda tensor: tensor.double(), "squares must be torch.float32"),
    ("normed_linear", "squares", noncontiguous, "squares must be contiguous"),
    ("normed_linear", "weight", lambda tensor: tensor[0], r"weight must be \[N, 12\]"),
    ("normed_linear", "weight", lambda tensor: tensor[:, :-1].contiguous(), r"weight must be \[6, 12\]"),
    ("normed_linear", "weight", lambda tensor: tensor.half(), "weight must be torch.float32"),
    ("normed_linear", "weight", lambda tensor: tensor.t().contiguous().t(), "weight must be contiguous"),
    ("normed_linear", "weight", lambda tensor: tensor.to("meta"), "weight is on meta, and x on cpu"),
    ("normed_linear", "bias", lambda tensor: tensor[:-1], r"bias must be \[6\]"),
    ("normed_linear", "bias", lambda tensor: tensor.bfloat16(), "bias must be torch.float32"),
    ("normed_linear", "glu", lambda _: True, "glu takes no bias"),
    ("glu", "weight", lambda tensor: tensor[:-1], r"weight must be \[N, 12\], N even"),
    ("residual_linear", "x", lambda tensor: tensor.int(), "x must be contiguous"),
    ("residual_linear", "residual", lambda tensor: tensor[:, :-1].contiguous(), r"residual must be \[3, 6\]"),
    ("residual_linear", "residual", lambda tensor: tensor.half(), "residual must be torch.float32"),
    ("residual_linear", "residual", noncontiguous, "residual must be contiguous"),
    ("residual_linear", "next_norm", lambda tensor: tensor[:-1], r"next_norm must be \[6\]"),
    ("residual_linear", "next_norm", lambda tensor: tensor.bfloat16(), "next_norm must be torch.float32"),
    ("residual_linear", "next_norm", lambda tensor: tensor.to("meta"), "next_norm is on meta, and x on cpu"),
]


@pytest.mark.parametrize(
    "name, argument, change, message", WRONG, ids=lambda value: value if type(value) is str else ""
)
def test_bad_arguments_are_refused(name, argument, change, message):
    op, reference, arguments_of = OPS[name]
    arguments = arguments_of()
    arguments[argument] = change(arguments[argument])
    # A CPU op that gets a tensor on meta goes to the fake, which has no values to look at: ask the reference itself.
    on_meta = isinstance(arguments[argument], torch.Tensor) and arguments[argument].is_meta
    with pytest.raises(RuntimeError, match=message):
        (reference if on_meta else op)(**arguments)
