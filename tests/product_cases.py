# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Products with what lies around them on a GPU, by the CUDA ops for few rows, next to float64."""

import torch
import torch.nn.functional as F
from decode_cases import same_bits
from glue_cases import poisoned_outputs
from tolerances import assert_close

from deepspeed_hybrid.ops.loader import load

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


def run(op: str, arguments: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with poisoned_outputs():
        return getattr(load(op), op)(*arguments.values())


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


def check(op: str, arguments: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, scaled, squares = run(op, arguments)
    assert_close(out, exact(arguments))
    if arguments["residual"] is not None:
        hidden = out.double()
        assert_close(scaled, hidden * (arguments["next_norm"].double() + 1.0))
        torch.testing.assert_close(squares.double().sum(0), hidden.square().sum(1), rtol=1e-5, atol=1e-6)
    else:
        assert scaled.numel() == 0 and squares.numel() == 0
    return out, scaled, squares


def fewer_rows(arguments: dict, rows: int) -> dict:
    """The first rows alone."""
    fewer = dict(arguments)
    for name, dim in (("x", 0), ("squares", 1), ("residual", 0)):
        if fewer[name] is not None:
            fewer[name] = fewer[name].narrow(dim, 0, rows).contiguous()
    return fewer


def check_bits_of_fewer_rows(op: str, arguments: dict, numbers: tuple[int, ...]) -> None:
    """A row's results are the same beside any others."""
    together = run(op, arguments)
    for m in numbers:
        for one, other, rows in zip(run(op, fewer_rows(arguments, m)), together, (0, 0, 1), strict=True):
            assert same_bits(one, other.narrow(rows, 0, m) if other.numel() else other.new_empty(one.shape))


def check_inside_a_graph(op: str, rows: int) -> None:
    """A launch may overlap the one before it: x must be what that one wrote."""
    arguments = case(rows, 2560, 2560, **AROUND["residual"])
    source = torch.empty_like(arguments["x"])
    launch = getattr(load(op), op)
    run(op, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arguments["x"].copy_(source)
        for _ in range(3):  # one of ours behind another of ours
            out, scaled, _ = launch(*arguments.values())
            arguments["x"] = scaled
    for seed in range(3):
        start = case(rows, 2560, 2560, seed=seed)["x"]
        source.copy_(start)
        graph.replay()
        expected = {**arguments, "x": start}
        for _ in range(3):
            first, second, _ = launch(*expected.values())
            torch.cuda.synchronize()
            expected["x"] = second
        assert same_bits(out, first) and same_bits(scaled, second)
