# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What do the products of a few rows take at the shapes of Qwen3.5-4B, by launches of ours and by the library?

Every figure is the median over replays of a graph with one call for each of several weights, together larger than the
L2 cache. A launch is timed only after it agreed with float64.
"""

import argparse
import math
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_ops import show, write

from deepspeed_hybrid.ops.fused_silu_mul_halves import fused_silu_mul_halves
from deepspeed_hybrid.ops.triton import rms_norm
from deepspeed_hybrid.ops.triton.row_linear import Launch, choose, launch

# name -> N, K, and what is around the product
PRODUCTS = {
    "gdn_in": (12352, 2560, "norm"),
    "attention_in": (10240, 2560, "norm"),
    "out": (2560, 4096, "residual"),
    "gate_up": (18432, 2560, "glu"),
    "down": (2560, 9216, "residual"),
    "head": (248320, 2560, "norm"),
}
LAUNCHES = [Launch(block_n, warps) for block_n in (1, 2, 4, 8) for warps in (4, 8)]
BYTES_TO_ROTATE = 512 * 2**20
REPLAYS = 7


class Case:
    """One product of the model, over as many weights as the cache cannot hold."""

    def __init__(self, name: str, m: int):
        n, k, around = PRODUCTS[name]
        self.glu = around == "glu"
        self.bytes = 2 * n * k
        count = max(2, math.ceil(BYTES_TO_ROTATE / self.bytes))
        self.weights = [self.random(n, k) / k**0.5 for _ in range(count)]
        self.x = self.random(m, k)
        self.squares = None if around == "residual" else torch.rand(640 if m == 1 else 64, m, device="cuda")
        self.residual = self.random(m, n) if around == "residual" else None
        self.norm = self.random(n) / 10 if around == "residual" else None

    @staticmethod
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def ours(self, weight: torch.Tensor, how: Launch) -> torch.Tensor:
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


def measure(name: str, m: int) -> list[dict]:
    case = Case(name, m)
    exact = case.exact()
    rows = []
    for how in LAUNCHES if m == 1 else []:
        error = float((case.ours(case.weights[0], how).double() - exact).norm() / exact.norm())
        if not error < 1e-2:
            raise RuntimeError(f"{name} {how}: relative error {error}")
        chosen = "*" if how == choose(case.x.shape[1]) else ""
        us = case.us(lambda weight, how=how: case.ours(weight, how))
        rows.append((f"{how.block_n} columns, {how.warps} warps{chosen}", us))
    rows.append(("library", case.us(case.library)))
    return [
        {"product": name, "rows": m, "launch": what, "us": round(us, 2), "gb_s": round(case.bytes / us / 1e3)}
        for what, us in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    options = parser.parse_args()
    torch.manual_seed(0)
    table = [row for m in options.rows for name in options.products for row in measure(name, m)]
    show(table)
    if options.out:
        write(options.out, "products of a few rows: microseconds a call in a graph, weights from memory", table)


if __name__ == "__main__":
    main()
