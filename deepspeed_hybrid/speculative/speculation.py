# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One speculative step: propose, verify, accept, commit. It takes a decode step's place, over the same buffers.

Everything in it happens on the device, at addresses that stay: it runs eagerly anywhere, and in a graph, of which
there is one for each length of blocks. The host only says which.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall, text_model
from deepspeed_hybrid.generation.arena import Prepare
from deepspeed_hybrid.generation.sampling import SamplingKind
from deepspeed_hybrid.generation.state import DecodeState
from deepspeed_hybrid.generation.step import decode_step
from deepspeed_hybrid.speculative.accept import accept
from deepspeed_hybrid.speculative.capture import FeatureCapture
from deepspeed_hybrid.speculative.controller import Controller
from deepspeed_hybrid.speculative.drafter import Drafter
from deepspeed_hybrid.speculative.side_stream import SideStream
from deepspeed_hybrid.speculative.stats import SpeculationStats
from deepspeed_hybrid.speculative.verify import commit, verify


class Speculation:
    """Speculative decoding of one rollout.

    Args:
        drafter: what proposes.
        controller: says how many tokens the next block has; 1 is a plain step, in which the drafter's context follows.
        side: a stream for the drafter's context, beside what follows in a step; None: the step's own.
    """

    def __init__(self, drafter: Drafter, controller: Controller, side: SideStream | None = None):
        self.drafter, self.controller, self.side = drafter, controller, side
        self.stats = SpeculationStats()
        self._cache: SlotCache | None = None

    def attach(self, cache: SlotCache) -> None:
        """Serve a new cache."""
        self._cache = cache
        self.drafter.attach(cache)

    def release(self) -> None:
        self._cache, self.stats = None, SpeculationStats()
        self.drafter.release()

    def cache_bytes(self, slots: int, capacity: int) -> int:
        return self.drafter.cache_bytes(slots, capacity)

    @property
    def most_tokens(self) -> int:
        return self.controller.most_tokens

    def describe(self) -> str:
        return f"{self.controller.describe()}; drafts by {self.drafter.describe()}"

    def begin(self) -> None:
        """Count anew: a call begins."""
        self.controller.begin()
        self.stats.begin()

    @contextmanager
    def watching(self, call: ModelCall) -> Iterator[None]:
        """Inside, the drafter sees the features of every forward over the cache."""
        self.disturb()  # what was between two rounds was no step
        if not self.drafter.layer_ids:
            yield
            return
        capture = FeatureCapture(self.drafter.layer_ids, self._observe)
        with capture.on(text_model(call.model).layers):
            yield

    def _observe(self, features: torch.Tensor) -> None:
        plan = self._cache.holder.plan
        if self.side is None or plan.block is None:  # a prompt's, or a plain step's
            self.drafter.observe(features, plan)
            return
        with self.side.branch(features):
            self.drafter.observe(features, plan)

    def disturb(self) -> None:
        """What takes time beside steps: prompts, or a caller between rows."""
        self.controller.disturb()

    def steps(self, prepare: Prepare, state: DecodeState) -> Callable[[], None]:
        """A step of as many tokens as the controller says, each time it is called."""
        lanes = state.token.numel()

        def run() -> None:
            tokens = self.controller.tokens(lanes)
            reached = self.stats.hold(tokens, state.token.device)
            step: Callable[..., None] = self.step
            prepare(lambda *arguments: step(*arguments, tokens), tokens)()
            self.stats.steps[tokens] = self.stats.steps.get(tokens, 0) + 1
            self.controller.record(lanes, tokens, reached)

        return run

    def step(
        self,
        model: ModelCall,
        cache: SlotCache,
        state: DecodeState,
        kind: SamplingKind,
        kv_length: int,
        masked: bool,
        choose: Callable,
        truncate: Callable,
        tokens: int,
    ) -> None:
        """As :func:`deepspeed_hybrid.generation.step.decode_step`, but a row may get up to ``tokens``."""
        if tokens == 1:
            before = state.length.clone()
            decode_step(model, cache, state, kind, kv_length, masked, choose, truncate)
            self._count(cache, state, 1, state.length - before)
            return
        drafts = self.drafter.propose(state, tokens, kv_length)
        try:
            logits, block = verify(model, cache, state, drafts, kv_length)
            counts = accept(state, logits, drafts, kind, choose, truncate)
            self._count(cache, state, tokens, counts)
            commit(block, counts)
        finally:
            if self.side is not None:
                self.side.join()

    def _count(self, cache: SlotCache, state: DecodeState, tokens: int, counts: torch.Tensor) -> None:
        """What has come out of a step of ``tokens``: [B] int64, 0 for parked rows."""
        self.stats.add(tokens, counts)
        if cache.holder.deferring:
            torch.where(counts > 0, counts, state.stepped, out=state.stepped)
