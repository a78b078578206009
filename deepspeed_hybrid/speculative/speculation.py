# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One speculative step: propose, verify, accept, commit. It takes a decode step's place, over the same buffers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall, text_model
from deepspeed_hybrid.generation.sampling import SamplingKind
from deepspeed_hybrid.generation.state import DecodeState
from deepspeed_hybrid.generation.step import decode_step
from deepspeed_hybrid.speculative.accept import accept
from deepspeed_hybrid.speculative.capture import FeatureCapture
from deepspeed_hybrid.speculative.controller import Controller
from deepspeed_hybrid.speculative.drafter import Drafter
from deepspeed_hybrid.speculative.stats import SpeculationStats
from deepspeed_hybrid.speculative.verify import commit, verify


class Speculation:
    """Speculative decoding of one rollout.

    Args:
        drafter: what proposes.
        controller: says how many tokens the next block has; 1 is a plain step, in which the drafter's context follows.
    """

    def __init__(self, drafter: Drafter, controller: Controller):
        self.drafter, self.controller = drafter, controller
        self.stats = SpeculationStats()
        self._cache: SlotCache | None = None

    def attach(self, cache: SlotCache) -> None:
        """Serve a new cache."""
        self._cache = cache
        self.drafter.attach(cache)

    def release(self) -> None:
        self._cache = None
        self.drafter.release()

    def cache_bytes(self, slots: int, capacity: int) -> int:
        return self.drafter.cache_bytes(slots, capacity)

    @property
    def most_tokens(self) -> int:
        return self.controller.most_tokens

    def describe(self) -> str:
        return f"{self.controller.describe()}, eager; drafts by {self.drafter.describe()}"

    def begin(self) -> None:
        """Count anew: a call begins."""
        self.controller.begin()
        self.stats = SpeculationStats()

    @contextmanager
    def watching(self, call: ModelCall) -> Iterator[None]:
        """Inside, the drafter sees the features of every forward over the cache."""
        self.controller.disturb()  # what was between two rounds was no step
        if not self.drafter.layer_ids:
            yield
            return
        capture = FeatureCapture(self.drafter.layer_ids, self._observe)
        with capture.on(text_model(call.model).layers):
            yield

    def _observe(self, features: torch.Tensor) -> None:
        plan = self._cache.holder.plan
        if plan.slots is not None:
            self.controller.disturb()
        self.drafter.observe(features, plan)

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
    ) -> None:
        """As :func:`deepspeed_hybrid.generation.step.decode_step`, but a row may get several tokens."""
        lanes = state.token.numel()
        tokens = self.controller.tokens(lanes)
        if tokens == 1:
            before = state.length.clone()
            decode_step(model, cache, state, kind, kv_length, masked, choose, truncate)
            counts = state.length - before
        else:
            drafts = self.drafter.propose(state, tokens, kv_length)
            logits, block = verify(model, cache, state, drafts, kv_length)
            counts = accept(state, logits, drafts, kind, choose, truncate)
            commit(block, counts)
        self.stats.add(tokens, counts)
        self.controller.record(lanes, tokens, counts)
