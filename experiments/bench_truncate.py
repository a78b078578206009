# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How long does truncate_scores take on scores that come from memory, next to its torch reference and to a copy?

Figures are taken as in bench_ops.py. An op is timed only after it agreed with the reference, but for entries at a
threshold. "share_of_copy_rate" counts the scores once read and once written.
"""

import argparse
import math
from pathlib import Path

import torch
from bench_ops import BYTES_TO_ROTATE, MOST_REFERENCE_CALLS, VOCABULARY, memory_rates, show, time_calls, write

from deepspeed_hybrid.ops.truncate_scores import truncate_scores, truncate_scores_reference

# kind -> top_k, top_p, min_p
KINDS = {
    "top_k_top_p": (20, 0.95, 0.0),
    "top_p": (0, 0.95, 0.0),
    "min_p": (0, 1.0, 0.05),
    "top_k": (20, 1.0, 0.0),
    "top_k_1000_top_p": (1000, 0.95, 0.0),
    "nothing": (0, 1.0, 0.0),
}
MARGIN = 1e-4  # of what is kept; the reference adds up in fp32


def logits(kind: str, batch: int) -> torch.Tensor:
    """Flat: as of a model with random weights. Peaked: as of a trained one, with some 20 tokens to choose from.
    Rounded: flat and in bf16, with many ties."""
    noise = torch.randn(batch, VOCABULARY, device="cuda")
    if kind == "peaked":
        noise = 2.5 * noise
        noise[:, :50] += torch.linspace(22, 12, 50, device="cuda")
        return noise[:, torch.randperm(VOCABULARY, device="cuda")].contiguous()
    return 3 * noise if kind == "flat" else (3 * noise).bfloat16().float()


def settings(kind: str, batch: int) -> dict:
    top_k, top_p, min_p = KINDS[kind]
    return {
        "top_k": torch.full((batch,), top_k, device="cuda"),
        "top_p_tail": torch.full((batch,), 1 - top_p, device="cuda"),
        "min_p": torch.full((batch,), min_p, device="cuda"),
    }


def check(scores: torch.Tensor, kind: str) -> None:
    """What only one of the two keeps must be next to nothing."""
    arguments = settings(kind, len(scores))
    kept, expected = (call(scores, **arguments).isfinite() for call in (truncate_scores, truncate_scores_reference))
    probabilities = scores.masked_fill(~(kept | expected), -math.inf).double().softmax(-1)
    differing = (probabilities * (kept != expected)).sum(-1)
    if bool((differing > MARGIN).any()):
        raise RuntimeError(f"the op and its reference differ by a mass of {differing.max():.1e}; nothing was timed")


def measure(batch: int, logit_kind: str, kind: str, copy_rate: float) -> dict:
    size = batch * VOCABULARY * 4
    scores = [logits(logit_kind, batch) for _ in range(max(2, math.ceil(BYTES_TO_ROTATE / size)))]
    check(scores[0], kind)
    us, spread = time_calls(truncate_scores, scores, **settings(kind, batch))
    reference_us, _ = time_calls(truncate_scores_reference, scores[:MOST_REFERENCE_CALLS], **settings(kind, batch))
    return {
        "op": "truncate_scores",
        "batch": batch,
        "vocab": VOCABULARY,
        "logits": logit_kind,
        "kind": kind,
        "us": round(us, 2),
        "spread_pct": round(100 * spread / us, 1),
        "reference_us": round(reference_us, 1),
        "share_of_copy_rate": round(2 * size / (us * 1e-6) / copy_rate, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--append", action="store_true", help="to what another script wrote there")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--logits", nargs="+", choices=["flat", "peaked", "rounded"], default=["flat", "peaked"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["top_k_top_p", "top_p", "min_p"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")

    torch.manual_seed(0)
    copy_rate, _ = memory_rates()
    rows = [
        measure(batch, logit_kind, kind, copy_rate)
        for logit_kind in options.logits
        for kind in options.kinds
        for batch in options.batches
    ]
    show(rows)
    rate = f"a copy moves {copy_rate / 1e9:.0f} GB/s"
    print(rate)
    if options.out:
        what = f"truncate_scores: microseconds a call in a graph, scores read from memory; {rate}"
        write(options.out, what, rows, append=options.append)


if __name__ == "__main__":
    main()
