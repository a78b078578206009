# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How long do fused_silu_mul_halves and gdn_gates take in a decode step of Qwen3.5-4B, and what does FLA's gate save?

Each figure is the median over replays of a graph of many calls. What an op reads is in the L2 cache, as it is right
behind the GEMM that wrote it. The torch reference runs the same way; "hf_us" is Hugging Face's expression, which
rounds in between. An op is timed only after it agreed with its reference.

FLA's recurrent kernel can compute the gates itself from b and a. "saved_us" is how much shorter one layer's scan is
that way (parked rows then need b and a filled by torch) than with gdn_gates in front of it; it is negative where
gdn_gates is the faster of the two.
"""

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_ops import DTYPES, show, time_calls, write

from deepspeed_hybrid.ops.fused_silu_mul_halves import fused_silu_mul_halves, fused_silu_mul_halves_reference
from deepspeed_hybrid.ops.gdn_gates import gdn_gates, gdn_gates_reference

INTERMEDIATE = 9216
KEY_HEADS, HEADS, HEAD_DIM = 16, 32, 128
CONV_CHANNELS = (2 * KEY_HEADS + HEADS) * HEAD_DIM
PROJECTED = CONV_CHANNELS + HEADS * HEAD_DIM + 2 * HEADS  # qkv | z | b | a, the columns of one fused GEMM
BYTES_IN_CACHE = 16 * 2**20
CALLS = 64
SCANS = 8
CLOSED = -1e4  # a raw gate whose sigmoid and softplus are 0


def ring(make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Tensors for CALLS calls, repeated so that all of them stay in the cache."""
    first = make()
    size = first.untyped_storage().nbytes()
    tensors = [first] + [make() for _ in range(min(CALLS, BYTES_IN_CACHE // size) - 1)]
    return [tensors[call % len(tensors)] for call in range(CALLS)]


def row(op: str, rows: int, dtype: str, us: float, spread: float, reference_us: float, other: dict) -> dict:
    return {
        "op": op,
        "rows": rows,
        "dtype": dtype,
        "us": round(us, 2),
        "spread_pct": round(100 * spread / us, 1),
        "reference_us": round(reference_us, 2),
        **{name: round(value, 2) for name, value in other.items()},
    }


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5 if actual.dtype == torch.float32 else 1.6e-2, atol=1e-5)


def hf_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def measure_silu_mul(rows: int, dtype: str) -> dict:
    calls = ring(lambda: torch.randn(rows, 2 * INTERMEDIATE, device="cuda", dtype=DTYPES[dtype]))
    check(fused_silu_mul_halves(calls[0]), fused_silu_mul_halves_reference(calls[0]))
    us, spread = time_calls(fused_silu_mul_halves, calls)
    return row(
        "fused_silu_mul_halves",
        rows,
        dtype,
        us,
        spread,
        time_calls(fused_silu_mul_halves_reference, calls)[0],
        {"hf_us": time_calls(hf_silu_mul, calls)[0], "gb_s": 3 * calls[0].nbytes / 2 / us / 1e3},
    )


def split_b_a(projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return projected[..., -2 * HEADS : -HEADS], projected[..., -HEADS:]


def measure_gates(rows: int, dtype: str) -> dict:
    calls = ring(lambda: torch.randn(rows, 1, PROJECTED, device="cuda", dtype=DTYPES[dtype]))
    per_head = {
        "A_log": (torch.rand(HEADS, device="cuda") * 16 + 0.01).log(),
        "dt_bias": torch.ones(HEADS, device="cuda", dtype=DTYPES[dtype]),
    }
    parked = torch.arange(rows, device="cuda") % 8 == 7

    def gates(op: Callable) -> Callable:
        return lambda projected: op(*split_b_a(projected), **per_head, parked=parked)

    for actual, expected in zip(gates(gdn_gates)(calls[0]), gates(gdn_gates_reference)(calls[0]), strict=True):
        check(actual, expected)
    us, spread = time_calls(gates(gdn_gates), calls)
    reference_us, _ = time_calls(gates(gdn_gates_reference), calls)
    return row(
        "gdn_gates",
        rows,
        dtype,
        us,
        spread,
        reference_us,
        compare_scans(calls[:SCANS], gates(gdn_gates), per_head, parked),
    )


def compare_scans(calls: list[torch.Tensor], gates: Callable, per_head: dict, parked: torch.Tensor) -> dict:
    """One layer's recurrent scan, gates included: computed by the op, and by FLA's kernel."""
    recurrent = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    rows, dtype = calls[0].shape[0], calls[0].dtype
    query, key = (torch.randn(rows, 1, KEY_HEADS, HEAD_DIM, device="cuda", dtype=dtype) for _ in range(2))
    value = torch.randn(rows, 1, HEADS, HEAD_DIM, device="cuda", dtype=dtype)
    options = {
        "initial_state": torch.randn(rows, HEADS, HEAD_DIM, HEAD_DIM, device="cuda"),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }

    def behind_op(projected: torch.Tensor):
        beta, g = gates(projected)
        return recurrent(query, key, value, g=g, beta=beta, **options)

    def in_kernel(projected: torch.Tensor):
        beta, g = (raw.masked_fill(parked[:, None, None], CLOSED) for raw in split_b_a(projected))
        return recurrent(
            query,
            key,
            value,
            g=g,
            beta=beta,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            **per_head,
            **options,
        )

    for one, other in zip(behind_op(calls[0]), in_kernel(calls[0]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)  # FLA's exponentials are its own
    behind_op_us, in_kernel_us = time_calls(behind_op, calls)[0], time_calls(in_kernel, calls)[0]
    return {"scan_us": behind_op_us, "scan_gate_in_kernel_us": in_kernel_us, "saved_us": behind_op_us - in_kernel_us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")

    torch.manual_seed(0)
    measured = []
    with torch.no_grad():
        for measure in (measure_silu_mul, measure_gates):
            table = [measure(rows, dtype) for dtype in options.dtypes for rows in options.rows]
            show(table)
            measured += table
    if options.out:
        write(
            options.out,
            "glue ops of a decode step: microseconds a call in a graph, inputs in the L2 cache",
            measured,
            options.append,
        )


if __name__ == "__main__":
    main()
