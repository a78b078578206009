# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How many tokens the next block has: as many as always, or as many as pay."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch

PERIOD = 8  # steps of one length between two looks: a look waits for the device
PATIENCE = 3  # periods in which something else ran, before the time of one is taken all the same
PROBE_PERIODS = 16  # periods of one length before the runner-up is tried again, since acceptance and times change
THOROUGH = 4  # probes to one of the length that was not tried for longest: its time may have been an accident
KEEP = 0.7  # of the time that was known, in a running mean
MEMORY = 2048  # drafts at a place that are remembered
PRIOR = 4  # drafts for which it counts that a place is about as good as the one before it
GAIN = 1.02  # another length must promise this much more
CLOSE, SURE = (
    0.9,
    3,
)  # lengths that promise so much of the best one's are measured in so many periods before one is chosen


class Controller(Protocol):
    """Decides on the host, before a step."""

    lengths: tuple[int, ...]  # that blocks may have
    most_tokens: int  # of any block

    def begin(self) -> None:
        """A call begins: what came before it was no step."""

    def tokens(self, lanes: int) -> int:
        """Of the next block over so many lanes, the anchor among them; 1 is a plain step."""

    def disturb(self) -> None:
        """Something other than steps takes time: a prompt, or what a caller does between rows."""

    def record(self, lanes: int, tokens: int, reached: torch.Tensor) -> None:
        """What has come out of steps of ``tokens`` since the call began, the last of them this moment: ``reached``
        [tokens] int64 rows that got more than i tokens."""

    def describe(self) -> str:
        """In a few words."""


class FixedBlock:
    """Always the same length.

    Args:
        block: tokens of a block.
    """

    def __init__(self, block: int):
        self.block = self.most_tokens = block
        self.lengths: tuple[int, ...] = (block,)

    def begin(self) -> None:
        """It has nothing to measure."""

    def disturb(self) -> None:
        """Nor to spoil."""

    def tokens(self, lanes: int) -> int:
        return self.block

    def record(self, lanes: int, tokens: int, reached: torch.Tensor) -> None:
        """Nor to learn."""

    def describe(self) -> str:
        return f"blocks of {self.block} tokens"


