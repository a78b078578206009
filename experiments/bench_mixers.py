# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How long do gdn_decode and attention_decode take in a decode step of Qwen3.5-4B, and by which launches?

Every figure is the median over replays of a graph with one call for each of several layers' states or caches, together
larger than the L2 cache. "gb_s" counts the state read and written, or the valid keys and values read.
"""

import argparse
import math
from pathlib import Path

import torch
from bench_ops import show, time_calls, write

from deepspeed_hybrid.ops import attention_streamed
from deepspeed_hybrid.ops.triton import attention_decode, gdn_decode

KEY_HEADS, HEADS, DIM, KERNEL = 16, 32, 128, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
QUERY_HEADS, KV_HEADS, HEAD_DIM, ROTARY = 16, 4, 256, 64
BYTES_TO_ROTATE = 512 * 2**20
ATTENTION = [  # rows, length, capacity
    (1, 384, 640),
    (1, 384, 32768),
    (1, 16384, 16384),
    (1, 32768, 32768),
    (8, 384, 640),
    (16, 16384, 16384),
    (32, 384, 640),
    (64, 384, 640),
    (256, 384, 640),
]
GDN_OPTIONS = {
    "8 warps, 128 registers": {"num_warps": 8, "maxnreg": 128},
    "4 warps": {"num_warps": 4},
    "8 warps": {"num_warps": 8},
    "16 warps, 64 registers": {"num_warps": 16, "maxnreg": 64},
}


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def layers_for(size: int) -> int:
    return min(64, max(2, math.ceil(BYTES_TO_ROTATE / size)))


def gdn_row(batch: int, name: str) -> dict:
    size = batch * HEADS * DIM * DIM * 4
    count = layers_for(size)
    layers = [
        (torch.randn(batch, HEADS, DIM, DIM, device="cuda"), bf16(batch, CHANNELS, KERNEL), bf16(CHANNELS, KERNEL))
        for _ in range(count)
    ]
    projected = bf16(batch, CHANNELS + HEADS * DIM + 2 * HEADS)
    per_head = torch.rand(HEADS, device="cuda"), bf16(HEADS)
    position = torch.full((batch,), 100, device="cuda")
    parked = torch.zeros(batch, dtype=torch.bool, device="cuda")
    norm = bf16(DIM)

    def call(layer) -> None:
        state, window, conv = layer
        gdn_decode.launch(
            projected,
            window,
            conv,
            None,
            *per_head,
            state,
            norm,
            1e-6,
            position,
            parked,
            KEY_HEADS,
            GDN_OPTIONS[name],
        )

    us, _ = time_calls(call, layers)
    return {"op": "gdn_decode", "batch": batch, "length": "-", "launch": name, **rates(us, 2 * size)}


def attention_row(batch: int, length: int, capacity: int, splits: int, block: int | None) -> dict:
    """By Triton's kernels, or without a ``block`` by the op attention_streamed."""
    size = 2 * batch * KV_HEADS * capacity * HEAD_DIM * 2
    caches = [
        (bf16(batch, KV_HEADS, capacity, HEAD_DIM), bf16(batch, KV_HEADS, capacity, HEAD_DIM))
        for _ in range(max(2, min(layers_for(size), 16)))
    ]
    projected = bf16(batch, (2 * QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM)
    cos, sin = bf16(batch, ROTARY), bf16(batch, ROTARY)
    position = torch.full((batch,), length - 1, device="cuda")
    parked = torch.zeros(batch, dtype=torch.bool, device="cuda")
    norm = bf16(HEAD_DIM)

    settings = position, parked, norm, norm, 1.0, 1e-6, QUERY_HEADS, True, HEAD_DIM**-0.5, splits

    def call(cache) -> None:
        if block is None:
            attention_streamed.launch(projected, cos, sin, *cache, *settings)
        else:
            attention_decode.launch(projected, cos, sin, *cache, *settings, block=block)

    us, _ = time_calls(call, caches)
    blocks = "streamed" if block is None else f"{block or 'chosen'} positions"
    what = f"{splits or 'chosen'} splits, {blocks}, capacity {capacity}"
    read = size * length // capacity
    return {"op": "attention_decode", "batch": batch, "length": length, "launch": what, **rates(us, read)}


def rates(us: float, size: int) -> dict:
    return {"us": round(us, 2), "gb_s": round(size / us / 1e3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    torch.manual_seed(0)
    table = [gdn_row(batch, name) for batch in (1, 8, 64, 256) for name in GDN_OPTIONS]
    for batch, length, capacity in ATTENTION:
        table += [attention_row(batch, length, capacity, 0, block) for block in (None, 32, 64)]
    show(table)
    if options.out:
        write(options.out, "mixers of a decode step: microseconds a call in a graph, states from memory", table)


if __name__ == "__main__":
    main()
