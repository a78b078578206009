# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How long does one decode_step take on logits that come from memory, and how far is that from reading them once?

Each figure is the median over replays of a graph that holds one call for each of several score buffers, together
larger than the L2 cache. The torch reference runs the same way. An op is timed only after it agreed with it. What the
memory gives to a plain copy and to a plain sum is measured in the same run.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from deepspeed_hybrid.ops.decode_step import decode_step, decode_step_reference

VOCABULARY = 248320
COLUMNS = 8
BYTES_TO_COPY = 4 * 2**30
BYTES_TO_ROTATE = 2 * 2**30  # the L2 cache holds 60 MB; and the start of a graph is no part of a call
MOST_REFERENCE_CALLS = 8  # it is some 150 kernels a call, and its temporaries displace the cache by themselves
REPLAYS, WARM_UPS = 20, 3
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# kind -> is it sampled, and how many entries of a row are not at -inf (top-k leaves such rows)
KINDS = {"greedy": (False, VOCABULARY), "sampled": (True, VOCABULARY), "sampled_top40": (True, 40)}


def random_scores(batch: int, dtype: torch.dtype, left: int) -> torch.Tensor:
    scores = (3 * torch.randn(batch, VOCABULARY, device="cuda")).to(dtype)
    if left < VOCABULARY:
        lowest = scores.topk(left, dim=-1).values[:, -1:]
        scores.masked_fill_(scores < lowest, -math.inf)
    return scores


def buffers(batch: int, sampled: bool) -> dict:
    """Every argument of decode_step but the scores; no row ever ends."""
    rows = torch.arange(batch, device="cuda")
    return {
        "raw_logits": None,
        "temperature": torch.full((batch,), 0.7, device="cuda"),
        "seed": torch.full_like(rows, 1234),
        "request": rows.clone(),
        "sample": torch.zeros_like(rows),
        "limit": torch.full_like(rows, 2**40),
        "stop_ids": torch.full((4,), -1, device="cuda"),
        "token": torch.zeros_like(rows),
        "position": torch.full_like(rows, 100),
        "length": torch.zeros_like(rows),
        "parked": torch.zeros(batch, dtype=torch.bool, device="cuda"),
        "finish": torch.zeros(batch, dtype=torch.uint8, device="cuda"),
        "tokens": torch.zeros(batch, COLUMNS, dtype=torch.int64, device="cuda"),
        "logprobs": torch.zeros(batch, COLUMNS, device="cuda"),
        "sampled": sampled,
    }


def check(scores: torch.Tensor, sampled: bool) -> None:
    actual, expected = buffers(scores.shape[0], sampled), buffers(scores.shape[0], sampled)
    decode_step(scores, **actual)
    decode_step_reference(scores, **expected)
    if not torch.equal(actual["token"], expected["token"]):
        raise RuntimeError("the op and its reference chose different tokens; nothing was timed")
    torch.testing.assert_close(actual["logprobs"], expected["logprobs"], rtol=1e-5, atol=1e-5)


def time_calls(step: Callable, calls: list, **arguments) -> tuple[float, float]:
    """Microseconds a call, median and spread (interquartile range) over replays of a graph of all ``calls``.

    Args:
        step: called with each of ``calls`` and the arguments.
    """
    step(calls[0], **arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            step(call, **arguments)

    times = []
    for replay in range(WARM_UPS + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= WARM_UPS:
            times.append(start.elapsed_time(end) * 1000 / len(calls))
    lower, median, upper = statistics.quantiles(times, n=4)
    return median, upper - lower


def memory_rates() -> tuple[float, float]:
    """Bytes a second of an elementwise kernel, read and written, and of a sum, which only reads.

    The driver's own copy is no measure: inside a graph it reaches two thirds of what a kernel does.
    """
    source = torch.ones(BYTES_TO_COPY // 4, device="cuda")
    target = torch.empty_like(source)
    copy_us, _ = time_calls(lambda tensor: torch.neg(tensor, out=target), [source])
    sum_us, _ = time_calls(torch.sum, [source])
    return 2 * BYTES_TO_COPY / (copy_us * 1e-6), BYTES_TO_COPY / (sum_us * 1e-6)


def measure(batch: int, dtype: str, kind: str, copy_rate: float, read_ceiling: float) -> dict:
    sampled, left = KINDS[kind]
    size = batch * VOCABULARY * DTYPES[dtype].itemsize
    scores = [random_scores(batch, DTYPES[dtype], left) for _ in range(max(2, math.ceil(BYTES_TO_ROTATE / size)))]
    check(scores[0], sampled)
    us, spread = time_calls(decode_step, scores, **buffers(batch, sampled))
    reference_us, _ = time_calls(decode_step_reference, scores[:MOST_REFERENCE_CALLS], **buffers(batch, sampled))
    return {
        "op": "decode_step",
        "batch": batch,
        "vocab": VOCABULARY,
        "dtype": dtype,
        "kind": kind,
        "us": round(us, 2),
        "spread_pct": round(100 * spread / us, 1),
        "reference_us": round(reference_us, 1),
        "gb_s": round(size / us / 1e3, 1),
        "share_of_copy_rate": round(size / (us * 1e-6) / copy_rate, 3),
        "share_of_read_ceiling": round(size / (us * 1e-6) / read_ceiling, 3),
    }


def show(rows: list[dict]) -> None:
    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def write(path: Path, what: str, rows: list[dict], append: bool = False) -> None:
    """A report of the house's form; ``append`` adds to what another script wrote there in the same session."""
    report = {
        "what": what,
        "gpu": torch.cuda.get_device_name(),
        "commit": commit(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "command": " ".join(["python", f"experiments/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "rows": rows,
    }
    if append and path.exists():
        before = json.loads(path.read_text())
        report = {
            **report,
            "what": f"{before['what']}; {what}",
            "command": f"{before['command']}; {report['command']}",
            "rows": before["rows"] + rows,
        }
    path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")

    torch.manual_seed(0)
    copy_rate, read_ceiling = memory_rates()
    rates = f"a copy moves {copy_rate / 1e9:.0f} GB/s, a sum reads {read_ceiling / 1e9:.0f} GB/s"
    rows = [
        measure(batch, dtype, kind, copy_rate, read_ceiling)
        for kind in options.kinds
        for dtype in options.dtypes
        for batch in options.batches
    ]
    show(rows)
    print(rates)
    if options.out:
        write(options.out, f"decode_step: microseconds a call in a graph, logits read from memory; {rates}", rows)


if __name__ == "__main__":
    main()
