# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The gated MLP: one product for gate and up, one op for silu(gate) * up, and the model's own down projection."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from deepspeed_hybrid.segments.apply import Binding
from deepspeed_hybrid.segments.weights import FusedLinear


def glu_binding(module: nn.Module, fused: FusedLinear, silu_mul: Callable) -> Binding:
    return Binding(module, partial(glu_forward, module, fused, silu_mul))


def glu_forward(
    module: nn.Module, fused: FusedLinear, silu_mul: Callable, hidden_states: torch.Tensor
) -> torch.Tensor:
    """[..., D] -> [..., D]. ``down_proj`` may end in a collective; it is called as it is."""
    return module.down_proj(silu_mul(fused(hidden_states)))
