# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A GatedDeltaNet layer over slots: the model's projections, our state handling, the scan of :class:`GdnKernels`.

Parked lanes are multiplied by one and added zero (g = 0, beta = 0), so that their state keeps its bits without a
second pass over it. Beta and g are fp32 on every path.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from deepspeed_hybrid.autotp import is_column_shard
from deepspeed_hybrid.compat import GdnKernels, gdn_kernels, text_model
from deepspeed_hybrid.hung_on import hooks_of
from deepspeed_hybrid.ops.gdn_chunks import obstacle
from deepspeed_hybrid.ops.gdn_decode import MAX_CONV_KERNEL
from deepspeed_hybrid.segments.apply import Binding
from deepspeed_hybrid.segments.head_parallel import HeadParallelGdn
from deepspeed_hybrid.segments.known_forwards import GATED_DELTA_NET, has_known_forward, is_silu_gated_norm
from deepspeed_hybrid.segments.prompts import PromptOps
from deepspeed_hybrid.segments.weights import FusedLinear

# Shapes: B rows, T tokens, D hidden, C conv channels, K conv kernel, HK/HV key/value heads, DK/DV their dims.


def gdn_binding(module: nn.Module, fused: FusedLinear | None, gates: Callable, prompt: PromptOps) -> Binding:
    """Our forward for one GatedDeltaNet layer.

    Args:
        module: the layer.
        fused: its input projections as one product, or None to call them one by one.
        gates: the ``gdn_gates`` op, or its reference.
        prompt: the ops of prompts; those that do what the layer does take the place of its own code.
    """
    plain_conv = module.activation in ("silu", "swish") and module.conv_kernel_size <= MAX_CONV_KERNEL
    conv = prompt.gdn_conv if plain_conv else None
    chunks = prompt.gdn_chunks if conv is not None and _in_chunks(module) else None
    norm = prompt.gated_norm if is_silu_gated_norm(module.norm) else None
    runs = fused if isinstance(fused, HeadParallelGdn) else module  # some of its heads, or all of them
    fills = fills_padding(module)
    return Binding(module, partial(gdn_forward, runs, gdn_kernels(module), fused, gates, conv, chunks, norm, fills))


def _in_chunks(module: nn.Module) -> bool:
    """Whether gdn_chunks takes a layer; on a CPU it takes any."""
    weight = module.out_proj.weight
    return weight.device.type == "cpu" or obstacle(weight.dtype, module.head_k_dim, module.head_v_dim) is None


def fills_padding(module: nn.Module) -> bool:
    """Whether what goes into the scan may be something where the layer's input is zero: by a bias, or by what an
    adapter or a hook adds. No known model has a bias here."""

    def keeps_zeros(projection: nn.Module) -> bool:
        plain = type(projection) is nn.Linear or is_column_shard(projection)
        return plain and projection.bias is None and not hooks_of(projection) and "forward" not in projection.__dict__

    inputs = module.in_proj_qkv if hasattr(module, "in_proj_qkv") else module.in_proj_qkvz
    return module.conv1d.bias is not None or not keeps_zeros(inputs)


def is_gdn(module: nn.Module) -> bool:
    """By what it has: a short conv, decay parameters, and projections of one of the two layouts."""
    has_core = all(hasattr(module, name) for name in ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "head_v_dim"))
    return has_core and (hasattr(module, "in_proj_qkv") or hasattr(module, "in_proj_qkvz"))


def check_scans(model: nn.Module) -> None:
    """A GatedDeltaNet layer always runs our forward, since its state is in slots.

    Raises:
        ValueError: one has a forward that ours does not stand in for.
    """
    for index, layer in enumerate(text_model(model).layers):
        for module in filter(is_gdn, layer.modules()):
            if "forward" in module.__dict__ or not has_known_forward(module, GATED_DELTA_NET):
                raise ValueError(
                    f"layer {index} is not supported: the forward of {type(module).__name__} is not a GatedDeltaNet "
                    "layer's of Qwen3.5 or Qwen3-Next"
                )


