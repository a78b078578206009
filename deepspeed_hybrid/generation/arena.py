# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The memory of generation: a cache and a state of one size, kept between calls, and the steps over them."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from deepspeed_hybrid.cache.layers import BLOCKS, SINGLE_TOKENS, Deferral
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall, layer_kinds
from deepspeed_hybrid.generation.capacity import SlotBytes, cache_bytes, free_bytes, logits_bytes, state_bytes
from deepspeed_hybrid.generation.graph import GraphRunner
from deepspeed_hybrid.generation.peers import digest_of
from deepspeed_hybrid.generation.prompt_graphs import PromptGraphs
from deepspeed_hybrid.generation.requests import SamplingPlan
from deepspeed_hybrid.generation.sampling import SamplingKind
from deepspeed_hybrid.generation.state import DecodeState
from deepspeed_hybrid.generation.step import decode_step
from deepspeed_hybrid.generation.transfer import upload
from deepspeed_hybrid.ops.copy_slots import copy_slots_reference
from deepspeed_hybrid.ops.gdn_kept_block import MOST_TOKENS
from deepspeed_hybrid.ops.shared_sum import SharedSum
from deepspeed_hybrid.ops.truncate_scores import truncate_scores

SMALL_SLOT_BUCKETS = (1, 2, 4, 8)
SLOT_STEP, LENGTH_STEP = 8, 64
PLAIN = SamplingKind()
DEFERRED_SHARE = 0.9  # of what is free, at most, with room for tokens beside recurrent states
MOST_GROWTH = 2  # room for two different calls may be this many times that for the larger


