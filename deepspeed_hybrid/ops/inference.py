# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ops for generation have no gradient, and say so when they are called instead of in a later backward."""

import functools
from collections.abc import Callable

import torch
from torch.library import CustomOpDef


def refuse_gradients(op: CustomOpDef, name: str) -> None:
    """Make ``op`` raise where autograd would record it."""

    def refuse(*args, **kwargs):
        raise RuntimeError(_refusal(name))

    op.register_autograd(refuse, setup_context=refuse)


def refusing_gradients(name: str) -> Callable[[Callable], Callable]:
    """Decorate a function that calls an op which writes to its arguments: it raises where autograd would record it.

    torch takes no autograd formula for such an op, so :func:`refuse_gradients` does not help it; and its arguments
    must still be what they were when the call is refused.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def checked(*args, **kwargs):
            if torch.is_grad_enabled() and any(
                isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values())
            ):
                raise RuntimeError(_refusal(name))
            return function(*args, **kwargs)

        return checked

    return decorate


def _refusal(name: str) -> str:
    return (
        f"{name} is for inference and has no gradient, but an argument requires grad: "
        "call it under torch.no_grad(), or use its torch reference to train"
    )
