# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Spans as a file for chrome://tracing and Perfetto: complete events, in microseconds, a row for host and device."""

import json
from collections.abc import Iterable
from pathlib import Path

import deepspeed

from deepspeed_hybrid.generation.trace import Span

HOST, DEVICE = 0, 1  # thread ids
ROWS = {HOST: "host", DEVICE: "device (stream)"}


def write_chrome_trace(path: str | Path, spans: Iterable[Span]) -> None:
    """Write spans to ``path``, whose folder is made if needed. Time 0 is the start of the first span."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": trace_events(spans), "displayTimeUnit": "ms"}))


def trace_events(spans: Iterable[Span]) -> list[dict]:
    """Metadata first, then an event for each span and row, enclosing ones before what they enclose."""
    spans = list(spans)
    rank = deepspeed.comm.get_rank() if deepspeed.comm.is_initialized() else 0
    origin = min((span.start for span in spans), default=0.0)
    events = []
    for span in spans:
        events.append(_complete(span, HOST, span.start - origin, span.end - origin, rank))
        if span.device_start is not None:
            events.append(_complete(span, DEVICE, span.device_start - origin, span.device_end - origin, rank))
    events.sort(key=lambda event: (event["tid"], event["ts"], -event["dur"]))
    process = {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"deepspeed_hybrid, rank {rank}"}}
    rows = [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": ROWS[row]}}
        for row in sorted({event["tid"] for event in events})
    ]
    return [process, *rows, *events]


def _complete(span: Span, row: int, start: float, end: float, rank: int) -> dict:
    """Both ends in whole nanoseconds, so that spans that touch do not overlap by a rounding."""
    ts = round(start * 1e9)
    return {
        "name": span.name,
        "cat": "rollout",
        "ph": "X",
        "pid": rank,
        "tid": row,
        "ts": ts / 1000,
        "dur": (round(end * 1e9) - ts) / 1000,
        "args": span.details,
    }
