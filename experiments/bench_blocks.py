# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What does a recurrent layer of Qwen3.5-4B take in a step of speculative decoding, by rows and tokens a row?

"scan_us" is gdn_heads and gdn_block, and "commit_us" a layer's share of gdn_commit, which takes over half of a block's
tokens; "kept_us" is gdn_kept_block, and "windows_us" a layer's share of gdn_windows. What gdn_kept_block takes goes by
where in sixteen positions a row is, and so this is the mean over all sixteen of them. Every figure is the median over
replays of a graph of as many layers as pass through memory.
"""

import argparse
import statistics
from pathlib import Path

import torch
from bench_mixers import CHANNELS, DIM, HEADS, KERNEL, KEY_HEADS, bf16, layers_for
from bench_ops import show, time_calls, write

from deepspeed_hybrid.ops.gdn_block import gdn_block, gdn_commit
from deepspeed_hybrid.ops.gdn_heads import gdn_heads
from deepspeed_hybrid.ops.gdn_kept_block import PLACES, TAKEN, gdn_kept_block
from deepspeed_hybrid.ops.gdn_windows import gdn_windows

FIRST = 100 * TAKEN
PROMPT = FIRST - 100  # tokens that are in a state from the beginning
CONV = "window", "conv_weight", "conv_bias", "A_log", "dt_bias", "key_heads", "rounded_heads"


def layer(rows: int, tokens: int) -> dict:
    """The arguments of a layer that gdn_kept_block takes."""
    return {
        "projected": bf16(rows * tokens, CHANNELS + HEADS * DIM + 2 * HEADS),
        "window": bf16(rows, CHANNELS, KERNEL),
        "conv_weight": bf16(CHANNELS, KERNEL),
        "conv_bias": None,
        "A_log": torch.rand(HEADS, device="cuda"),
        "dt_bias": bf16(HEADS),
        "state": torch.randn(rows, HEADS, DIM, DIM, device="cuda"),
        "keys": bf16(rows, KEY_HEADS, PLACES, DIM) / DIM**0.5,
        "deltas": torch.randn(rows, HEADS, PLACES, DIM, device="cuda"),
        "decays": torch.rand(rows, HEADS, PLACES, device="cuda"),
        "norm_weight": bf16(DIM),
        "eps": 1e-6,
        "key_heads": KEY_HEADS,
        "rounded_heads": True,
    }


def row_of(rows: int, tokens: int) -> dict:
    layers = [layer(rows, tokens) for _ in range(layers_for(rows * HEADS * DIM * DIM * 4))]
    counts = torch.full((rows,), tokens, device="cuda")
    taken = torch.full_like(counts, max(1, tokens // 2))
    position, answered = torch.full_like(counts, FIRST), torch.full_like(counts, FIRST - PROMPT + 1)
    where = {"position": position, "counts": counts}

    def heads_of(one: dict) -> tuple[torch.Tensor, torch.Tensor]:
        conv = {name: one[name] for name in CONV}
        return gdn_heads(one["projected"], **conv, **where, key_dim=DIM)

    def scan(one: dict) -> None:
        gdn_block(one["projected"], *heads_of(one), one["state"], one["norm_weight"], 1e-6, counts, KEY_HEADS)

    def kept(one: dict) -> None:
        gdn_kept_block(**one, **where, answered=answered, stepped=taken)

    made = [heads_of(one) for one in layers]
    parts = {name: [one[name] for one in layers] for name in ("projected", "window", "state")}
    heads, gates = map(list, zip(*made, strict=True))

    def commit(_) -> None:
        rest = heads, gates, parts["window"], parts["state"]
        gdn_commit(parts["projected"], *rest, position, taken, KEY_HEADS)

    def windows(_) -> None:
        gdn_windows(parts["projected"], parts["window"], position, taken)

    scan_us, commit_us = time_calls(scan, layers)[0], time_calls(commit, [None])[0] / len(layers)
    windows_us, kept_us = time_calls(windows, [None])[0] / len(layers), []
    across = torch.arange(rows, device="cuda") % TAKEN
    for shift in range(0, TAKEN, 1 if rows < TAKEN else TAKEN):  # enough rows are in all places at once
        position.copy_(FIRST + (across * 5 + shift) % TAKEN)
        kept_us.append(time_calls(kept, layers)[0])
    return {
        "rows": rows,
        "tokens": tokens,
        "scan_us": round(scan_us, 2),
        "commit_us": round(commit_us, 2),
        "kept_us": round(statistics.mean(kept_us), 2),
        "windows_us": round(windows_us, 2),
        "gain_us": round(scan_us + commit_us - statistics.mean(kept_us) - windows_us, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4, 8, 16], choices=range(1, 17))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    torch.manual_seed(0)
    table = [row_of(rows, tokens) for rows in options.rows for tokens in options.tokens]
    show(table)
    if options.out:
        write(options.out, "recurrent layers of a speculative step: microseconds a layer in a graph", table)


if __name__ == "__main__":
    main()