class PayingBlock:
    """The length with the most tokens a second, by measured times of steps and measured acceptance.

    Steps come in periods of one length. At the end of each its time a step, for that many lanes, is taken into a
    running mean, and what was right at each place, given those before it, into counts of the last drafts: a period of
    one lane has eight at the first place and hardly any at the last, which say little by themselves. Each length is
    tried once, those that then are close to the best one a few times more, and later the best of the others now and
    then, rarely any; where plain steps are best, that is speculation switched off. The first step of a length,
    which compiles kernels and is captured, and of each period behind one of another length, and periods with something
    else in them do not count. The host looks at the device's counts, and so waits for it, at the end of a period, and
    behind the first step of one that did not follow its like at once: what was queued before it is not the steps'.

    Times differ from run to run, so lengths do, and with them the last bits of logprobs; tokens do not.

    Args:
        lengths: to choose from; 1 is a plain step.
        clock: seconds.
    """

    def __init__(self, lengths: tuple[int, ...], clock: Callable[[], float] = time.perf_counter):
        self.lengths, self.clock = tuple(sorted(lengths)), clock
        self.most_tokens = self.lengths[-1]
        self.seconds: dict[tuple[int, int], float] = {}  # (lanes, length) -> of a step
        self.drafts = [0.0] * max(lengths)  # seen at place i of a block, where those before it were right
        self.right = [0.0] * max(lengths)  # of these
        self._periods: Counter[tuple[int, int]] = Counter()  # of (lanes, length), whose time was taken
        self._length: dict[int, int] = {}  # lanes -> settled on
        self._settled: dict[int, int] = {}  # lanes -> periods since the last probe
        self._tried: dict[tuple[int, int], None] = {}  # of (lanes, length), the latest last
        self._probes: Counter[int] = Counter()  # of lanes
        self._spoiled = 0  # periods in a row whose time was not taken
        self._current: tuple[int, int] | None = None  # lanes and length of this period
        self._before: tuple[int, int] | None = None  # and of the last one
        self.begin()

    def begin(self) -> None:
        # By length, what had come out of its steps when they were last looked at.
        self._known: dict[int, list[int]] = {}
        self._end_period(idle=False)

    def _end_period(self, idle: bool) -> None:
        self._before, self._current = self._current or self._before, None
        self._steps = self._unmeasured = 0
        self._disturbed = False
        self._idle = idle  # the device has nothing left to do

    def disturb(self) -> None:
        self._disturbed, self._idle = self._current is not None, False

    def tokens(self, lanes: int) -> int:
        if self._current is None or self._current[0] != lanes:
            self._end_period(self._idle and self._current is None)
            self._current = (lanes, self._next(lanes))
            self._start = self.clock()
        return self._current[1]

    def record(self, lanes: int, tokens: int, reached: torch.Tensor) -> None:
        self._steps += 1
        if self._steps == 1 and not (self._idle and self._before == (lanes, tokens)):
            reached.tolist()  # waits for the device
            self._start, self._unmeasured, self._disturbed = self.clock(), 1, False
        if self._steps == PERIOD:
            now = reached.tolist()
            before = self._known.get(tokens, [0] * tokens)
            self._known[tokens] = now
            self._learn(lanes, tokens, [count - earlier for count, earlier in zip(now, before, strict=True)])
            self._end_period(idle=True)

    def _learn(self, lanes: int, tokens: int, reached: list[int]) -> None:
        """Of a period, at a moment when the host has waited for the device, so that the clock has what the steps took.

        Times err upwards alone: a shorter one is believed at once.
        """
        spent = (self.clock() - self._start) / (PERIOD - self._unmeasured)
        known = self.seconds.get((lanes, tokens))
        self._spoiled = self._spoiled + 1 if self._disturbed else 0
        if not self._disturbed or self._spoiled > PATIENCE:
            self._spoiled = 0
            self.seconds[lanes, tokens] = spent if known is None else min(spent, KEEP * known + (1 - KEEP) * spent)
            self._tried.pop((lanes, tokens), None)
            self._tried[lanes, tokens] = None  # last now
            self._periods[lanes, tokens] += 1
        for place in range(1, tokens):
            kept = max(0.0, 1 - reached[place - 1] / MEMORY)
            self.drafts[place] = kept * self.drafts[place] + reached[place - 1]
            self.right[place] = kept * self.right[place] + reached[place]

    def expected(self, tokens: int) -> float:
        """Tokens of a row out of a block: an unknown place is as good as the one before it."""
        total, chance, rate = 1.0, 1.0, 0.0
        for place in range(1, tokens):
            prior = PRIOR if place > 1 else 0
            drafts = self.drafts[place] + prior
            rate = (self.right[place] + prior * rate) / drafts if drafts else 0.0
            chance *= rate
            total += chance
        return total

    def speed(self, lanes: int, tokens: int) -> float:
        """Tokens a second of a row."""
        return self.expected(tokens) / self.seconds[lanes, tokens]

    def settled(self, lanes: int) -> int | None:
        """The length that pays most as far as is known; None before all were tried, and close ones often enough."""
        return self._length.get(lanes)

    def _next(self, lanes: int) -> int:
        untried = [length for length in self.lengths if (lanes, length) not in self.seconds]
        if untried:
            return untried[0]
        ranked = sorted(self.lengths, key=lambda length: self.speed(lanes, length), reverse=True)
        if lanes not in self._length:
            close = [length for length in ranked if self.speed(lanes, length) > CLOSE * self.speed(lanes, ranked[0])]
            least = min(close, key=lambda length: self._periods[lanes, length])
            if len(close) > 1 and self._periods[lanes, least] < SURE:
                return least
        now = self._length.get(lanes, ranked[0])
        if self.speed(lanes, ranked[0]) > GAIN * self.speed(lanes, now):
            now = ranked[0]
        self._length[lanes] = now
        self._settled[lanes] = self._settled.get(lanes, 0) + 1
        if self._settled[lanes] > PROBE_PERIODS and len(ranked) > 1:
            self._settled[lanes] = 0
            others = [length for length in ranked if length != now]
            self._probes[lanes] += 1
            if self._probes[lanes] % THOROUGH == 0:
                return next(length for count, length in self._tried if count == lanes and length != now)
            return others[0]
        return now

    def describe(self) -> str:
        return f"blocks of {', '.join(map(str, self.lengths))} tokens, whichever pays most"
