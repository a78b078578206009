# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A GatedDeltaNet layer over slots: the model's projections, our state handling, the scan of :class:`GdnKernels`.

Parked lanes are multiplied by one and added zero (g = 0, beta = 0), so that their state keeps its bits without a
second pass over it. Beta and g are fp32 on every path.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from deepspeed_hybrid.compat import GdnKernels, gdn_kernels
from deepspeed_hybrid.segments.apply import Binding

# A raw gate whose sigmoid and softplus are zero in fp32; every float dtype holds it.
CLOSED = -1e4

# Shapes: B rows, T tokens, D hidden, C conv channels, K conv kernel, HK/HV key/value heads, DK/DV their dims.


def gdn_bindings(model: nn.Module) -> list[Binding]:
    """One binding for every GatedDeltaNet layer of ``model``."""
    bindings = []
    for module in model.modules():
        if is_gdn(module):
            bindings.append(Binding(module, partial(gdn_forward, module, gdn_kernels(module))))
    return bindings


def is_gdn(module: nn.Module) -> bool:
    """By what it has: a short conv, decay parameters, and projections of one of the two layouts."""
    has_core = all(hasattr(module, name) for name in ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "head_v_dim"))
    return has_core and (hasattr(module, "in_proj_qkv") or hasattr(module, "in_proj_qkvz"))


def gdn_forward(
    module: nn.Module,
    kernels: GdnKernels,
    hidden_states: torch.Tensor,
    cache=None,
    attention_mask=None,
    cache_params=None,
    past_key_values=None,
    **kwargs,
) -> torch.Tensor:
    """[B, T, D] -> [B, T, D], carrying the slots' conv window and recurrent state over the planned tokens."""
    slot_cache = next(c for c in (cache, cache_params, past_key_values) if c is not None)
    layer, plan = slot_cache.layers[module.layer_idx], slot_cache.holder.plan
    if plan.token_mask is not None:
        hidden_states = hidden_states * plan.token_mask[:, :, None].to(hidden_states.dtype)

    qkv, z, b, a = project(module, hidden_states)
    layer.ensure(qkv, module.conv_kernel_size, (module.num_v_heads, module.head_k_dim, module.head_v_dim))
    window, state = layer.read()
    qkv, window = convolve(module, qkv, window, plan.parked)
    core, state = scan(module, kernels, qkv, b, a, state, plan)
    layer.write(window, state)

    batch, length, _ = hidden_states.shape
    core = module.norm(core.reshape(-1, module.head_v_dim), z.reshape(-1, module.head_v_dim))
    return module.out_proj(core.reshape(batch, length, -1))


def project(module: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """qkv [B, T, C], z [B, T, HV * DV], b and a [B, T, HV], from either layout of the input projections."""
    if hasattr(module, "in_proj_qkv"):
        return (
            module.in_proj_qkv(hidden_states),
            module.in_proj_z(hidden_states),
            module.in_proj_b(hidden_states),
            module.in_proj_a(hidden_states),
        )
    *qkv, z, b, a = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
    )
    return torch.cat([part.flatten(2) for part in qkv], dim=-1), z, b, a


def convolve(
    module: nn.Module, qkv: torch.Tensor, window: torch.Tensor, parked: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise conv and activation over [B, T, C]; also the window [B, C, K] that the next tokens need.

    Where lanes can be parked (a decode step) the window is updated in place, and its oldest column, which one token
    does not reach, is left out. With it a prefill has the widths, and so the bits, of transformers' own.
    """
    length, kernel = qkv.shape[1], window.shape[-1]
    reached = window if parked is None else window[..., 1:]
    extended = torch.cat([reached, qkv.transpose(1, 2)], dim=-1)
    convolved = F.conv1d(extended, module.conv1d.weight, module.conv1d.bias, groups=extended.shape[1])
    latest = extended[..., -kernel:]
    if parked is not None:
        latest = torch.where(parked[:, None, None], window, latest, out=window)
    return ACT2FN[module.activation](convolved[..., -length:]).transpose(1, 2), latest


def gates(
    module: nn.Module, b: torch.Tensor, a: torch.Tensor, parked: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """beta and log-decay g, both [B, T, HV] fp32, and zero on parked lanes."""
    beta = b.float().sigmoid()
    g = -module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias.float())
    if parked is not None:
        beta, g = (gate.masked_fill(parked[:, None, None], 0.0) for gate in (beta, g))
    return beta, g


def scan(
    module: nn.Module,
    kernels: GdnKernels,
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    state: torch.Tensor,
    plan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule: [B, T, HV, DV] and the state after it, [B, HV, DK, DV]. ``plan`` is the cache's."""
    batch, length, _ = qkv.shape
    query, key, value = torch.split(qkv, [module.key_dim, module.key_dim, module.value_dim], dim=-1)
    query = query.reshape(batch, length, -1, module.head_k_dim)
    key = key.reshape(batch, length, -1, module.head_k_dim)
    value = value.reshape(batch, length, -1, module.head_v_dim)
    options = dict(initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    decoding = plan.slots is None
    if kernels.fused and decoding:
        beta, g = (raw.masked_fill(plan.parked[:, None, None], CLOSED) for raw in (b, a))
        return kernels.recurrent(
            query,
            key,
            value,
            g=g,
            beta=beta,
            A_log=module.A_log,
            dt_bias=module.dt_bias,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            **options,
        )
    beta, g = gates(module, b, a, plan.parked)
    if not kernels.fused and value.shape[2] != key.shape[2]:
        groups = value.shape[2] // key.shape[2]
        query, key = query.repeat_interleave(groups, dim=2), key.repeat_interleave(groups, dim=2)
    rule = kernels.recurrent if decoding else kernels.chunk
    return rule(query, key, value, g=g, beta=beta, **options)
