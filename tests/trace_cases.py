# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Trace files as tests see them."""

import json
from pathlib import Path


def read(path: Path) -> list[dict]:
    """The complete events of a trace file."""
    loaded = json.loads(path.read_text())
    assert loaded["displayTimeUnit"] == "ms"
    return [event for event in loaded["traceEvents"] if event["ph"] == "X"]


def assert_well_nested(events: list[dict]) -> None:
    """In each row an event lies inside those that are open when it begins; times are whole nanoseconds."""
    for row in {event["tid"] for event in events}:
        open_until: list[int] = []
        for event in (event for event in events if event["tid"] == row):
            start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            assert start >= 0 and length >= 0
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or start + length <= open_until[-1], event
            open_until.append(start + length)


def named(events: list[dict], name: str) -> list[dict]:
    return [event for event in events if event["name"] == name]
