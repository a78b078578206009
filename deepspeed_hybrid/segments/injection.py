# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The segments of one model: planned once, fused over its weights, bound while it generates."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from deepspeed_hybrid.autotp import holds_shards, is_column_shard
from deepspeed_hybrid.compat import layer_kinds, text_model
from deepspeed_hybrid.hung_on import is_zero3_hook
from deepspeed_hybrid.ops import gdn_kept_block, gdn_streamed
from deepspeed_hybrid.ops.gdn_decode import GdnSizes
from deepspeed_hybrid.ops.shared_sum import SharedSum
from deepspeed_hybrid.segments.apply import Binding, ModuleTables, bound
from deepspeed_hybrid.segments.attention import attention_bindings
from deepspeed_hybrid.segments.decoder_layer import (
    MANY_HEADS,
    MANY_HEADS_OF_BLOCKS,
    MANY_HEADS_OF_TRITON,
    DecodeOps,
    PreparedNorm,
    decoder_layer_binding,
    decoder_layer_obstacle,
    head_bindings,
    head_obstacle,
)
from deepspeed_hybrid.segments.gathered import GatheredWeights
from deepspeed_hybrid.segments.gdn import check_scans, gdn_binding, is_gdn
from deepspeed_hybrid.segments.head_parallel import HeadParallelGdn, head_parallel_obstacle
from deepspeed_hybrid.segments.mlp import glu_binding
from deepspeed_hybrid.segments.norm import as_rms_norm, rms_norm
from deepspeed_hybrid.segments.plan import ATTENTION, GDN, GLU, Segment, plan_segments
from deepspeed_hybrid.segments.prompt_attention import prompt_attention_binding
from deepspeed_hybrid.segments.prompts import MODELS_OWN, PromptOps, norm_binding, prompt_norms
from deepspeed_hybrid.segments.replayable import prompt_obstacle
from deepspeed_hybrid.segments.step_inputs import (
    embedding_binding,
    embedding_obstacle,
    rotary_binding,
    rotary_obstacle,
)
from deepspeed_hybrid.segments.tensor_parallel import GatheredLinear, fused_linear, head_binding
from deepspeed_hybrid.segments.weights import PACKED, FusedLinear, WeightSyncReport, refresh, sync, timed

WHOLE_MODEL = "model"  # in a report under ZeRO-3: every parameter is copied, in a segment or not

