# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A decoder layer's decode step as five to seven launches: every segment between two collectives is one chain of ops.
Where ranks share a layer, a sum over them follows each of its two output products.

mixer: norm and input product, the mixer's own kernel, output product and residual
MLP:   norm and gate and up product and silu * up, down product and residual

The products that add a residual also prepare the next norm, of which the next product does the rest. From one layer to
the next this goes beside the hidden state, which the model hands on.

A prompt of many rows goes through the same products, around the mixer's forward for prompts; any other forward
through the layer's own, in which the projections are fused as ever.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from deepspeed_hybrid.compat import own_attention
from deepspeed_hybrid.hung_on import facts, global_hooks, hooks_of
from deepspeed_hybrid.ops.attention_decode import MAX_HEAD_DIM
from deepspeed_hybrid.ops.gdn_decode import MAX_CONV_KERNEL
from deepspeed_hybrid.ops.shared_sum import SharedSum
from deepspeed_hybrid.segments.apply import Binding
from deepspeed_hybrid.segments.head_parallel import HeadParallelGdn
from deepspeed_hybrid.segments.known_forwards import (
    ATTENTION_CORE,
    CAUSAL_MODEL,
    DECODER,
    LAYER,
    has_known_forward,
    is_silu_gated_norm,
)
from deepspeed_hybrid.segments.norm import Norm, as_rms_norm, rms_norm
from deepspeed_hybrid.segments.plan import ATTENTION, GDN, GLU, Segment, output_obstacle
from deepspeed_hybrid.segments.prompt_layer import prompt_chain, runs_as_chain
from deepspeed_hybrid.segments.prompts import PromptOps
from deepspeed_hybrid.segments.shared_chain import HalfEnd, attention_sizes, end_obstacle, shared_gdn_obstacle
from deepspeed_hybrid.segments.weights import FusedLinear

# What the modules of a plain pre-norm layer hold besides modules. Anything else (a multiplier of the residual, a cap
# of the scores, ...) may change what their forward does.
LAYER_FACTS = {"hidden_size", "layer_type", "block_type", "attention_type", "layer_idx"}
ATTENTION_FACTS = {
    "config", "layer_idx", "layer_type", "head_dim", "num_key_value_groups", "scaling", "attention_dropout",
    "is_causal", "sliding_window", "hidden_size", "num_heads", "num_key_value_heads", "rope_theta",
}  # fmt: skip


# Of all rows, from where on it is faster to read states, write them at every 15th token, and keep tokens until then.
# On an H200 a layer of 32 heads of [128, 128] takes 9.1 us so and 10.6 in gdn_decode at 8 rows, 14.2 and 21.0 at 16,
# 46.8 and 77 at 64, 171 and 334 at 256; by Triton's kernels 21.2 at 16, 28.9 and 30.9 at 24, 59 at 64, 213 at 256.
MANY_HEADS = 8 * 32
MANY_HEADS_OF_TRITON = 24 * 32
# The same for steps of several tokens, with what is left to commit: in blocks of 4 17.9 from 26.9 us at 8 rows, 30.7
# from 49.1 at 16, 108 from 178 at 64; in blocks of 8 20.1 from 32.6, 37.8 from 60.8 and 133 from 225; of 16 71.7 from
# 84 at 16 rows.
MANY_HEADS_OF_BLOCKS = 8 * 32


@dataclass(frozen=True)
class DecodeOps:
    """The ops of a decode step, or their references, by the names of deepspeed_hybrid.ops."""

    normed_rows: Callable
    normed_linear: Callable
    residual_linear: Callable
    shared_sum: SharedSum
    gdn: Callable
    gdn_heads: Callable
    gdn_block: Callable
    gdn_commit: Callable
    attention: Callable
    attention_block: Callable
    embedded_rows: Callable
    rotary_tables: Callable
    gdn_deferred: Callable | None = None  # for steps of many rows; None: ``gdn`` does any
    gdn_kept_block: Callable | None = None  # for those of one token or several; None: ``gdn`` and ``gdn_block`` do
    gdn_windows: Callable | None = None  # goes with it


