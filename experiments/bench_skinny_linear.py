# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which launch of the skinny product is fastest for a shape and a number of rows, and where does cuBLAS take over?

Every figure is the median over replays of a graph with one call for each of several weights, together larger than the
L2 cache. A launch is timed only after it agreed with float64. `--compile` fills Triton's cache and times nothing, so
that several processes can do that first.
"""

import argparse
import itertools
import math
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_ops import show, write

from deepspeed_hybrid.ops.fused_silu_mul_halves import fused_silu_mul_halves
from deepspeed_hybrid.ops.triton import rms_norm
from deepspeed_hybrid.ops.triton.skinny_linear import Launch, choose, launch

# Qwen3.5-4B: name -> N, K, norm, residual, glu
PRODUCTS = {
    "gdn_in": (12352, 2560, True, False, False),
    "attention_in": (10240, 2560, True, False, False),
    "out": (2560, 4096, False, True, False),
    "gate_up": (18432, 2560, True, False, True),
    "down": (2560, 9216, False, True, False),
    "head": (248320, 2560, True, False, False),
}
BYTES_TO_ROTATE = 512 * 2**20
REPLAYS = 7


def candidates(m: int, n: int, glu: bool) -> list[Launch]:
    if m == 1:
        return [Launch(block_n, warps) for block_n in (1, 2, 4, 8, 16) for warps in (4, 8)]
    splits = (1, 2, 4) if n < 4096 else (1,)
    depths = (128, 256) if m <= 16 else (64, 128)
    memory, halves = 200 * 1024, 2 if glu else 1
    return [
        Launch(block_n, 4, block_k, split, stages)
        for block_n, block_k, split, stages in itertools.product((32, 64, 128), depths, splits, (3, 4))
        if 2 * block_k * stages * (block_n * halves + max(16, m)) <= memory and block_n * halves <= 128
    ]


class Case:
    """One product of the model with m rows, over as many weights as the cache cannot hold."""

    def __init__(self, name: str, m: int):
        self.n, k, norm, residual, self.glu = PRODUCTS[name]
        size = self.n * k * 2
        self.bytes = size
        self.weights = [
            torch.randn(self.n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
            for _ in range(max(2, math.ceil(BYTES_TO_ROTATE / size)))
        ]
        columns = self.n // (2 if self.glu else 1)
        self.x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        self.squares = torch.rand(640 if m == 1 else 40, m, device="cuda") if norm else None
        self.residual = torch.randn(m, columns, device="cuda", dtype=torch.bfloat16) if residual else None
        self.norm = 0.1 * torch.randn(columns, device="cuda", dtype=torch.bfloat16) if residual else None

    def ours(self, weight: torch.Tensor, how: Launch | None) -> torch.Tensor:
        return launch(self.x, weight, self.squares, 1e-6, None, self.residual, self.norm, 1.0, self.glu, how)[0]

    def library(self, weight: torch.Tensor) -> torch.Tensor:
        if self.glu:
            return fused_silu_mul_halves(F.linear(self.x, weight))
        if self.residual is None:
            return F.linear(self.x, weight)
        return rms_norm.launch(torch.addmm(self.residual, self.x, weight.t()), self.norm, 1.0, 1e-6)

    def exact(self) -> torch.Tensor:
        product = self.x.double() @ self.weights[0].double().t()
        if self.squares is not None:
            product *= torch.rsqrt(self.squares.double().sum(0) / self.x.shape[1] + 1e-6)[:, None]
        if self.glu:
            gate, up = product.chunk(2, dim=-1)
            product = F.silu(gate) * up
        return product if self.residual is None else product + self.residual.double()

    def us(self, call) -> float:
        for weight in self.weights[:2]:
            call(weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in self.weights:
                call(weight)
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / len(self.weights))
        return statistics.median(times)


def measure(name: str, m: int, compile_only: bool, slice_: tuple[int, int]) -> list[dict]:
    case = Case(name, m)
    hows = candidates(m, case.n, case.glu)
    if compile_only:
        for how in hows[slice_[0] :: slice_[1]]:
            case.ours(case.weights[0], how)
        torch.cuda.synchronize()
        return []
    exact, rows = case.exact(), []
    for how in [None, *hows]:
        actual = case.ours(case.weights[0], how).double()
        error = float((actual - exact).norm() / exact.norm())
        if not error < 1e-2:
            raise RuntimeError(f"{name} {m} {how}: relative error {error}")
        rows.append((case.us(lambda weight, how=how: case.ours(weight, how)), how, error))
    chosen = rows[0]
    best = min(rows, key=lambda row: row[0])
    library = case.us(case.library)

    def row(us: float, what: str, how: Launch | None, error: float) -> dict:
        launch = "-" if how is None else " ".join(map(str, how))
        rate = round(case.bytes / us / 1e3)
        return dict(product=name, m=m, what=what, us=round(us, 2), gb_s=rate, launch=launch, error=f"{error:.1e}")

    ranked = sorted(rows[1:], key=lambda row: row[0])[1:4]
    return [
        row(chosen[0], "chosen", choose(m, case.exact().shape[1], case.x.shape[1], case.glu), chosen[2]),
        row(best[0], "best", best[1], best[2]),
        *(row(us, "next", how, error) for us, how, error in ranked),
        row(library, "library", None, 0.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--compile", type=int, nargs=2, metavar=("PART", "OF"), help="only compile a part")
    options = parser.parse_args()
    torch.manual_seed(0)
    table = []
    for name, m in itertools.product(options.products, options.rows):
        rows = measure(name, m, options.compile is not None, tuple(options.compile or (0, 1)))
        table += rows
        if rows:
            show(rows)
    if options.out and table:
        write(options.out, "products of a few rows: microseconds a call in a graph, weights from memory", table)


if __name__ == "__main__":
    main()
