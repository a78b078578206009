# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whether a module's forward is one that our forwards stand in for.

What a module has does not tell what it does with it: an attention may rotate pairs instead of halves, a layer may
scale its residual by a literal. So a forward is replaced only where its code is that of a family that the replacement
was written for, as the installed transformers has it, whatever the class is called.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

LAYER, ATTENTION_CORE, MLP, GATED_DELTA_NET = "DecoderLayer", "Attention", "MLP", "GatedDeltaNet"
# folder of transformers.models -> prefix of its classes
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_5": "Qwen3_5", "qwen3_next": "Qwen3Next"}
# Functions of the same file that such a forward calls and that decide what it computes.
HELPERS = {ATTENTION_CORE: ("apply_rotary_pos_emb", "rotate_half")}


def has_known_forward(module: nn.Module, kind: str) -> bool:
    """Whether the class's forward, with the helpers it calls, is that of a known family's class of this kind."""
    module_class: Any = type(module)
    return _signature(module_class, kind) in _known(kind)


@functools.cache
def _known(kind: str) -> set[tuple]:
    signatures = set()
    for folder, prefix in FAMILIES.items():
        name = f"transformers.models.{folder}.modeling_{folder}"
        if importlib.util.find_spec(name) is not None:
            reference = getattr(importlib.import_module(name), prefix + kind, None)
            if reference is not None:
                signatures.add(_signature(reference, kind))
    return signatures


@functools.cache
def _signature(module_class: Any, kind: str) -> tuple:
    forward = _plain(module_class.forward)
    helpers = (forward.__globals__.get(name) for name in HELPERS.get(kind, ()))
    return tuple(_content(_plain(one).__code__) for one in (forward, *helpers) if one is not None)


def _plain(function: Callable) -> Callable:
    """A function without the wrappers that transformers puts around it."""
    if isinstance(function, nn.Module):
        function = type(function).forward
    return inspect.unwrap(function)


def _content(code: CodeType) -> tuple:
    """What a function does, without where it stands and what its documentation says."""
    constants = tuple(
        _content(one) if isinstance(one, CodeType) else one
        for one in code.co_consts
        if not (isinstance(one, str) and "\n" in one)
    )
    return code.co_code, code.co_names, code.co_varnames, constants
