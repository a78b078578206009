# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ops for generation have no gradient, and say so when they are called instead of in a later backward."""

import torch
from torch.library import CustomOpDef


def refuse_gradients(op: CustomOpDef, name: str) -> None:
    """Make ``op`` raise where autograd would record it."""

    def refuse(*args, **kwargs):
        raise _refusal(name)

    op.register_autograd(refuse, setup_context=refuse)


def refuse_recording(name: str, *tensors: torch.Tensor | None) -> None:
    """The same at the top of a function over an op that writes to its arguments, before anything is written.

    torch takes no autograd formula for such an op, so that :func:`refuse_gradients` does not help it.
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise _refusal(name)


def _refusal(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} is for inference and has no gradient, but an argument requires grad: "
        "call it under torch.no_grad(), or use its torch reference to train"
    )