def gdn_forward(
    module: nn.Module,
    kernels: GdnKernels,
    fused: FusedLinear | None,
    gates: Callable,
    conv: Callable | None,
    chunks: Callable | None,
    norm: Callable | None,
    fills: bool,
    hidden_states: torch.Tensor,
    cache=None,
    attention_mask=None,
    cache_params=None,
    past_key_values=None,
    output: Callable | None = None,
    **kwargs,
) -> torch.Tensor:
    """[B, T, D] -> [B, T, D], carrying the slots' conv window and recurrent state over the planned tokens; or what
    ``output`` returns in place of the output projection."""
    slot_cache = next(c for c in (cache, cache_params, past_key_values) if c is not None)
    layer, holder = slot_cache.layers[module.layer_idx], slot_cache.holder
    plan, dtype = holder.plan, hidden_states.dtype
    if plan.token_mask is not None:
        real = holder.once(("real", dtype), lambda: plan.token_mask[:, :, None].to(dtype))
        hidden_states = hidden_states * real

    qkv, z, b, a = project(module, fused, hidden_states)
    masked = fills and plan.token_mask is not None
    if masked:
        qkv = qkv * real
    state_shape = module.num_v_heads, module.head_k_dim, module.head_v_dim
    layer.ensure(qkv, module.conv_kernel_size, state_shape, module.num_k_heads)
    decays = module.A_log, module.dt_bias
    chunks = chunks if plan.slots is not None and not masked else None
    if conv is None or plan.slots is None:
        query, key, value, window = convolve(module, qkv, layer.read_window(), plan.parked)
        layer.write_window(window)
    else:
        taps, places = (module.conv1d.weight[:, 0], module.conv1d.bias), (layer.window, plan.slots, plan.lengths())
        sizes = module.key_dim, module.value_dim, module.head_k_dim if chunks is not None else None
        query, key, value = conv(qkv, layer.read_window(), *taps, *places, *sizes)
    if chunks is not None:
        places = layer.state, plan.slots, plan.first
        core = chunks(query, key, value, b, a, *decays, *places, module.num_k_heads)
    else:
        beta, g = gates(b, a, *decays, plan.parked)
        if masked:
            beta = beta * real  # nothing of what the conv made of padding goes into the state
        state, recurrent = layer.read_state(), plan.slots is None
        core, state = scan(module, kernels, query, key, value, beta, g, state, recurrent)
        layer.write_state(state)

    batch, length, _ = hidden_states.shape
    if norm is None or plan.slots is None:
        core = module.norm(core.reshape(-1, module.head_v_dim), z.reshape(-1, module.head_v_dim))
        core = core.reshape(batch, length, -1)
    else:
        core = norm(core.contiguous(), z.flatten(2), module.norm.weight, module.norm.variance_epsilon)
    return (module.out_proj if output is None else output)(core)


def project(module: nn.Module, fused: FusedLinear | None, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """qkv [B, T, C], z [B, T, HV * DV], b and a [B, T, HV], from either layout of the input projections."""
    separate = hasattr(module, "in_proj_qkv")
    if fused is not None:
        parts = fused.parts(hidden_states)
    else:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a") if separate else ("in_proj_qkvz", "in_proj_ba")
        parts = tuple(getattr(module, name)(hidden_states) for name in names)
    if separate:
        return parts
    *qkv, z, b, a = module.fix_query_key_value_ordering(*parts)
    return torch.cat([part.flatten(2) for part in qkv], dim=-1), z, b, a


def convolve(
    module: nn.Module, qkv: torch.Tensor, window: torch.Tensor | None, parked: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Causal depthwise conv and activation over [B, T, C], as q, k and v; also the window [B, C, K] that the next
    tokens need.

    Where lanes can be parked (a decode step) the window's oldest column, which one token does not reach, is left out.
    With it a prefill has the widths, and so the bits, of transformers' own.
    """
    length, kernel = qkv.shape[1], module.conv_kernel_size
    if window is None:
        window = qkv.new_zeros(qkv.shape[0], qkv.shape[2], kernel)
    reached = window if parked is None else window[..., 1:]
    extended = torch.cat([reached, qkv.transpose(1, 2)], dim=-1)
    convolved = F.conv1d(extended, module.conv1d.weight, module.conv1d.bias, groups=extended.shape[1])
    mixed = ACT2FN[module.activation](convolved[..., -length:]).transpose(1, 2)
    return *mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1), extended[..., -kernel:]


def scan(
    module: nn.Module,
    kernels: GdnKernels,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor | None,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule: [B, T, HV, DV] and the state after it, [B, HV, DK, DV]."""
    batch, length, _ = query.shape
    query = query.reshape(batch, length, -1, module.head_k_dim)
    key = key.reshape(batch, length, -1, module.head_k_dim)
    value = value.reshape(batch, length, -1, module.head_v_dim)
    if not kernels.grouped and value.shape[2] != key.shape[2]:
        groups = value.shape[2] // key.shape[2]
        query, key = query.repeat_interleave(groups, dim=2), key.repeat_interleave(groups, dim=2)
    rule = kernels.recurrent if recurrent else kernels.chunk
    return rule(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