def decoder_layer_obstacle(layer: nn.Module, segments: list[Segment]) -> str | None:
    """Why a decoder layer's decode step cannot be one chain of ops, or None.

    Args:
        segments: those of the layer.
    """
    for segment in segments:
        if segment.reason is not None:
            return f"{segment.kind}: {segment.reason}"
    kinds = sorted(segment.kind for segment in segments)
    if kinds not in ([GDN, GLU], [ATTENTION, GLU]):
        return "it is not one mixer and one gated MLP"
    mixer = next(segment for segment in segments if segment.kind != GLU)
    mlp = next(segment for segment in segments if segment.kind == GLU)
    children = dict(layer.named_children())
    expected = {"input_layernorm", "post_attention_layernorm", "mlp"}
    if set(children) - expected != {name for name, child in children.items() if child is mixer.module}:
        return f"its modules are {', '.join(children)}"
    if children.get("mlp") is not mlp.module or expected - set(children):
        return f"its modules are {', '.join(children)}"
    unknown = _unknown(layer, LAYER_FACTS)
    if unknown:
        return f"it has {unknown}"
    if not has_known_forward(layer, LAYER):
        return f"the forward of {type(layer).__name__} is not one of those that a chain can stand in for"
    for path, module in layer.named_modules():
        if "forward" in module.__dict__ or hooks_of(module):
            return f"{path or 'it'} has a forward or hooks of its own"
    for name in ("input_layernorm", "post_attention_layernorm"):
        if as_rms_norm(children[name]) is None:
            return f"{name} is not an RMSNorm"
    obstacle = end_obstacle("down_proj", children["mlp"].down_proj) or _mixer_obstacle(mixer)
    if obstacle:
        return obstacle
    if len({parameter.dtype for name, parameter in layer.named_parameters() if "linear_attn." not in name}) != 1:
        return "its parameters differ in dtype"
    return None


def _unknown(module: nn.Module, known: set[str]) -> str:
    """Names of what a module holds besides modules and ``known``: a parameter of its own, too, has some use."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return ", ".join(sorted((facts(module) | {name for name, _ in own}) - known))


def _mixer_obstacle(mixer: Segment) -> str | None:
    module = mixer.module
    if mixer.kind == GDN:
        if len(mixer.names) != 4:
            return "the columns of its input projections are interleaved by head"
        if module.activation not in ("silu", "swish"):
            return f"the activation of its conv is {module.activation}"
        if not is_silu_gated_norm(module.norm):
            return f"{type(module.norm).__name__} is not known as an RMSNorm gated by SiLU, or somebody has changed it"
        if module.conv_kernel_size > MAX_CONV_KERNEL:
            return f"its conv reaches {module.conv_kernel_size} tokens, more than {MAX_CONV_KERNEL}"
        dtypes = {module.in_proj_qkv.weight.dtype, module.out_proj.weight.dtype}
        return shared_gdn_obstacle(module) or ("its products differ in dtype" if len(dtypes) > 1 else None)
    unknown = _unknown(module, ATTENTION_FACTS)
    if unknown:
        return f"attention has {unknown}"
    if not has_known_forward(module, ATTENTION_CORE):
        return f"the forward of {type(module).__name__} is not one of those that a chain can stand in for"
    if getattr(module, "sliding_window", None) is not None:
        return "attention has a sliding window"
    if module.head_dim > MAX_HEAD_DIM:
        return f"its heads have {module.head_dim} dimensions, more than {MAX_HEAD_DIM}"
    if not own_attention(module.config._attn_implementation):
        return f"attention {module.config._attn_implementation!r} was registered by somebody else"
    children = set(dict(module.named_children()))
    if children not in (
        {"q_proj", "k_proj", "v_proj", "o_proj"},
        {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"},
    ):
        return f"the modules of attention are {', '.join(sorted(children))}"
    if "q_norm" in children:
        queries, keys = as_rms_norm(module.q_norm), as_rms_norm(module.k_norm)
        if queries is None or keys is None or {queries.size, keys.size} != {module.head_dim}:
            return "q_norm and k_norm are not RMSNorms of a head"
        if (queries.offset, queries.eps) != (keys.offset, keys.eps):
            return "q_norm and k_norm differ"
    obstacle = end_obstacle("o_proj", module.o_proj)
    if obstacle:
        return obstacle
    queried, of_keys, read = attention_sizes(module)
    if queried not in (read, 2 * read):
        return "q_proj is neither queries nor queries and gates"
    return "query heads do not divide by key heads" if not of_keys or read % of_keys else None


class PreparedNorm:
    """What the last layer has prepared of a norm: good for the hidden state it was made from, and for nothing else."""

    def __init__(self) -> None:
        self._hidden: torch.Tensor | None = None
        self._weight: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, torch.Tensor] | None = None
        self._version: int | None = None

    def put(self, hidden: torch.Tensor, norm: Norm, scaled: torch.Tensor, squares: torch.Tensor) -> None:
        self._hidden, self._weight, self._parts = hidden, norm.weight, (scaled, squares)
        self._version = _version_of(hidden)

    def forget(self) -> None:
        """Where the last norm is no chain's, nobody has taken what the last layer prepared."""
        self._hidden = self._weight = self._parts = None

    def take(self, hidden: torch.Tensor, norm: Norm, ops: DecodeOps) -> tuple[torch.Tensor, torch.Tensor]:
        """scaled and squares of ``norm`` for ``hidden`` [M, K]; made here where nobody has."""
        known, parts = self._hidden, self._parts
        self._hidden = self._parts = None
        same = known is not None and known.data_ptr() == hidden.data_ptr() and known.shape == hidden.shape
        same = same and _version_of(hidden) == self._version  # somebody may have written into it
        if parts is not None and same and self._weight is norm.weight:
            return parts
        return ops.normed_rows(hidden, norm.weight, norm.offset, norm.eps)


