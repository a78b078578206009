# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""When the stages of calls began and ended: by the host's clock, and on a GPU by events that no stage waits for."""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

KEPT = 65536  # spans; the oldest are forgotten first
NOTHING: AbstractContextManager = nullcontext()


@dataclass(frozen=True)
class Span:
    """One stage; times are seconds of ``time.perf_counter()``.

    Where the host runs ahead of the device, it queued the stage from ``start`` to ``end``, and the device was at it
    from ``device_start`` to ``device_end``. These are None on a CPU, and of what has no part on the device.
    """

    name: str
    start: float
    end: float
    device_start: float | None = None
    device_end: float | None = None
    details: dict = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """On the device, where it has a part there."""
        return self.end - self.start if self.device_start is None else self.device_end - self.device_start


@dataclass(frozen=True)
class Mark:
    """A moment: the host's time, and on a GPU an event in the stream of that time."""

    host: float
    event: Any = None


class Tracer:
    """Spans of stages, and how long the stages of each name took together.

    Each span is also an NVTX range where the accelerator has them. A device's times lie on the host's clock by taking
    the first event of a call for simultaneous on both: where work of others was queued before it, they lie early by
    as much, alike.

    Args:
        on: False: nothing is recorded, and ``span()`` and ``ranged()`` cost a call each.
        device: where the stages run.
    """

    def __init__(self, on: bool, device: torch.device):
        self.on = on
        self.totals: defaultdict[str, float] = defaultdict(float)  # name -> seconds, of settled spans
        self.spans: deque[Span] = deque(maxlen=KEPT)
        self._has_events = device.type == "cuda"
        self._pending: deque[tuple[_Stage, Mark]] = deque()  # ended for the host, in the order of their ends
        self._depth = 0
        self._anchor: Mark | None = None

    def span(self, name: str, **details) -> AbstractContextManager:
        """A context that is one stage. One that raises is not recorded."""
        return _Stage(self, name, details) if self.on else NOTHING

    def ranged(self, name: str, step: Callable[[], None]) -> Callable[[], None]:
        """``step`` in an NVTX range of its own; ``step`` itself where tracing is off."""
        if not self.on:
            return step
        accelerator = get_accelerator()

        def run() -> None:
            accelerator.range_push(name)
            try:
                step()
            finally:
                accelerator.range_pop()

        return run

    def note(self, name: str, start: float, end: float, **details) -> None:
        """Record a stage of the host alone, from times of ``time.perf_counter()``."""
        if self.on:
            self._record(Span(name, start, end, details=details))

    def settle(self) -> None:
        """Wait for the device to end what was recorded, so that ``totals`` and ``spans`` have it."""
        while self._pending:
            self._pending[0][1].event.synchronize()
            self._settle_first()

    def _begin(self) -> tuple[Mark, Mark]:
        """The moment, and the one that the device's times are counted from: a recent one, whose distance in ms a
        float holds to less than a microsecond."""
        mark = self._mark()
        if self._depth == 0 and not self._pending:
            self._anchor = mark
        self._depth += 1
        return mark, self._anchor

    def _end(self, stage: "_Stage", failed: bool) -> None:
        self._depth -= 1
        if failed:
            return
        mark = self._mark()
        if not self._has_events:
            self._record(Span(stage.name, stage.begin.host, mark.host, details=stage.details))
            return
        self._pending.append((stage, mark))
        while self._pending and self._pending[0][1].event.query():  # frees events of long calls
            self._settle_first()

    def _settle_first(self) -> None:
        stage, end = self._pending.popleft()
        since = stage.anchor.event.elapsed_time
        start, stop = (stage.anchor.host + since(mark.event) / 1000 for mark in (stage.begin, end))
        self._record(Span(stage.name, stage.begin.host, end.host, start, stop, stage.details))

    def _record(self, span: Span) -> None:
        self.totals[span.name] += span.seconds
        self.spans.append(span)

    def _mark(self) -> Mark:
        if not self._has_events:
            return Mark(time.perf_counter())
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return Mark(time.perf_counter(), event)


class _Stage:
    def __init__(self, tracer: Tracer, name: str, details: dict):
        self.tracer, self.name, self.details = tracer, name, details

    def __enter__(self) -> None:
        self.begin, self.anchor = self.tracer._begin()
        get_accelerator().range_push(self.name)

    def __exit__(self, kind, *rest) -> None:
        try:
            self.tracer._end(self, failed=kind is not None)
        finally:
            get_accelerator().range_pop()


OFF = Tracer(False, torch.device("cpu"))