def slot_bucket(rows: int) -> int:
    """Lanes a step runs for ``rows`` rows: 1, 2, 4, 8, then multiples of 8."""
    return next((bucket for bucket in SMALL_SLOT_BUCKETS if bucket >= rows), -(-rows // SLOT_STEP) * SLOT_STEP)


def length_bucket(tokens: int) -> int:
    """Cache positions a step reads for sequences of up to ``tokens``: a multiple of 64."""
    return -(-tokens // LENGTH_STEP) * LENGTH_STEP


Prepare = Callable[[Callable[..., None], Hashable], Callable[[], None]]


class StepMaker(Protocol):
    """What can take the place of plain decode steps."""

    def steps(self, prepare: Prepare, state: DecodeState) -> Callable[[], None]:
        """What runs one step over the rows of ``state``.

        Args:
            prepare: a function with the arguments of :func:`deepspeed_hybrid.generation.step.decode_step`, and what
                tells its step from others -> the step, eager or a replay.
        """

    def disturb(self) -> None:
        """Something else than steps takes the device's time."""

    def attach(self, cache: SlotCache) -> None:
        """Serve a new cache."""

    def release(self) -> None:
        """Give up what it keeps of the last cache."""

    def cache_bytes(self, slots: int, capacity: int) -> int:
        """What it hangs on a cache of this size."""

    @property
    def most_tokens(self) -> int:
        """Of a row in a step, whose logits are all there at once."""


class Arena:
    """Cache, state and captured steps. It grows when a call needs more, and then captures anew.

    Args:
        model: the model's forward.
        device: where the model is.
        state_dtype: of the recurrent state.
        graphs: the runner for captured steps, or None to step eagerly.
        choose: the ``decode_step`` op, or its torch reference.
        truncate: the ``truncate_scores`` op, or its torch reference.
        masked: whether some attention layer wants a mask over the cache; asked at every call.
        speculation: steps in place of plain decode steps, and what they keep of each slot; None: plain steps.
        prompts: prompt forwards of fixed shapes, or None to prefill in exact shapes, eagerly.
        least: the smallest number of those that ranks pass which share the model: they make room alike.
        sums: over those ranks; what it keeps goes with the graphs, which write to it.
        many_rows: from how many rows on plain steps may leave tokens beside recurrent states, None for never; asked at
            every call.
        copy: the ``copy_slots`` op, or its torch reference.
    """

    def __init__(
        self,
        model: ModelCall,
        device: torch.device,
        state_dtype: torch.dtype,
        graphs: GraphRunner | None,
        choose: Callable,
        truncate: Callable,
        masked: Callable[[], bool],
        prompts: PromptGraphs | None = None,
        speculation: StepMaker | None = None,
        least: Callable[[int], int] = int,
        sums: SharedSum | None = None,
        many_rows: Callable[[torch.dtype], int | None] = lambda state_dtype: None,
        copy: Callable[..., None] = copy_slots_reference,
    ):
        self.model, self.device, self.state_dtype = model, device, state_dtype
        self.graphs, self.masked = graphs, masked
        self.choose, self.truncate = choose, truncate
        self.prompts, self.speculation, self.sums = prompts, speculation, sums
        self.device_free, self.least, self.many_rows = partial(free_bytes, device), least, many_rows
        self.copy = copy
        self.lanes = self.kv_length = 0
        self.scratch = 0  # the most bytes of a step's logits, and of what becomes of them, so far
        self.cache: SlotCache | None = None
        self.state: DecodeState | None = None

    def reserve(self, rows: int, tokens: int, kind: SamplingKind = PLAIN) -> None:
        """Make room for ``rows`` rows of up to ``tokens`` tokens each, and set the buckets of the coming steps."""
        self.lanes, self.kv_length = slot_bucket(rows), length_bucket(tokens)
        holds = self._holds(self.lanes, self.kv_length)
        missing = self._missing(self.lanes, kind) if holds else 0
        if not holds or (missing and self._beyond(self._present() + missing)):
            slots, capacity = self._grown() if self.cache and not holds else (self.lanes, self.kv_length)
            if self._beyond(self._bytes(slots, capacity, kind)):
                slots, capacity = self.lanes, self.kv_length  # room for this call alone
            deferral = self._deferral(slots)
            if deferral and self._beyond(round(self._bytes(slots, capacity, kind, deferral) / DEFERRED_SHARE)):
                deferral = None
            self.release()
            kinds = layer_kinds(self.model.model)
            self.cache = SlotCache(kinds, slots, capacity, self.state_dtype, deferral, self.copy)
            self.state = DecodeState.empty(slots, capacity, self.device)
            if self.speculation is not None:
                self.speculation.attach(self.cache)
        self.scratch = max(self.scratch, self._logits_bytes(self.lanes, kind))
        if not self.masked():
            self.kv_length = self.cache.capacity  # costs nothing, and one captured step serves every length

    def needed(self, rows: int, tokens: int, kind: SamplingKind = PLAIN, fast: bool = False) -> int:
        """Bytes of all buffers in a call that ``reserve()`` has not seen yet; 0 where all of them are there.

        Args:
            fast: with what only makes steps of many rows faster.
        """
        lanes, kv_length = slot_bucket(rows), length_bucket(tokens)
        holds = self._holds(lanes, kv_length)
        missing = self._missing(lanes, kind) if holds else 0
        if holds and not missing:
            return 0
        alone = self._bytes(lanes, kv_length, kind, self._deferral(lanes) if fast else None)
        return min(alone, self._present() + missing) if holds else alone

    def _holds(self, lanes: int, kv_length: int) -> bool:
        return self.cache is not None and lanes <= self.cache.slots and kv_length <= self.cache.capacity

    def _present(self) -> int:
        return sum(self.bytes_by_kind().values())

    def _missing(self, lanes: int, kind: SamplingKind) -> int:
        """What a call of another kind wants beside a cache and a state that have room for it."""
        seen = self.cache.slots * self.model.vocab_size if kind.penalised and self.state.seen is None else 0
        return seen + max(0, self._logits_bytes(lanes, kind) - self.scratch)

    def _beyond(self, size: int) -> bool:
        """Whether there is known to be too little memory for buffers of this size."""
        free = self.free()
        return free is not None and size > self.least(free)

    def free(self) -> int | None:
        """Bytes there are for new buffers, those of the present ones included; None: no limit is known."""
        free = self.device_free()
        return None if free is None else free + self._present()

    def slot_bytes(self, tokens: int) -> int:
        """Of one slot that has room for so many tokens."""
        capacity = length_bucket(tokens)
        hung = 0 if self.speculation is None else self.speculation.cache_bytes(0, capacity)  # of scratch alone
        return SlotBytes.of(self.model.model, self.state_dtype).total(capacity) + hung

    def _bytes(self, slots: int, capacity: int, kind: SamplingKind, deferral: Deferral | None = None) -> int:
        slot = SlotBytes.of(self.model.model, self.state_dtype)
        return (
            cache_bytes(slot, slots, capacity, 0 if deferral is None else deferral.places)
            + (0 if self.speculation is None else self.speculation.cache_bytes(slots, capacity))
            + state_bytes(slots, capacity, self.model.vocab_size, kind)
            + self._logits_bytes(slots, kind)
        )

    def _deferral(self, rows: int) -> Deferral | None:
        """How steps of so many rows leave tokens beside recurrent states; None: they do not."""
        if self.speculation is not None and self.speculation.most_tokens > MOST_TOKENS:
            return None
        many = self.many_rows(self.state_dtype)
        if many is None or rows < many:
            return None
        return SINGLE_TOKENS if self.speculation is None else BLOCKS

    def _logits_bytes(self, lanes: int, kind: SamplingKind) -> int:
        sorts = self.truncate is not truncate_scores or self.device.type == "cpu"
        itemsize, vocab_size = self.model.embedding.weight.dtype.itemsize, self.model.vocab_size
        others = 0 if self.speculation is None else self.speculation.most_tokens - 1
        return logits_bytes(lanes, vocab_size, itemsize, kind, sorts) + others * lanes * vocab_size * itemsize

    def _grown(self) -> tuple[int, int]:
        """Slots and capacity that hold this call, and the largest so far too, unless the two have little in common.

        Many short rows and then a few long ones would together ask for many long ones.
        """
        slots, capacity = max(self.lanes, self.cache.slots), max(self.kv_length, self.cache.capacity)
        larger = max(self.lanes * self.kv_length, self.cache.slots * self.cache.capacity)
        return (slots, capacity) if slots * capacity <= MOST_GROWTH * larger else (self.lanes, self.kv_length)

    def begin(self, plan: SamplingPlan) -> Callable[[], None]:
        """Park every row and take over the call's options; return one decode step over the reserved lanes."""
        self.state.park()
        self.state.set_stop_ids(plan.stop_ids)
        if plan.kind.penalised:
            self.state.track_seen(self.model.vocab_size)
        # To the end of the call, however few rows are left.
        self.cache.defer(self.cache.deferral is not None and self._deferral(self.lanes) is not None)
        return self._step(plan)

    def settle(self) -> None:
        """Leave nothing beside the states of rows in flight, and put nothing there before the next call."""
        if self.cache is None or not self.cache.holder.deferring:
            return
        rows = self.state.lanes(self.lanes)
        if bool(rows.parked.all()):  # between calls
            return self.cache.defer(False)
        self.cache.settle(rows.position, rows.length, rows.stepped, ~rows.parked)

    def shrink(self, lanes: int, moves: list[tuple[int, int]], plan: SamplingPlan) -> Callable[[], None]:
        """Move rows from slot to slot and run fewer lanes from now on; one decode step over them."""
        if moves:
            sources, targets = (upload(list(slots), self.device) for slots in zip(*moves, strict=True))
            self.cache.fork(sources, targets, deferred=True)
            self.state.move(sources, targets)
        self.lanes = lanes
        return self._step(plan)

    def _step(self, plan: SamplingPlan) -> Callable[[], None]:
        kind, lanes, kv_length = plan.kind, self.state.lanes(self.lanes), self.kv_length
        key = (self.lanes, kv_length, kind, self.state.stop_ids.numel(), self.cache.holder.deferring)
        arguments = (self.model, self.cache, lanes, kind, kv_length)

        def prepare(step: Callable[..., None], which: Hashable) -> Callable[[], None]:
            def run() -> None:  # an eager one may outlive the plan it began with
                step(*arguments, self.masked(), self.choose, self.truncate)

            if self.graphs is None or plan.max_new_tokens == 1:
                return run
            return self.graphs.prepare((*key, self.masked(), which), run, self.parked)

        return prepare(decode_step, None) if self.speculation is None else self.speculation.steps(prepare, lanes)

    @contextmanager
    def parked(self) -> Iterator[None]:
        """All rows are parked inside: keys go to the scratch slot and everything else keeps its bits."""
        parked = self.state.parked.clone()
        self.state.parked.fill_(True)
        try:
            yield
        finally:
            self.state.parked.copy_(parked)

    def release(self) -> None:
        """Give the cache, the state and the graphs back."""
        self.drop_graphs()
        self.cache = self.state = None
        self.scratch = 0
        if self.speculation is not None:
            self.speculation.release()

    def drop_graphs(self) -> None:
        """Forget every captured step and prompt forward."""
        if self.graphs is not None:
            self.graphs.release()
        if self.prompts is not None:
            self.prompts.release()
        if self.sums is not None:
            self.sums.release()

    def digest(self) -> int:
        """63 bits of the sizes of the buffers and of what is captured, the same on any rank where those are."""
        runners = (self.graphs, None if self.prompts is None else self.prompts.runner)
        captured = [runner.keys for runner in runners if runner is not None]
        cache = self.cache
        sizes = None if cache is None else (cache.slots, cache.capacity, cache.deferral is not None, self.scratch)
        shapes = None if self.sums is None else self.sums.shapes
        return digest_of(repr((sizes, captured, shapes)).encode())

    def holds_graphs(self) -> bool:
        runners = (self.graphs, None if self.prompts is None else self.prompts.runner)
        return any(len(runner) for runner in runners if runner is not None)

    @property
    def prefill_replays(self) -> int:
        """Prompt forwards that were replays, so far."""
        return 0 if self.prompts is None else self.prompts.replays

    @property
    def prefill_captures(self) -> int:
        """Prompt forwards that were captured, so far."""
        return 0 if self.prompts is None else self.prompts.captures

    def graph_bytes(self) -> dict[str, int]:
        """Bytes of captured prompt forwards, of the graphs' pools, and of what other ranks write sums into. Asks the
        allocator, which takes a while."""
        kinds = {"prompt_buffers": 0, "prompt_logits": 0, "graph_pool": 0}
        runners = [self.graphs]
        if self.prompts is not None:
            kinds.update(prompt_buffers=self.prompts.buffer_bytes, prompt_logits=self.prompts.logits_bytes)
            runners.append(self.prompts.runner)
        if self.sums is not None and self.sums.direct:
            kinds["inboxes"] = self.sums.nbytes
        pools = sum(runner.pool_bytes for runner in runners if runner is not None)
        return {**kinds, "graph_pool": max(0, pools - kinds["prompt_logits"])}

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of cache and state."""
        kinds = {"kv_keys": 0, "kv_values": 0, "gdn_conv": 0, "gdn_state": 0, "decode_state": 0}
        if self.cache is not None:
            kinds.update(self.cache.bytes_by_kind(), decode_state=self.state.bytes())
        return kinds
