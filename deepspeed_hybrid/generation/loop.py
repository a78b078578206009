# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The host's side: admit rows, replay steps, look at the stop flags, hand out finished rows."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_hybrid.generation.arena import Arena
from deepspeed_hybrid.generation.kept_prompt import KeptPrompt
from deepspeed_hybrid.generation.prefill import prefill
from deepspeed_hybrid.generation.progress import Progress
from deepspeed_hybrid.generation.requests import Prompts, SamplingPlan
from deepspeed_hybrid.generation.scheduler import SlotScheduler
from deepspeed_hybrid.generation.state import DecodeState
from deepspeed_hybrid.generation.step import advance
from deepspeed_hybrid.generation.tail import TailShrink
from deepspeed_hybrid.generation.trace import Tracer
from deepspeed_hybrid.generation.transfer import upload


@dataclass
class Answers:
    """What the rows produced: tokens [R, C] int64, logprobs [R, C] fp32, lengths [R] int64, finish [R] uint8.

    A row is what memory held before until it has ended.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor
    finish: torch.Tensor
    _ends: tuple[list[int], list[int]] | None = None

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> "Answers":
        return cls(
            tokens=torch.empty(rows, columns, dtype=torch.int64, device=device),
            logprobs=torch.empty(rows, columns, dtype=torch.float32, device=device),
            lengths=torch.empty(rows, dtype=torch.int64, device=device),
            finish=torch.empty(rows, dtype=torch.uint8, device=device),
        )

    def ends(self) -> tuple[list[int], list[int]]:
        """Lengths and finish codes once every row has ended; the first call waits for the device."""
        if self._ends is None:
            lengths, finish = torch.stack([self.lengths, self.finish.long()]).tolist()
            self._ends = lengths, finish
        return self._ends

    def take(self, state: DecodeState, slots: list[int], rows: list[int]) -> None:
        """Copy finished slots' answers, in stream order and without waiting for them."""
        source = upload(slots, self.tokens.device)
        target = upload(rows, self.tokens.device)
        columns = self.tokens.shape[1]
        self.tokens.index_copy_(0, target, state.tokens[:, :columns].index_select(0, source))
        self.logprobs.index_copy_(0, target, state.logprobs[:, :columns].index_select(0, source))
        self.lengths.index_copy_(0, target, state.length.index_select(0, source))
        self.finish.index_copy_(0, target, state.finish.index_select(0, source))


@dataclass
class LoopStats:
    """Counts of one run."""

    slots: int = 0
    prefill_forwards: int = 0
    prefill_replays: int = 0  # of the forwards
    decode_forwards: int = 0
    admissions: int = 0
    refills: int = 0
    shrinks: int = 0  # moves of the last rows to fewer lanes
    lane_steps: int = 0
    queued_steps: int = 0  # decode forwards before the last row had its slot
    admitted_at: dict[int, int] = field(default_factory=dict)  # row -> decode forwards before it had its slot
    retired_at: dict[int, int] = field(default_factory=dict)  # and when it was seen to have ended
    occupied: list[int] = field(default_factory=list)


