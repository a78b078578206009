# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Bind forwards on module instances while generating, and take every one of them back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Binding:
    """``forward`` replaces that of ``module``, of this instance alone."""

    module: nn.Module
    forward: Callable


def refuse_kernelized(model: nn.Module) -> None:
    """transformers re-binds forwards of kernelized models at every train()/eval(), over any of ours.

    Raises:
        ValueError: the model was loaded with use_kernels=True.
    """
    if getattr(model, "use_kernels", False):
        raise ValueError(
            "model has use_kernels=True; load it without, as transformers would replace the bound "
            "forwards whenever training mode changes"
        )


@contextmanager
def bound(bindings: list[Binding]) -> Iterator[None]:
    """Bind on entry; on exit each instance is exactly as it was, one that had a forward of its own included."""
    originals = []
    try:
        for binding in bindings:
            original = binding.module.__dict__.get("forward")
            # Our own is there only if an interrupt struck while it was being taken back.
            originals.append((binding.module, None if original is binding.forward else original))
            binding.module.__dict__["forward"] = binding.forward
        yield
    finally:
        for module, original in reversed(originals):
            if original is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = original
