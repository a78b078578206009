# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What do the products of a few rows take at the shapes of Qwen3.5-4B, by launches of ours and by the library?

Every figure is the median over replays of a graph with one call for each of several weights, together larger than the
L2 cache. A launch is timed only after it agreed with float64. The last rows are of all products of a decode step, one
behind the other as the model has them, over weights of the model's size.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_ops import show, write

from deepspeed_hybrid.ops import few_rows
from deepspeed_hybrid.ops.fused_linear import normed_linear, normed_rows, residual_linear
from deepspeed_hybrid.ops.fused_silu_mul_halves import fused_silu_mul_halves
from deepspeed_hybrid.ops.triton import residual_norm, row_linear
from deepspeed_hybrid.ops.triton.row_linear import Launch, choose

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
LAYERS = 32
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

    def ours(self, launch: Callable, weight: torch.Tensor) -> torch.Tensor:
        return launch(self.x, weight, self.squares, 1e-6, None, self.residual, self.norm, 1.0, self.glu)[0]

    def library(self, weight: torch.Tensor) -> torch.Tensor:
        if self.glu:
            return fused_silu_mul_halves(F.linear(self.x, weight))
        if self.residual is None:
            return F.linear(self.x, weight)
        return residual_norm.launch(F.linear(self.x, weight), self.residual, self.norm, 1.0, 1e-6)[0]

    def exact(self) -> torch.Tensor:
        product = self.x.double() @ self.weights[0].double().t()
        if self.squares is not None:
            product *= torch.rsqrt(self.squares.double().sum(0) / self.x.shape[1] + 1e-6)[:, None]
        if self.glu:
            gate, up = product.chunk(2, dim=-1)
            product = F.silu(gate) * up
        return product if self.residual is None else product + self.residual.double()

    def us(self, call: Callable) -> float:
        return graph_us(lambda: [call(weight) for weight in self.weights]) / len(self.weights)


def graph_us(calls: Callable) -> float:
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def measure(name: str, m: int) -> list[dict]:
    case = Case(name, m)
    exact = case.exact()
    launches: dict[str, Callable] = {}
    if m in few_rows.ROWS:
        launches["few_rows_linear"] = few_rows.launch
    if m == 1:
        chosen = choose(case.x.shape[1])
        for how in LAUNCHES:
            label = f"row_linear, {how.block_n} columns, {how.warps} warps{'*' if how == chosen else ''}"
            launches[label] = partial(row_linear.launch, how=how)
    rows = []
    for label, launch in launches.items():
        error = float((case.ours(launch, case.weights[0]).double() - exact).norm() / exact.norm())
        if not error < 1e-2:
            raise RuntimeError(f"{name} {label}: relative error {error}")
        rows.append((label, case.us(partial(case.ours, launch))))
    rows.append(("library", case.us(case.library)))
    return [
        {"product": name, "rows": m, "launch": what, "us": round(us, 2), "gb_s": round(case.bytes / us / 1e3)}
        for what, us in rows
    ]


class Step:
    """The weights of all products of a decode step, and these products in their order."""

    def __init__(self):
        def weight(name: str) -> torch.Tensor:
            n, k, _ = PRODUCTS[name]
            return Case.random(n, k) / k**0.5

        inputs = ["attention_in" if layer % 4 == 3 else "gdn_in" for layer in range(LAYERS)]
        self.layers = [(weight(name), weight("out"), weight("gate_up"), weight("down")) for name in inputs]
        self.head, self.norm = weight("head"), Case.random(PRODUCTS["out"][0]) / 10
        self.bytes = 2 * sum(one.numel() for layer in [*self.layers, (self.head,)] for one in layer)

    def run(self, hidden: torch.Tensor, core: torch.Tensor) -> None:
        scaled, squares = normed_rows(hidden, self.norm, 1.0, 1e-6)
        for inputs, out, gate_up, down in self.layers:
            normed_linear(scaled, squares, 1e-6, inputs, None, False)
            hidden, scaled, squares = residual_linear(core, out, None, hidden, self.norm, 1.0, 1e-6)
            gated = normed_linear(scaled, squares, 1e-6, gate_up, None, True)
            hidden, scaled, squares = residual_linear(gated, down, None, hidden, self.norm, 1.0, 1e-6)
        normed_linear(scaled, squares, 1e-6, self.head, None, False)

    def row(self, m: int) -> dict:
        us = graph_us(partial(self.run, Case.random(m, PRODUCTS["out"][0]), Case.random(m, PRODUCTS["out"][1])))
        return {
            "product": "step",
            "rows": m,
            "launch": "ops",
            "us": round(us, 1),
            "gb_s": round(self.bytes / us / 1e3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    options = parser.parse_args()
    torch.manual_seed(0)
    table = [row for m in options.rows for name in options.products for row in measure(name, m)]
    torch.cuda.empty_cache()
    step = Step()
    table += [step.row(m) for m in options.rows]
    show(table)
    if options.out:
        write(options.out, "products of a few rows: microseconds a call in a graph, weights from memory", table)


if __name__ == "__main__":
    main()