def run_rows(
    arena: Arena,
    prompts: Prompts,
    plan: SamplingPlan,
    step: Callable[[], None],
    slots: int,
    answers: Answers,
    stats: LoopStats,
    poll_every: int,
    shared_prefill: bool,
    keeps: bool,
    trace: Tracer,
    tail: TailShrink,
    progress: Progress,
    watched: bool = False,
) -> Iterator[list[int]]:
    """Generate every row (prompt-major, ``plan.samples`` a prompt); yield rows as they finish, in lists.

    Args:
        arena: cache and state; a step runs ``arena.lanes`` lanes.
        step: one decode step over those lanes, eager or a replay.
        slots: most rows in flight, at most ``arena.lanes``.
        answers: filled in.
        stats: filled in.
        poll_every: tokens that a row may get between two looks at the stop flags, on a device that runs ahead of the
            host.
        shared_prefill: prefill a prompt once for all of its samples that get a slot at the same time.
        keeps: and for those that wait.
        trace: is told of stages: 'prefill', 'refill' of slots whose rows have ended, 'shrink', 'decode', 'collect'.
        tail: says when to go on with fewer lanes.
        progress: is told of rows and tokens.
        watched: whoever takes the rows may write to the weights meanwhile, so that no prompt is kept for longer.
    """
    state = arena.state
    scheduler = SlotScheduler(len(prompts.lengths) * plan.samples, slots)
    flags = StopFlags(state)
    kept = KeptPrompt(keeps) if shared_prefill else None
    every = max(1, poll_every // (1 if arena.speculation is None else arena.speculation.most_tokens))
    stats.slots = slots
    steps_left = 0
    step = trace.ranged("decode step", step)
    with progress:
        while scheduler.busy:
            placed = scheduler.admit()
            if placed:
                with trace.span("refill" if stats.admissions else "prefill", rows=len(placed)):
                    forwards, replays = arena.model.forwards, arena.prefill_replays
                    _admit(arena, prompts, plan, placed, kept)
                    stats.prefill_forwards += arena.model.forwards - forwards
                    stats.prefill_replays += arena.prefill_replays - replays
                stats.refills += len(placed) if stats.admissions else 0
                stats.admissions += len(placed)
                steps_left = max(steps_left, max(plan.limit(row) for _, row in placed) - 1)
                stats.admitted_at.update((row, stats.decode_forwards) for _, row in placed)
                if not scheduler.waiting:
                    stats.queued_steps = stats.decode_forwards
                progress.add(tokens=len(placed))
            elif not scheduler.waiting:
                fewer = tail.lanes(scheduler.running, arena.lanes, stats.decode_forwards, steps_left)
                if fewer is not None:
                    with trace.span("shrink", lanes=fewer):
                        step = trace.ranged("decode step", arena.shrink(fewer, scheduler.compact(fewer), plan))
                    stats.shrinks += 1
            burst = min(every if flags.asynchronous else 1, steps_left)
            if burst:
                with trace.span("decode", steps=burst, lanes=arena.lanes, rows=scheduler.running):
                    for _ in range(burst):
                        step()
            steps_left -= burst
            stats.decode_forwards += burst
            stats.lane_steps += burst * arena.lanes
            stats.occupied.append(scheduler.running)
            progress.add(tokens=burst * scheduler.running)
            if steps_left:
                flags.record(scheduler.occupants)
                finished = flags.finished(scheduler.occupants)
            else:  # every row has had as many tokens as it may: nobody waits to look
                flags.forget()
                finished = [slot for slot, row in enumerate(scheduler.occupants) if row is not None]
            if finished:
                rows = [scheduler.retire(slot) for slot in finished]
                stats.retired_at.update((row, stats.decode_forwards) for row in rows)
                with trace.span("collect", rows=len(rows)):
                    answers.take(state, finished, rows)
                progress.add(rows=len(rows))
                yield rows
                if watched and kept is not None:
                    kept.drop()


def _admit(
    arena: Arena, prompts: Prompts, plan: SamplingPlan, placed: list[tuple[int, int]], kept: KeptPrompt | None
) -> None:
    """Prefill the new rows, fork shared prompts, choose every row's first token.

    Args:
        placed: slots and rows, the rows in the order in which they wait.
        kept: the prompt that more samples wait for; None where each sample has a prefill of its own.
    """
    if arena.speculation is not None:
        arena.speculation.disturb()
    slots = [slot for slot, _ in placed]
    requests = [row // plan.samples for _, row in placed]
    samples = [row % plan.samples for _, row in placed]
    owners = list(range(len(placed))) if kept is None else _owners(requests)
    first = sorted(set(owners))
    device = prompts.ids.device

    known, parts = kept is not None and kept.request == requests[0], []
    if known:
        kept.restore(arena.cache, slots[0])
        parts.append(kept.logits)
    new = first[1:] if known else first
    if new:
        wanted = [requests[index] for index in new]
        everyone = wanted == list(range(len(prompts.lengths)))
        parts.append(
            prefill(
                arena.model,
                arena.cache,
                prompts.ids if everyone else prompts.ids.index_select(0, upload(wanted, device)),
                [prompts.lengths[request] for request in wanted],
                [slots[index] for index in new],
                graphs=arena.prompts,
                alone=plan.kind.invariant,
            )
        )
    logits = parts[0] if len(parts) == 1 else torch.cat(parts)
    if kept is not None:
        last = placed[-1][1]
        if (last + 1) % plan.samples == 0:
            kept.drop()
        elif kept.request != requests[-1]:
            kept.keep(arena.cache, slots[owners[-1]], requests[-1], logits[-1:])
    copies = [index for index in range(len(placed)) if owners[index] != index]
    if copies:
        arena.cache.fork(
            upload([slots[owners[index]] for index in copies], device),
            upload([slots[index] for index in copies], device),
        )
        place = {owner: index for index, owner in enumerate(first)}
        logits = logits.index_select(0, upload([place[owner] for owner in owners], device))

    rows = DecodeState.starting(
        requests, samples, [prompts.lengths[request] for request in requests], plan, plan.max_new_tokens, device
    )
    if plan.kind.penalised:
        rows.seen = seen_tokens(prompts, requests, arena.model.vocab_size)
    advance(rows, logits, plan.kind, arena.choose, arena.truncate, arena.model.shard)
    arena.state.store(upload(slots, device), rows)


def _owners(requests: list[int]) -> list[int]:
    """For each row the index of the first row with the same prompt."""
    return [requests.index(request) for request in requests]


def seen_tokens(prompts: Prompts, requests: list[int], vocab_size: int) -> torch.Tensor:
    """[len(requests), vocab_size] bool: the tokens of each row's prompt, padding left out."""
    device = prompts.ids.device
    ids = prompts.ids.index_select(0, upload(requests, device))
    lengths = upload([prompts.lengths[request] for request in requests], device)
    real = torch.arange(ids.shape[1], device=device)[None, :] >= ids.shape[1] - lengths[:, None]
    counts = torch.zeros(len(requests), vocab_size, dtype=torch.int32, device=device)
    return counts.scatter_add_(1, ids, real.int()) > 0


class StopFlags:
    """Which rows have ended, read without stopping the device.

    A copy of the flags is queued behind the steps; the host waits for the copy before the last one, so that at least
    one burst of steps is always queued while it looks. A copy also holds who was in each slot when it was queued: an
    old copy says nothing of a row that was admitted since.
    """

    def __init__(self, state: DecodeState):
        self.state = state
        self.asynchronous = state.parked.device.type != "cpu"
        self._queued: deque[tuple[torch.Tensor, Any, list[int | None]]] = deque()

    def record(self, occupants: list[int | None]) -> None:
        flags = self.state.parked[: len(occupants)]
        event = None
        if self.asynchronous:
            pinned = torch.empty(flags.shape, dtype=flags.dtype, device="cpu", pin_memory=True)
            flags = pinned.copy_(flags, non_blocking=True)
            event = get_accelerator().Event()
            event.record()
        self._queued.append((flags, event, list(occupants)))

    def forget(self) -> None:
        """What is queued is of rows that are known to have ended."""
        self._queued.clear()

    def finished(self, occupants: list[int | None]) -> list[int]:
        """Slots whose present row is known to have ended. A row may have moved since its copy was queued."""
        ended: set[int | None] = set()
        while len(self._queued) > (1 if self.asynchronous else 0):
            flags, event, then = self._queued.popleft()
            if event is not None:
                event.synchronize()
            ended.update(row for row, parked in zip(then, flags.tolist(), strict=True) if parked)
        return [slot for slot, row in enumerate(occupants) if row is not None and row in ended]
