# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The segments of one model: planned once, fused over its weights, bound while it generates."""

from collections.abc import Callable

from torch import nn

from deepspeed_hybrid.segments.apply import Binding
from deepspeed_hybrid.segments.attention import attention_bindings
from deepspeed_hybrid.segments.gdn import gdn_binding, is_gdn
from deepspeed_hybrid.segments.mlp import glu_binding
from deepspeed_hybrid.segments.plan import ATTENTION, GDN, GLU, Segment, plan_segments
from deepspeed_hybrid.segments.weights import FusedLinear, WeightSyncReport, sync


class Injection:
    """Forwards for the layers of ``model``.

    GatedDeltaNet layers always run ours, since their state is in slots; of the planned segments those are fused that
    have no reason against it.

    Args:
        model: the Hugging Face model.
        kinds: the segments to fuse, 'all' or one kind; None for none.
        may_move: whether parameters may be moved next to one another; not where ZeRO has laid them out.
        silu_mul: the ``fused_silu_mul_halves`` op, or its reference.
        gates: the ``gdn_gates`` op, or its reference.
    """

    def __init__(self, model: nn.Module, kinds: str | None, may_move: bool, silu_mul: Callable, gates: Callable):
        self.model, self.kinds, self.may_move = model, kinds, may_move
        self.silu_mul, self.gates = silu_mul, gates
        self.segments = self._plan()
        self.fuse()

    def fuse(self) -> None:
        """Make the fused weights from the parameters as they are now, and the forwards that use them."""
        chosen = [segment for segment in self.segments if segment.reason is None]
        self.fused = {segment.path: FusedLinear(segment.projections, self.may_move) for segment in chosen}
        inputs = {id(segment.module): self.fused[segment.path] for segment in chosen if segment.kind == GDN}
        self.bindings: list[Binding] = [
            gdn_binding(module, inputs.get(id(module)), self.gates)
            for module in self.model.modules()
            if is_gdn(module)
        ]
        for segment in chosen:
            fused = self.fused[segment.path]
            if segment.kind == GLU:
                self.bindings.append(glu_binding(segment.module, fused, self.silu_mul))
            elif segment.kind == ATTENTION:
                self.bindings.extend(attention_bindings(segment.projections, fused))

    def replan(self) -> bool:
        """Look at the modules again (an adapter, a hook, another layer); whether the plan is another one."""
        before, self.segments = self.segments, self._plan()
        return self.segments != before

    def _plan(self) -> list[Segment]:
        return [] if self.kinds is None else plan_segments(self.model, self.kinds)

    def sync(self) -> WeightSyncReport:
        """Refresh packed copies in place."""
        return sync(self.fused)

    @property
    def packed_bytes(self) -> int:
        return sum(linear.packed_bytes for linear in self.fused.values())

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Layer, segment, kernel, weight mode and reason of every planned segment."""
        table = []
        for segment in self.segments:
            linear = self.fused.get(segment.path)
            kernel = "one product of " + " ".join(segment.names) if linear else "left alone"
            table.append(
                (str(segment.layer), segment.kind, kernel, linear.mode if linear else "-", segment.reason or "")
            )
        return table
