# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Prompt forwards of fixed shapes over static buffers: eager at first, captured at the second use, then replayed."""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall
from deepspeed_hybrid.generation.graph import GraphRunner
from deepspeed_hybrid.generation.prompt_forward import prompt_logits
from deepspeed_hybrid.generation.prompt_shapes import PromptShape
from deepspeed_hybrid.generation.transfer import upload_rows

PATIENCE = 8  # eager forwards of a shape before it takes another's place among the captured ones


class PromptForward:
    """The buffers of one shape, and the forward over them."""

    def __init__(self, model: ModelCall, cache: SlotCache, shape: PromptShape, device: torch.device):
        self.model, self.cache, self.shape = model, cache, shape
        self.ids = torch.zeros(shape.rows, shape.width, dtype=torch.int64, device=device)
        self.facts = torch.zeros(2, shape.rows, dtype=torch.int64, device=device)  # lengths, slots
        self.logits: torch.Tensor | None = None  # [rows, V] of the last run, at one address once it is captured

    def fill(self, ids: torch.Tensor, lengths: list[int], slots: list[int]) -> None:
        """Take over prompts [N, T], N and T at most the shape's; rows that are left go to the scratch slot, empty."""
        columns, spare = min(ids.shape[1], self.shape.width), self.shape.rows - len(lengths)
        if self.shape.padded:
            self.ids.zero_()
        self.ids[: len(lengths), self.shape.width - columns :].copy_(ids[:, ids.shape[1] - columns :])
        upload_rows(self.facts, [[*lengths, *[0] * spare], [*slots, *[self.cache.scratch] * spare]])

    def run(self) -> None:
        """Harmless to run again: prompts start from nothing, and only their own slots and scratch are written."""
        lengths, slots = self.facts
        self.logits = prompt_logits(
            self.model, self.cache, self.ids, lengths, slots, 0, self.shape.width, self.shape.padded
        )


class PromptGraphs:
    """Prompt forwards by shape, until ``release()``.

    The first forward of a shape runs eagerly, so that a shape which comes once never pays for a capture; it is also
    the warm-up, in which kernels are tuned and the cache makes its buffers. The second is captured. Where the runner
    is full, a shape runs eagerly ``PATIENCE`` times before its capture drops the least recently used one: a capture
    costs about two eager forwards, which many shapes in turn would pay again and again. Eager or replayed, a shape's
    forward launches the same kernels on the same numbers.

    Args:
        model: the model's forward.
        runner: for captured forwards; apart from that of decode steps, so that prompts of many shapes drop none of
            those. None: all run eagerly.
        obstacle: why this model's forward is not captured, or None; asked at every forward.
    """

    def __init__(self, model: ModelCall, runner: GraphRunner | None, obstacle: Callable[[], str | None]):
        self.model, self.runner, self.obstacle = model, runner, obstacle
        self.replays = 0
        self._eager_uses: dict[PromptShape, int] = {}  # of shapes that are not captured
        self._captured: dict[PromptShape, PromptForward] = {}

    @property
    def captures(self) -> int:
        return 0 if self.runner is None else self.runner.captures

    def logits(
        self, cache: SlotCache, ids: torch.Tensor, lengths: list[int], slots: list[int], shape: PromptShape
    ) -> torch.Tensor:
        """Prefill prompts [N, T] into their slots; logits of their last tokens, [N, V]."""
        forwards = self.model.forwards + 1
        replayed = self._replayed(shape)
        forward = self._captured.get(shape) if replayed else None  # an eager run must not touch a graph's tensors
        forward = forward or PromptForward(self.model, cache, shape, ids.device)
        forward.fill(ids, lengths, slots)
        if replayed:
            self._replay(shape, forward)
        else:
            forward.run()
        self.model.forwards = forwards  # a replay passes the model's count by
        return forward.logits[: len(lengths)].clone()  # the next replay writes to the same place

    def _replayed(self, shape: PromptShape) -> bool:
        if self.runner is None or self.obstacle() is not None:
            return False
        if shape in self._captured:
            return True
        uses = self._eager_uses.get(shape, 0)
        if uses >= (1 if len(self.runner) < self.runner.max_graphs else PATIENCE):
            return True
        self._eager_uses[shape] = uses + 1
        return False

    def _replay(self, shape: PromptShape, forward: PromptForward) -> None:
        replay = self.runner.prepare(shape, forward.run, nullcontext, warmups=0)
        if shape not in self._captured:
            self._captured[shape] = forward
            self._captured = {kept: one for kept, one in self._captured.items() if kept in self.runner}
            del self._eager_uses[shape]
        replay()
        self.replays += 1

    @property
    def buffer_bytes(self) -> int:
        """Static inputs of captured forwards."""
        return sum(forward.ids.nbytes + forward.facts.nbytes for forward in self._captured.values())

    @property
    def logits_bytes(self) -> int:
        """Results of captured forwards; on a GPU they lie in the graphs' pool."""
        return sum(forward.logits.nbytes for forward in self._captured.values() if forward.logits is not None)

    def release(self) -> None:
        """Drop every graph, and what is known of shapes: the next forward of each is a warm-up again."""
        self._captured, self._eager_uses = {}, {}
        if self.runner is not None:
            self.runner.release()
