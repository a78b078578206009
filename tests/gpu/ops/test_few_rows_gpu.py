# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""few_rows_linear against float64: odd numbers of rows and columns, everything around the product, any batch."""

import pytest
import torch
import torch.nn.functional as F
from decode_cases import same_bits
from glue_cases import poisoned_outputs
from tolerances import assert_close

from deepspeed_hybrid.ops.loader import load

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

EPS = 1e-6
AROUND = {
    "plain": {},
    "norm": {"norm": True},
    "norm and bias": {"norm": True, "bias": True},
    "glu": {"norm": True, "glu": True},
    "residual": {"residual": True},
    "residual and bias": {"residual": True, "bias": True},
}


def case(m, n, k, dtype=torch.bfloat16, norm=False, bias=False, residual=False, glu=False, seed=0) -> dict:
    """Arguments of the op by name, on the GPU, made on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, scale=1.0, like=dtype):
        return (scale * torch.randn(*shape, generator=generator)).to(like).cuda()

    return {
        "x": random(m, k),
        "weight": random(2 * n if glu else n, k, scale=k**-0.5),
        "squares": (random(37, m, like=torch.float32).square() * k / 37).contiguous() if norm else None,
        "eps": EPS,
        "bias": random(n) if bias else None,
        "residual": random(m, n) if residual else None,
        "next_norm": random(n, scale=0.2) if residual else None,
        "next_offset": 1.0,
        "glu": glu,
    }


def run(arguments: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with poisoned_outputs():
        return load("few_rows_linear").few_rows_linear(*arguments.values())


def exact(arguments: dict) -> torch.Tensor:
    values = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    product = values["x"] @ values["weight"].t()
    if values["squares"] is not None:
        product *= torch.rsqrt(values["squares"].sum(0) / values["x"].shape[1] + EPS)[:, None]
    if values["bias"] is not None:
        product += values["bias"]
    if values["glu"]:
        gate, up = product.chunk(2, dim=-1)
        product = F.silu(gate) * up
    return product if values["residual"] is None else product + values["residual"]


def check(arguments: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, scaled, squares = run(arguments)
    assert_close(out, exact(arguments))
    if arguments["residual"] is not None:
        hidden = out.double()
        assert_close(scaled, hidden * (arguments["next_norm"].double() + 1.0))
        torch.testing.assert_close(squares.double().sum(0), hidden.square().sum(1), rtol=1e-5, atol=1e-6)
    else:
        assert scaled.numel() == 0 and squares.numel() == 0
    return out, scaled, squares


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("m", [1, 2, 3, 8, 9, 16])
@pytest.mark.parametrize("n, k", [(48, 64), (61, 192), (2560, 2560), (128, 9216)], ids=str)
def test_against_float64(around, m, n, k):
    check(case(m, n, k, **around))


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("m", [5, 13])
def test_fp16(around, m):
    check(case(m, 100, 320, dtype=torch.float16, **around))


@pytest.mark.parametrize("around", [AROUND["norm and bias"], AROUND["glu"], AROUND["residual"]], ids=str)
@pytest.mark.parametrize("n, k", [(528, 2560), (8192, 128)], ids=str)  # so many columns show one bit of a factor
def test_a_row_has_the_same_bits_in_any_batch(around, n, k):
    arguments = case(16, n, k, **around)
    together = run(arguments)
    for m in (1, 3, 8, 9, 15):
        fewer = dict(arguments)
        for name, rows in (("x", 0), ("squares", 1), ("residual", 0)):
            if fewer[name] is not None:
                fewer[name] = fewer[name].narrow(rows, 0, m).contiguous()
        for one, other, rows in zip(run(fewer), together, (0, 0, 1), strict=True):
            assert same_bits(one, other.narrow(rows, 0, m) if other.numel() else other.new_empty(one.shape))


def test_inside_a_graph_behind_another_kernel():
    """The launch may overlap the one before it: x must be what that one wrote."""
    arguments = case(8, 2560, 2560, **AROUND["residual"])
    source = torch.empty_like(arguments["x"])
    run(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arguments["x"].copy_(source)
        for _ in range(3):  # one of ours behind another of ours
            out, scaled, _ = load("few_rows_linear").few_rows_linear(*arguments.values())
            arguments["x"] = scaled
    for seed in range(3):
        start = case(8, 2560, 2560, seed=seed)["x"]
        source.copy_(start)
        graph.replay()
        expected = {**arguments, "x": start}
        for _ in range(3):
            first, second, _ = load("few_rows_linear").few_rows_linear(*expected.values())
            expected["x"] = second
        assert same_bits(out, first) and same_bits(scaled, second)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": (17, 128)}, "x must have 1 to 16 rows, got 17"),
        ({"x": (2, 96), "weight": (64, 96)}, "multiple of 64, got 96"),
    ],
    ids=["too many rows", "odd inner size"],
)
def test_what_it_does_not_take_is_refused(change, message):
    arguments = case(2, 64, 128)
    for name, shape in change.items():
        arguments[name] = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match=message):
        run(arguments)


def test_other_dtypes_and_offsets_are_refused():
    with pytest.raises(RuntimeError, match="x must be bfloat16 or float16"):
        run(case(2, 64, 128, dtype=torch.float32))
    arguments = case(2, 64, 128)
    arguments["x"] = torch.zeros(2 * 128 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(2, 128)
    with pytest.raises(RuntimeError, match="16-byte boundaries"):
        run(arguments)
