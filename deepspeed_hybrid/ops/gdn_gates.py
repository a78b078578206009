# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The two gates of a GatedDeltaNet layer: how much of a token is written, and how much of the state decays."""

import torch

from deepspeed_hybrid.ops.inference import refuse_gradients
from deepspeed_hybrid.ops.loader import load
from deepspeed_hybrid.ops.rounding import rounded


def gdn_gates_reference(
    b: torch.Tensor, a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, parked: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`gdn_gates` does, in plain torch on any device."""
    beta = rounded(b.float().sigmoid(), b.dtype)
    raw = a.float() + dt_bias.float()
    g = -A_log.float().exp() * torch.nn.functional.softplus(raw)
    if parked is not None:
        beta, g = (gate.masked_fill(parked[:, None, None], 0.0) for gate in (beta, g))
    return beta.contiguous(), g.contiguous()


@torch.library.custom_op("deepspeed_hybrid::gdn_gates", mutates_args=(), device_types="cuda")
def gdn_gates(
    b: torch.Tensor, a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, parked: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """beta = sigmoid(b) and the log-decay g = -exp(A_log) * softplus(a + dt_bias), both in fp32.

    beta holds what b's dtype can, as in transformers: from a bf16 b of 0.5 comes 0.62109375, not 0.62245935.

    On CUDA this is one launch for both; the first call builds it. On a CPU it is :func:`gdn_gates_reference`. There is
    no gradient.

    Args:
        b, a: [B, T, HV] fp32, bf16 or fp16, contiguous in the last dimension; columns of a wider tensor will do.
        A_log, dt_bias: [HV] of any float dtype.
        parked: [B] bool, rows whose gates are 0 whatever they hold (their state then keeps its bits); None for none.

    Returns:
        beta and g, both [B, T, HV] fp32, contiguous.
    """
    return load("gdn_gates").gdn_gates(b, a, A_log, dt_bias, parked)


@gdn_gates.register_fake
def _(
    b: torch.Tensor, a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, parked: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return b.new_empty(b.shape, dtype=torch.float32), b.new_empty(b.shape, dtype=torch.float32)


gdn_gates.register_kernel("cpu")(gdn_gates_reference)
refuse_gradients(gdn_gates, "gdn_gates")
