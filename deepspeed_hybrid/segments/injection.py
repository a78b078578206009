# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The segments of one model: planned once, fused over its weights, bound while it generates."""

from collections.abc import Callable

from torch import nn

from deepspeed_hybrid.compat import layer_kinds, text_model
from deepspeed_hybrid.segments.apply import Binding
from deepspeed_hybrid.segments.attention import attention_bindings
from deepspeed_hybrid.segments.decoder_layer import (
    DecodeOps,
    PreparedNorm,
    decoder_layer_binding,
    decoder_layer_obstacle,
    head_bindings,
    head_obstacle,
)
from deepspeed_hybrid.segments.gdn import gdn_binding, is_gdn
from deepspeed_hybrid.segments.mlp import glu_binding
from deepspeed_hybrid.segments.norm import as_rms_norm, rms_norm
from deepspeed_hybrid.segments.plan import ATTENTION, GDN, GLU, Segment, plan_segments
from deepspeed_hybrid.segments.weights import FusedLinear, WeightSyncReport, sync

HEAD = -1  # the key of the last norm and the head, among layer numbers


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
        chain: the ops of whole decoder layers in a decode step, or why there are none.
    """

    def __init__(
        self,
        model: nn.Module,
        kinds: str | None,
        may_move: bool,
        silu_mul: Callable,
        gates: Callable,
        chain: DecodeOps | str,
    ):
        self.model, self.kinds, self.may_move = model, kinds, may_move
        self.silu_mul, self.gates, self.chain = silu_mul, gates, chain
        self.segments, self.unchained = self._plan()
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
        if isinstance(self.chain, DecodeOps):
            self._bind_chains(self.chain)

    def _bind_chains(self, ops: DecodeOps) -> None:
        decoder, prepared = text_model(self.model), PreparedNorm()
        for index, layer in enumerate(decoder.layers):
            if self.unchained[index] is None:
                input_norm = rms_norm(layer.input_layernorm)
                behind = decoder.norm
                if index + 1 < len(decoder.layers):
                    behind = getattr(decoder.layers[index + 1], "input_layernorm", behind)
                next_norm = as_rms_norm(behind) or input_norm  # of another kind: nobody takes it
                segments = self._of_layer(index)
                self.bindings.append(
                    decoder_layer_binding(layer, segments, self.fused, ops, input_norm, next_norm, prepared)
                )
        if self.unchained[HEAD] is None:
            head = self.model.get_output_embeddings()
            self.bindings.extend(head_bindings(decoder.norm, head, rms_norm(decoder.norm), ops, prepared))

    def replan(self) -> bool:
        """Look at the modules again (an adapter, a hook, another layer); whether the plan is another one."""
        before = self.segments, self.unchained
        self.segments, self.unchained = self._plan()
        return (self.segments, self.unchained) != before

    @property
    def masked(self) -> bool:
        """Whether some attention layer runs the model's own forward in a decode step, which wants a mask."""
        kinds = layer_kinds(self.model)
        return any(kind == "full_attention" and self.unchained[index] for index, kind in enumerate(kinds))

    def _plan(self) -> tuple[list[Segment], dict[int, str | None]]:
        """The segments, and why the decode step of a layer (or of HEAD) is not one chain; None where it is."""
        segments = [] if self.kinds is None else plan_segments(self.model, self.kinds)
        decoder = text_model(self.model)
        indices = [HEAD, *range(len(decoder.layers))]
        if self.kinds is None or isinstance(self.chain, str):
            reason = self.chain if isinstance(self.chain, str) else "no segment is fused"
            return segments, dict.fromkeys(indices, reason)
        of_layer: dict[int, list[Segment]] = {index: [] for index in indices}
        for segment in segments:
            of_layer[segment.layer].append(segment)
        unchained = {
            index: decoder_layer_obstacle(layer, of_layer[index]) for index, layer in enumerate(decoder.layers)
        }
        return segments, {HEAD: head_obstacle(decoder, self.model.get_output_embeddings()), **unchained}

    def _of_layer(self, index: int) -> list[Segment]:
        return [segment for segment in self.segments if segment.layer == index]

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
        for index, reason in self.unchained.items():
            where = "head" if index == HEAD else str(index)
            table.append((where, "decode_step", "left alone" if reason else "one chain of ops", "-", reason or ""))
        return sorted(table, key=lambda row: (row[0] == "head", int(row[0]) if row[0] != "head" else 0))
