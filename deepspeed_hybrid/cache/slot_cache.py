# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A transformers Cache whose rows live in slots of fixed address, each with a write position of its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from deepspeed_hybrid.cache.layers import DEFERRED, Deferral, PlanHolder, SlotGdnLayer, SlotKVLayer, StepPlan
from deepspeed_hybrid.compat import Cache
from deepspeed_hybrid.ops.copy_slots import copy_slots_reference


class SlotCache(Cache):
    """KV slots for attention layers, conv and recurrent state for GatedDeltaNet layers, and one scratch slot.

    Args:
        kinds: 'full_attention' or 'linear_attention' per layer.
        slots: rows that can be in flight. Slot number ``slots`` is scratch: parked lanes write their keys there.
        capacity: tokens a slot holds.
        state_dtype: dtype of the recurrent state.
        deferral: how decode steps may leave tokens beside recurrent states, for which there is room then.
        copy: the ``copy_slots`` op, or its torch reference.
    """

    def __init__(
        self,
        kinds: list[str],
        slots: int,
        capacity: int,
        state_dtype: torch.dtype = torch.float32,
        deferral: Deferral | None = None,
        copy: Callable[..., None] = copy_slots_reference,
    ):
        self.holder = PlanHolder()
        self.slots, self.capacity, self.state_dtype, self.deferral = slots, capacity, state_dtype, deferral
        self._copy = copy
        self.companions: list = []  # what else has a place for every slot, to be copied with it: has tensors()
        super().__init__(
            layers=[
                SlotGdnLayer(self.holder, slots, state_dtype, deferral)
                if kind == "linear_attention"
                else SlotKVLayer(self.holder, slots, capacity)
                for kind in kinds
            ]
        )

    @property
    def scratch(self) -> int:
        return self.slots

    @contextmanager
    def planned(self, plan: StepPlan) -> Iterator[None]:
        """The forward inside follows ``plan``."""
        self.holder.begin(plan)
        try:
            yield
        finally:
            self.holder.end()

    def defer(self, deferring: bool) -> None:
        """At the beginning of a call: whether its decode steps may leave tokens beside recurrent states."""
        self.holder.deferring = deferring
        for layer in self.layers:
            if isinstance(layer, SlotGdnLayer):
                layer.lagging = False

    def settle(
        self, position: torch.Tensor, answered: torch.Tensor, stepped: torch.Tensor, live: torch.Tensor
    ) -> None:
        """Take the tokens beside the states of lanes 0..B-1 into them, where rows will go on at ``position`` with so
        many tokens answered, behind a step that has brought so many (all [B]); from here on none is left there."""
        for layer in self.layers:
            if isinstance(layer, SlotGdnLayer):
                layer.settle(position, answered, stepped, live)
        self.holder.deferring = False

    def fork(self, sources: torch.Tensor, targets: torch.Tensor, deferred: bool = False) -> None:
        """Copy whole slots on the device, ``sources[i]`` to ``targets[i]`` (both [N] int64, no slot in both).

        Args:
            deferred: with tokens beside recurrent states, of which there are none behind a prompt.
        """
        self._copy(list(self.buffers(deferred)), sources, targets)

    def buffers(self, deferred: bool = True) -> Iterator[torch.Tensor]:
        for layer in (*self.layers, *self.companions):
            yield from (buffer for kind, buffer in layer.tensors().items() if deferred or kind not in DEFERRED)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of the layers' and companions' buffers by kind, scratch slot included."""
        totals = dict.fromkeys(("kv_keys", "kv_values", "gdn_conv", "gdn_state"), 0)
        for layer in (*self.layers, *self.companions):
            for kind, buffer in layer.tensors().items():
                totals[kind] = totals.get(kind, 0) + buffer.numel() * buffer.element_size()
        return totals