def _version_of(hidden: torch.Tensor) -> int | None:
    """How often it was written to; None in inference mode, which does not count."""
    return None if hidden.is_inference() else hidden._version


def decoder_layer_binding(
    layer: nn.Module,
    segments: list[Segment],
    fused: dict[str, FusedLinear],
    ops: DecodeOps,
    input_norm: Norm,
    next_norm: Norm,
    prepared: PreparedNorm,
    prompt: PromptOps,
    ends: bool = False,
) -> Binding:
    """Our forward for a layer without an obstacle.

    Args:
        fused: has the weights of the layer's segments.
        input_norm, next_norm: this layer's first norm, and the one that its result meets.
        prepared: shared by all layers of the model.
        prompt: the ops of prompts.
        ends: behind the layer there are a last norm and a head of which a chain has taken the place.
    """
    mixer = next(segment for segment in segments if segment.kind != GLU)
    mlp = next(segment for segment in segments if segment.kind == GLU)
    inputs = fused[mixer.path]
    if mixer.kind == GDN:
        runs = inputs if isinstance(inputs, HeadParallelGdn) else mixer.module  # some of its heads, or all of them
        decode = partial(gdn_decode_step, runs, ops)
        output = runs if runs is inputs else mixer.module.out_proj
    else:
        decode = partial(attention_decode_step, mixer.module, ops, head_norms(mixer.module))
        output = mixer.module.o_proj
    halves = (
        HalfEnd(output),
        rms_norm(layer.post_attention_layernorm),
        fused[mlp.path],
        HalfEnd(mlp.module.down_proj),
        next_norm,
    )
    chain = prompt_chain(prompt, mixer.module, prepared.take, prepared.put, input_norm, *halves)
    ahead = layer, ops, prepared, mixer.module, chain, ends, decode
    forward = partial(layer_forward, *ahead, input_norm, inputs, *halves)
    return Binding(layer, forward, prepared.forget)


def layer_forward(
    layer: nn.Module,
    ops: DecodeOps,
    prepared: PreparedNorm,
    mixer: nn.Module,
    prompt: Callable | None,
    ends: bool,
    decode: Callable,
    input_norm: Norm,
    inputs: FusedLinear,
    output: HalfEnd,
    mlp_norm: Norm,
    gate_up: FusedLinear,
    down: HalfEnd,
    next_norm: Norm,
    hidden_states: torch.Tensor,
    *args,
    **kwargs,
) -> torch.Tensor:
    """[B, T, D] -> [B, T, D]: our chain for a decode step of one token, that of prompts where there is one for so many
    rows, and else the layer's own forward."""
    cache = kwargs["cache"] if "cache" in kwargs else kwargs["past_key_values"]
    if cache.holder.plan.slots is not None or hidden_states.shape[1] != 1:
        if prompt is None or args or not runs_as_chain(mixer, hidden_states):
            return type(layer).forward(layer, hidden_states, *args, **kwargs)
        last_column = ends and cache.holder.plan.last_column
        if last_column and (layer._forward_hooks or global_hooks()):  # a draft, say, wants to see all tokens
            last_column = False
        return prompt(hidden_states, last_column=last_column, **kwargs)
    hidden = hidden_states[:, 0]
    scaled, squares = prepared.take(hidden, input_norm, ops)
    projected = ops.normed_linear(scaled, squares, input_norm.eps, inputs.weight, inputs.bias, False)
    core = decode(projected, cache, kwargs["position_embeddings"])
    hidden, scaled, squares = output(ops, core, hidden, mlp_norm)
    gated = ops.normed_linear(scaled, squares, mlp_norm.eps, gate_up.weight, None, True)
    hidden, scaled, squares = down(ops, gated, hidden, next_norm)
    prepared.put(hidden, next_norm, scaled, squares)
    return hidden[:, None]