HEAD = -1  # the key of the last norm and the head, among layer numbers
EMBEDDING, ROTARY = "embedding", "rotary"  # the keys of what is before the layers
KERNELS = {EMBEDDING: "one launch with the first norm", ROTARY: "one launch for cos and sin"}


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
        gathered: the copies to generate with where ZeRO-3 has partitioned the parameters, or None.
        prompt: the ops of a prompt's forward. That of norms is for kinds 'all' only: they are in no one segment.
    """

    def __init__(
        self,
        model: nn.Module,
        kinds: str | None,
        may_move: bool,
        silu_mul: Callable,
        gates: Callable,
        chain: DecodeOps | str,
        gathered: GatheredWeights | None = None,
        prompt: PromptOps = MODELS_OWN,
    ):
        self.model, self.kinds, self.may_move = model, kinds, may_move
        self.silu_mul, self.gates, self.chain = silu_mul, gates, chain
        self.gathered, self.prompt = gathered, prompt
        self.replan()
        self.fused: dict[str, FusedLinear] = {}
        self.bindings: list[Binding] = []
        self.follow()

    def follow(self) -> None:
        """Start anew from the parameters and layers as they are now. Gathered copies wait for the next ``sync()``."""
        self.release()
        if self.gathered is None:
            self._fuse()

    def release(self) -> None:
        """Give gathered copies back; the next ``freshen()`` or ``sync()`` makes them anew."""
        if self.gathered is not None:
            self.gathered.release()
            self.fused, self.bindings = {}, []

    @property
    def sums(self) -> SharedSum | None:
        """The op of decode chains that keeps something from step to step."""
        return self.chain.shared_sum if isinstance(self.chain, DecodeOps) else None

    def many_rows(self, state_dtype: torch.dtype, blocks: bool = False) -> int | None:
        """From how many rows on decode steps of recurrent layers may write their states late; None: never.

        Args:
            blocks: steps may have several tokens a row.
        """
        if not isinstance(self.chain, DecodeOps) or self.chain.gdn_deferred is None:
            return None
        chained = [part for part in self._chosen if part.kind == GDN and self.unchained[part.layer] is None]
        layers = [self.fused.get(part.path) for part in chained]
        runs = [
            own if isinstance(own, HeadParallelGdn) else part.module for part, own in zip(chained, layers, strict=True)
        ]
        many = [_many_rows(layer, state_dtype, blocks) for layer in runs]
        some = [rows for rows in many if rows is not None]
        return min(some) if some and len(some) == len(many) else None

    @property
    def _chosen(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.reason is None]

    def _fuse(self) -> None:
        """Make the fused weights from the parameters that the modules have, and the forwards that use them."""
        self.fused = {segment.path: self._product(segment) for segment in self._chosen}
        inputs = {id(segment.module): self.fused[segment.path] for segment in self._chosen if segment.kind == GDN}
        bindings = [
            gdn_binding(module, inputs.get(id(module)), self.gates, self.prompt)
            for module in self.model.modules()
            if is_gdn(module)
        ]
        for segment in self._chosen:
            fused = self.fused[segment.path]
            if segment.kind == GLU:
                bindings.append(glu_binding(segment.module, fused, self.silu_mul))
            elif segment.kind == ATTENTION:
                bindings.extend(attention_bindings(segment.projections, fused))
                heads, gates = self.prompt.prompt_heads, self.prompt.gated_heads
                if heads is not None and gates is not None and self.unchained[segment.layer] is None:
                    keep = self.prompt.keep_tokens
                    bindings.append(prompt_attention_binding(segment.module, fused, heads, gates, keep))
        if isinstance(self.chain, DecodeOps):
            bindings.extend(self._chains(self.chain))
        head = head_binding(self.model.get_output_embeddings())
        bindings.extend([] if head is None else [head])
        if self.prompt.normed_rows is not None:
            bindings.extend(norm_binding(module, self.prompt.normed_rows) for module in self.norms)
        self.bindings = bindings

    def _product(self, segment: Segment) -> FusedLinear:
        """The fused projections of a segment; where ranks share the heads of a mixer, those of this rank's heads."""
        shared = segment.kind == GDN and is_column_shard(segment.projections[0])
        obstacle = _all_heads_here(segment) if shared else None
        if shared and obstacle is None:
            return HeadParallelGdn(segment.module)
        fused = fused_linear(segment.projections, self.may_move)
        if isinstance(fused, GatheredLinear):
            fused.why_all_heads = obstacle
        return fused

    def _chains(self, ops: DecodeOps) -> list[Binding]:
        """Of what is before the layers, and of the decoder layers and the head that can be chains."""
        decoder, prepared, bindings = text_model(self.model), PreparedNorm(), []
        for index, layer in enumerate(decoder.layers):
            if self.unchained[index] is None:
                input_norm = rms_norm(layer.input_layernorm)
                behind = decoder.norm
                if index + 1 < len(decoder.layers):
                    behind = getattr(decoder.layers[index + 1], "input_layernorm", behind)
                next_norm = as_rms_norm(behind)
                if next_norm is None or next_norm.weight.dtype != input_norm.weight.dtype:
                    next_norm = input_norm  # the layer behind is no chain: nobody takes it
                segments = [segment for segment in self.segments if segment.layer == index]
                norms = input_norm, next_norm, prepared
                ends = behind is decoder.norm and self.unchained[HEAD] is None
                bindings.append(decoder_layer_binding(layer, segments, self.fused, ops, *norms, self.prompt, ends))
        if self.inputs[EMBEDDING] is None:
            first_norm = rms_norm(decoder.layers[0].input_layernorm)
            bindings.append(embedding_binding(decoder.embed_tokens, first_norm, ops.embedded_rows, prepared))
        if self.inputs[ROTARY] is None:
            bindings.append(rotary_binding(decoder.rotary_emb, ops.rotary_tables, self.prompt.rotary_tables))
        if self.unchained[HEAD] is None:
            head = self.model.get_output_embeddings()
            bindings.extend(head_bindings(decoder.norm, head, rms_norm(decoder.norm), ops, prepared))
        return bindings

    def replan(self) -> None:
        """Look at the modules again (an adapter, a hook, another layer).

        What comes out: the segments, which layers are no chains, what before them is left alone, which norms run our
        forward, why the forward of prompts is not captured (None: it is), and what decides over what goes between
        ranks: which GatedDeltaNet layers have one input product, and why it is not that of this rank's heads alone.
        """
        self._holds_shards = holds_shards(self.model)
        self.segments, self.unchained, self.inputs, self.norms, self.prompt_obstacle = self._plan()
        self.exchanges = [(one.path, _all_heads_here(one)) for one in self._chosen if one.kind == GDN]
        # Whether some attention layer runs the model's own forward in a decode step, which wants a mask.
        kinds = enumerate(layer_kinds(self.model))
        self.masked = any(kind == "full_attention" and self.unchained[index] for index, kind in kinds)

    def _plan(
        self,
    ) -> tuple[list[Segment], dict[int, str | None], dict[str, str | None], list[nn.Module], str | None]:
        with self.bare():
            check_scans(self.model)
            segments = [] if self.kinds is None else plan_segments(self.model, self.kinds)
            unchained = self._unchained(segments)
            inputs = self._unfused_inputs(unchained)
            return segments, unchained, inputs, self._norms(unchained), prompt_obstacle(self.model)

    def _unchained(self, segments: list[Segment]) -> dict[int, str | None]:
        """Why the decode step of each layer (and of HEAD) is not one chain; None where it is."""
        decoder = text_model(self.model)
        of_layer: dict[int, list[Segment]] = {index: [] for index in range(len(decoder.layers))}
        if self.kinds is None or isinstance(self.chain, str):
            reason = self.chain if isinstance(self.chain, str) else "no segment is fused"
            return dict.fromkeys([HEAD, *of_layer], reason)
        for segment in segments:
            of_layer[segment.layer].append(segment)
        reasons = {index: decoder_layer_obstacle(layer, of_layer[index]) for index, layer in enumerate(decoder.layers)}
        return {HEAD: head_obstacle(self.model, decoder, self.model.get_output_embeddings()), **reasons}

    def _unfused_inputs(self, unchained: dict[int, str | None]) -> dict[str, str | None]:
        """Why embedding and rotary embedding are left alone; None where they run ours. They are in no one segment."""
        if self.kinds != "all" or isinstance(self.chain, str):
            partly = "no segment is fused" if self.kinds is None else f"only segments of kind {self.kinds!r} are fused"
            return dict.fromkeys((EMBEDDING, ROTARY), self.chain if isinstance(self.chain, str) else partly)
        decoder = text_model(self.model)
        return {
            EMBEDDING: embedding_obstacle(self.model, decoder, unchained[0]),
            ROTARY: rotary_obstacle(decoder.rotary_emb),
        }

    def _norms(self, unchained: dict[int, str | None]) -> list[nn.Module]:
        """Those that run our forward; the last one does so in the head's product where that is chained."""
        if self.prompt.normed_rows is None or self.kinds != "all":
            return []
        chained = text_model(self.model).norm if unchained[HEAD] is None else None
        return [module for module in prompt_norms(self.model) if module is not chained]

    @contextmanager
    def bound(self) -> Iterator[None]:
        """The model with our forwards, and with gathered weights where there are any."""
        with self._tables(), bound(self.bindings):
            yield

    def bare(self) -> AbstractContextManager[None]:
        """The model as it is without what ZeRO-3 has hung on it."""
        return self.gathered.bare() if self.gathered is not None else nullcontext()

    def _tables(self) -> AbstractContextManager[None]:
        """Under AutoTP an engine's hook compares the arguments of the first forward between ranks: of training's."""
        if self.gathered is not None:
            return self.gathered.serving()
        if self._holds_shards:
            return ModuleTables(self.model, dropped=is_zero3_hook).exchanged(lambda own: own)
        return nullcontext()

    def check(self) -> None:
        """Gathered copies are served at the engine's step alone, and never refreshed unasked: ranks may disagree on
        whether to call generate(), and a collective that only some of them join never ends.

        Raises:
            RuntimeError: they are of another step.
        """
        if self.gathered is not None:
            self.gathered.check()

    def freshen(self) -> None:
        """Before rows run: copies of local parameters follow them; gathered ones are made if there are none."""
        self.check()
        if self.gathered is None:
            refresh(self.fused)
        self.gather_missing()

    def take_part(self) -> None:
        """For a rank whose call is refused: others, whose call is good, may wait for its share of the weights."""
        if self.gathered is not None and self.gathered.is_shared:
            self.gather_missing()

    def gather_missing(self) -> None:
        """Make gathered copies where there are none. A collective operation."""
        if self.gathered is not None and self.gathered.step is None:
            try:
                self._gather(self.gathered)
            except BaseException:
                self.release()
                raise

    def sync(self) -> WeightSyncReport:
        """Refresh packed and gathered copies in place."""
        gathered = self.gathered
        return sync(self.fused) if gathered is None else timed(self._modes(), lambda: self._gather(gathered))

    def _gather(self, gathered: GatheredWeights) -> int:
        """The bytes written. Fused weights are views of what is gathered; only layers that share one are packed."""
        if gathered.step is None:
            with gathered.bare():
                groups = self._groups()
            gathered.allocate(groups)
            with gathered.serving():
                self._fuse()
        copied = gathered.gather()
        if PACKED not in (linear.mode for linear in self.fused.values()):
            return copied
        with gathered.serving():
            return copied + refresh(self.fused)

    def _groups(self) -> list[list[nn.Parameter]]:
        layers = [segment.projections for segment in self._chosen]
        weights = [[layer.weight for layer in group] for group in layers]
        return weights + [[layer.bias for layer in group] for group in layers if group[0].bias is not None]

    def _modes(self) -> dict[str, str]:
        if self.gathered is not None:
            return {WHOLE_MODEL: PACKED, **{segment.path: PACKED for segment in self._chosen}}
        return {path: linear.mode for path, linear in self.fused.items()}

    @property
    def missing_bytes(self) -> int:
        """Of gathered copies that the next run makes first."""
        return 0 if self.gathered is None or self.gathered.step is not None else self.gathered.whole_bytes

    @property
    def packed_bytes(self) -> int:
        gathered = 0 if self.gathered is None else self.gathered.nbytes
        return gathered + sum(linear.packed_bytes for linear in self.fused.values())

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Layer, segment, kernel, weight mode and reason of every planned segment, and of all norms together."""
        modes, table = self._modes(), []
        for segment in self.segments:
            kernel = "left alone" if segment.reason else "one product of " + " ".join(segment.names)
            mode, reason = "-" if segment.reason else modes[segment.path], segment.reason
            fused = self.fused.get(segment.path)
            if isinstance(fused, HeadParallelGdn):
                kernel += ", of this rank's heads"
            elif isinstance(fused, GatheredLinear):
                reason = f"all heads run here: {fused.why_all_heads}"
            table.append((str(segment.layer), segment.kind, kernel, mode, reason or ""))
        for index, reason in self.unchained.items():
            where = "head" if index == HEAD else str(index)
            table.append((where, "decode_step", "left alone" if reason else "one chain of ops", "-", reason or ""))
        table.sort(key=lambda row: float("inf") if row[0] == "head" else int(row[0]))
        for name, reason in reversed(self.inputs.items()):
            kernel = "left alone" if reason else KERNELS[name]
            table.insert(0, (name, "decode_step", kernel, "-", reason or ""))
        if self.norms:
            table.append(("all", "norm", f"one launch for each of {len(self.norms)}", "-", ""))
        return table


def _all_heads_here(mixer: Segment) -> str | None:
    """Why ranks that share a mixer's projections do not share its heads; None where they do, or share nothing."""
    return head_parallel_obstacle(mixer.module) if is_column_shard(mixer.projections[0]) else None


def _many_rows(layer: nn.Module | HeadParallelGdn, state_dtype: torch.dtype, blocks: bool = False) -> int | None:
    """Of a recurrent layer, see MANY_HEADS; None: never."""
    heads, conv = layer.num_v_heads, layer.conv1d
    sizes = GdnSizes(layer.num_k_heads, heads, layer.head_k_dim, layer.head_v_dim, layer.conv_kernel_size)
    weight = conv.weight
    suits = gdn_streamed.suits(sizes, weight.dtype, state_dtype, conv.bias is not None, weight.device)
    streams = suits and sum(sizes.columns) % 8 == 0  # rows of the projection begin on boundaries
    if blocks:
        capable = streams and gdn_kept_block.suits(weight.dtype, weight.device)
        return -(-MANY_HEADS_OF_BLOCKS // heads) if capable else None
    return -(-(MANY_HEADS if streams else MANY_HEADS_OF_TRITON) // heads)
