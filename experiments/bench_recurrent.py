# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What does a recurrent layer of Qwen3.5-4B take in a decode step, by kernel and number of rows?

"gdn_decode" writes every state in its one launch; "triton" and "gdn_streamed" write them at every 15th token. For
these "us" is the mean over a block of tokens, of one token beside each state to the one that is written with, and
"us_written" that of the last. Every figure is the median over replays of a graph of as many layers as pass through
memory. "gb_s" counts states read and written.
"""

import argparse
from pathlib import Path

import torch
from bench_mixers import CHANNELS, DIM, HEADS, KERNEL, KEY_HEADS, bf16, layers_for
from bench_ops import show, time_calls, write

from deepspeed_hybrid.ops import gdn_streamed
from deepspeed_hybrid.ops.gdn_decode import gdn_decode
from deepspeed_hybrid.ops.gdn_deferred import BLOCK, PLACES, gdn_deferred

FIRST = 10 * BLOCK  # a position with which a state is written
SAMPLED = (1, BLOCK // 2, BLOCK - 1)  # tokens beside a state, between which times lie on a line


def layer(rows: int) -> tuple[dict, dict]:
    """The arguments of a layer, and what is kept beside its states."""
    made = {
        "projected": bf16(rows, CHANNELS + HEADS * DIM + 2 * HEADS),
        "window": bf16(rows, CHANNELS, KERNEL),
        "conv_weight": bf16(CHANNELS, KERNEL),
        "conv_bias": None,
        "A_log": torch.rand(HEADS, device="cuda"),
        "dt_bias": bf16(HEADS),
        "state": torch.randn(rows, HEADS, DIM, DIM, device="cuda"),
        "norm_weight": bf16(DIM),
        "eps": 1e-6,
        "key_heads": KEY_HEADS,
        "rounded_heads": True,
    }
    kept = {
        "keys": bf16(rows, KEY_HEADS, PLACES, DIM) / DIM**0.5,
        "deltas": torch.randn(rows, HEADS, PLACES, DIM, device="cuda"),
        "decays": torch.rand(rows, HEADS, PLACES, device="cuda"),
    }
    return made, kept


def rows_of(rows: int) -> list[dict]:
    size = rows * HEADS * DIM * DIM * 4
    layers = [layer(rows) for _ in range(layers_for(size))]
    position = torch.full((rows,), FIRST, device="cuda")
    parked = torch.zeros(rows, dtype=torch.bool, device="cuda")
    counts, answered = torch.ones_like(position), torch.full_like(position, FIRST)

    def decode(one) -> None:
        gdn_decode(**one[0], position=position, parked=parked)

    def deferred(one) -> None:
        gdn_deferred(**one[0], **one[1], position=position, answered=answered, counts=counts)

    us, _ = time_calls(decode, layers)
    table = [{"rows": rows, "kernel": "gdn_decode", "us": round(us, 2), "us_written": "-", "gb_s": rate(2 * size, us)}]
    takes = gdn_streamed.takes
    kernels = {"triton": lambda *arguments: False}
    if gdn_streamed.obstacle(0) is None:
        kernels["gdn_streamed"] = takes
    for name, choice in kernels.items():
        gdn_streamed.takes = choice
        times = []
        for beside in (*SAMPLED, BLOCK):
            position.fill_(FIRST + beside)
            times.append(time_calls(deferred, layers)[0])
        us = (sum(times[:-1]) / len(SAMPLED) * (BLOCK - 1) + times[-1]) / BLOCK
        moved = size * (1 + 1 / BLOCK)
        written = round(times[-1], 2)
        table.append(
            {"rows": rows, "kernel": name, "us": round(us, 2), "us_written": written, "gb_s": rate(moved, us)}
        )
    gdn_streamed.takes = takes
    return table


def rate(size: float, us: float) -> int:
    return round(size / us / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    torch.manual_seed(0)
    table = [row for rows in options.rows for row in rows_of(rows)]
    show(table)
    if options.out:
        write(options.out, "recurrent layers of a decode step: microseconds a layer in a graph", table)


if __name__ == "__main__":
    main()