def gdn_decode_step(
    module: nn.Module | HeadParallelGdn, ops: DecodeOps, projected: torch.Tensor, cache, _
) -> torch.Tensor:
    """Between the two products of a GatedDeltaNet layer: [B, N] -> [B, HV * DV]."""
    slots, plan = cache.layers[module.layer_idx], cache.holder.plan
    slots.ensure(
        projected.narrow(1, 0, 2 * module.key_dim + module.value_dim),
        module.conv_kernel_size,
        (module.num_v_heads, module.head_k_dim, module.head_v_dim),
        module.num_k_heads,
    )
    norm, heads = module.norm, module.num_k_heads
    conv = slots.window, module.conv1d.weight[:, 0], module.conv1d.bias, module.A_log, module.dt_bias
    last = norm.weight, getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    block, late = plan.block, slots.deferral if cache.holder.deferring else None
    if late is not None:
        counts = cache.holder.once("counts", lambda: plan.parked ^ 1) if block is None else block.counts
        kept, places, slots.lagging = (slots.state, *slots.deferred), (plan.before, plan.answered), True
        if not late.blocks and ops.gdn_deferred is not None:
            return ops.gdn_deferred(projected, *conv, *kept, *last, *places, counts, heads)
        if late.blocks and ops.gdn_kept_block is not None and ops.gdn_windows is not None:
            if block is not None:
                block.leave(ops.gdn_windows, (projected, slots.window))
            return ops.gdn_kept_block(projected, *conv, *kept, *last, *places, plan.stepped, counts, heads)
    if block is None:
        return ops.gdn(projected, *conv, slots.state, *last, plan.before, plan.parked, heads)
    heads_of = projected, *conv, block.positions[0], block.counts, heads, module.head_k_dim
    tokens = projected, *ops.gdn_heads(*heads_of)
    block.leave(ops.gdn_commit, (*tokens, slots.window, slots.state), heads)
    return ops.gdn_block(*tokens, slots.state, *last, block.counts, heads)


def head_norms(module: nn.Module) -> tuple[Norm | None, Norm | None]:
    """Of queries and keys."""
    if not hasattr(module, "q_norm"):
        return None, None
    return rms_norm(module.q_norm), rms_norm(module.k_norm)


def attention_decode_step(
    module: nn.Module,
    ops: DecodeOps,
    norms: tuple[Norm | None, Norm | None],
    projected: torch.Tensor,
    cache,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Between the two products of an attention layer: [B, N] -> [B, heads * head_dim]."""
    slots, plan = cache.layers[module.layer_idx], cache.holder.plan
    queries, keys, outputs = attention_sizes(module)
    if not slots.is_initialized:
        like = projected.new_empty(0, keys // module.head_dim, 0, module.head_dim)
        slots.lazy_initialization(like, like)
    cos, sin = (table.expand(projected.shape[0], -1, -1)[:, 0] for table in position_embeddings)
    query_norm, key_norm = norms

    settings = (
        None if query_norm is None else query_norm.weight,
        None if key_norm is None else key_norm.weight,
        0.0 if query_norm is None else query_norm.offset,
        0.0 if query_norm is None else query_norm.eps,
        outputs // module.head_dim,
        queries != outputs,
        module.scaling,
    )
    inputs, block = (projected, cos, sin, slots.keys, slots.values), plan.block
    if block is None:
        return ops.attention(*inputs, plan.before, plan.parked, *settings)
    return ops.attention_block(*inputs, block.positions.flatten(), block.idle.flatten(), *settings, plan.lanes)


def head_obstacle(model: nn.Module, decoder: nn.Module, head: nn.Module) -> str | None:
    """Why the last norm, which then moves behind all that lies between it and the head, cannot be in the head's
    product; None where it can."""
    norm = getattr(decoder, "norm", None)
    if norm is None or as_rms_norm(norm) is None:
        return "the last norm is not an RMSNorm"
    if len({norm.weight.dtype, head.weight.dtype, decoder.embed_tokens.weight.dtype}) != 1:
        return "embedding, last norm and head differ in dtype"
    for module, kind in ((decoder, DECODER), (model, CAUSAL_MODEL)):
        if not has_known_forward(module, kind):
            return f"the forward of {type(module).__name__} is not one of those whose head a chain can stand in for"
    for module in model.modules():
        between = module is not model and any(part is decoder for part in module.modules())
        if "forward" in module.__dict__ and (between or module is model) or between and hooks_of(module):
            return f"{type(module).__name__}, between the last norm and the head, has a forward or hooks of its own"
    uses = [child for module in model.modules() for child in module._modules.values()]
    if any(sum(child is part for child in uses) != 1 for part in (norm, head)):
        return "the last norm or the head has another use"
    return output_obstacle("the head", head)


def head_bindings(
    norm: nn.Module, head: nn.Linear, last_norm: Norm, ops: DecodeOps, prepared: PreparedNorm
) -> list[Binding]:
    """The norm moves into the head's product, where a prefill also has it of one position alone."""

    def head_forward(hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        scaled, squares = prepared.take(rows, last_norm, ops)
        logits = ops.normed_linear(scaled, squares, last_norm.eps, head.weight, head.bias, False)
        return logits.view(*hidden_states.shape[:-1], -1)

    return [Binding(norm, lambda hidden_states: hidden_states), Binding(head, head_forward)]
