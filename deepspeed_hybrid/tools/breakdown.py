# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where a decode step spends its time: kernels by kind, from the profiler's device events."""

from collections.abc import Callable
from dataclasses import dataclass

from deepspeed.accelerator import get_accelerator
from torch.profiler import ProfilerActivity, profile

FEW, MANY = 4, 12  # tokens of the two profiled calls; their difference has no prefill in it

# kind -> any of these in a kernel's name, in the order they are asked
KINDS = {
    "collective": ("nccl", "_add_over_ranks"),  # with the wait for other ranks
    "choice": ("scan_chunk", "finish_row", "_scan", "_nominate", "_record"),
    "truncation": ("truncate_rows",),
    "gdn scan": (
        "fused_recurrent",
        "gated_delta",
        "gdn_decode",
        "gdn_streamed",
        "gdn_deferred",
        "gdn_block",
        "gdn_heads",
        "gdn_windows",
        "gdn_prepare",
        "gdn_carry",
    ),
    "gdn gates": ("::gates(",),
    "conv": ("conv",),
    "attention": ("_attend", "_combine", "attention", "fmha", "flash", "attn", "softmax"),
    "silu * up": ("silu_mul",),
    "product": (
        "few_rows_linear",
        "warpgroup_linear",
        "row_linear_kernel",
        "gemm",
        "gemv",
        "nvjet",
        "cutlass",
        "splitk",
    ),
    "norm": ("_normalise",),
    "rotary": ("_tables",),
    "copy": ("copy", "memcpy", "memset", "fillfunctor", "catarray"),
    "index": ("index", "gather", "scatter", "embedding"),
    "reduce": ("reduce",),
    "elementwise": ("elementwise",),
}


@dataclass(frozen=True)
class KernelShare:
    """Kernels of one kind in one decode step."""

    kind: str
    count: float
    us: float


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name; 'other' where no name is known."""
    lowered = kernel.lower()
    return next((kind for kind, names in KINDS.items() if any(name in lowered for name in names)), "other")


def step_breakdown(generate: Callable[[int], object]) -> list[KernelShare]:
    """Kernels and device microseconds of one decode step, the longest kind first.

    Args:
        generate: answers a fixed request with as many tokens as it is told, warm already.
    """
    few, many = _device_time(generate, FEW), _device_time(generate, MANY)
    shares: dict[str, tuple[float, float]] = {}
    for name, (count, us) in many.items():
        before_count, before_us = few.get(name, (0, 0.0))
        kind = kind_of(name)
        total_count, total_us = shares.get(kind, (0.0, 0.0))
        shares[kind] = (total_count + count - before_count, total_us + us - before_us)
    steps = MANY - FEW
    rows = [KernelShare(kind, count / steps, us / steps) for kind, (count, us) in shares.items() if count]
    return sorted(rows, key=lambda row: -row.us)


def as_rows(shares: list[KernelShare]) -> list[dict]:
    """For a file."""
    return [{"kind": share.kind, "count": round(share.count, 1), "us": round(share.us, 1)} for share in shares]


def _device_time(generate: Callable[[int], object], tokens: int) -> dict[str, tuple[int, float]]:
    """Kernel name -> how often it ran, and for how long in microseconds."""
    generate(tokens)
    get_accelerator().synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate(tokens)
        get_accelerator().synchronize()
    return {event.key: (event.count, event.self_device_time_total) for event in profiler.key_averages()}
