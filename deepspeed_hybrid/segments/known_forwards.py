# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whether a module's forward is one that our forwards stand in for.

What a module has does not tell what it does with it: an attention may rotate pairs instead of halves, a layer may
scale its residual by a literal. So a forward is replaced only where its code is that of a family that the replacement
was written for, as the installed transformers has it, whatever the class is called.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils import _contextlib

from deepspeed_hybrid.hung_on import hooks_of

LAYER, ATTENTION_CORE, MLP, GATED_DELTA_NET = "DecoderLayer", "Attention", "MLP", "GatedDeltaNet"
GATED_NORM, NORM, ROTARY = "RMSNormGated", "RMSNorm", "RotaryEmbedding|TextRotaryEmbedding"
DECODER, CAUSAL_MODEL = "Model|TextModel", "ForCausalLM|ForConditionalGeneration"
# folder of transformers.models -> prefix of its classes
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_5": "Qwen3_5", "qwen3_next": "Qwen3Next"}
# Functions of the same file that such a forward calls and that decide what it computes.
HELPERS = {ATTENTION_CORE: ("apply_rotary_pos_emb", "rotate_half", "eager_attention_forward")}
TRANSFORMERS_FOLDER = os.path.join(os.path.dirname(transformers.__file__), "")
GRADIENT_MODES = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode)


class StrangeWrapper(Exception):
    """A function is wrapped by something that is neither transformers' own nor one of torch's gradient modes."""


def has_known_forward(module: nn.Module, kind: str) -> bool:
    """Whether the class's forward, with the helpers it calls, is that of a known family's class of this kind."""
    try:
        return _signature(type(module).forward, kind) in _known(kind)
    except StrangeWrapper:
        return False


@functools.cache
def _known(kind: str) -> set[tuple]:
    signatures = set()
    for folder, prefix in FAMILIES.items():
        name = f"transformers.models.{folder}.modeling_{folder}"
        if importlib.util.find_spec(name) is not None:
            file = importlib.import_module(name)
            for suffix in kind.split("|"):
                reference = getattr(file, prefix + suffix, None)
                # A class that somebody has patched is no reference for itself.
                with contextlib.suppress(StrangeWrapper):
                    if reference is not None and all(
                        one.__code__.co_filename == file.__file__ for one in _functions(reference.forward, kind)
                    ):
                        signatures.add(_signature(reference.forward, kind))
    return signatures


def helpers_of(module: nn.Module) -> tuple:
    """The functions beside an attention's forward that a chain stands in for; somebody may exchange them."""
    found = getattr(inspect.unwrap(type(module).forward), "__globals__", {})  # an object that is called has none
    return tuple(found.get(name) for name in HELPERS[ATTENTION_CORE])


def _signature(forward: Callable, kind: str) -> tuple:
    return tuple(_content(one.__code__) for one in _functions(forward, kind))


def _functions(forward: Callable, kind: str) -> list[Any]:
    """A forward and the helpers that it finds beside it, none of them wrapped."""
    plain = _plain(forward)
    helpers = (plain.__globals__.get(name) for name in HELPERS.get(kind, ()))
    return [plain, *(_plain(one) for one in helpers if one is not None)]


def _plain(function: Any) -> Any:
    """A function without the wrappers that transformers puts around it, and those of gradient modes.

    Raises:
        StrangeWrapper: somebody else's wrapper is among them, and may do anything.
    """
    if isinstance(function, nn.Module):
        function = type(function).forward
    while hasattr(function, "__wrapped__"):
        own = getattr(function, "__code__", _plain.__code__).co_filename.startswith(TRANSFORMERS_FOLDER)
        if not own and not sets_gradient_mode(function):
            raise StrangeWrapper
        function = function.__wrapped__
    if not hasattr(function, "__code__"):
        raise StrangeWrapper
    return function


def sets_gradient_mode(wrapper: Any) -> bool:
    """Whether a wrapper is that of torch.no_grad and the like. What makes it makes one of any context manager."""
    code = getattr(wrapper, "__code__", None)
    if code is None or code.co_filename != _contextlib.__file__:
        return False
    kept = [cell.cell_contents for cell in wrapper.__closure__ or ()]
    return any(type(getattr(one, "__self__", None)) in GRADIENT_MODES for one in kept)


def is_torchs_own(forward: Callable) -> bool:
    """Whether a forward is code of torch's, and not what somebody has put in its place."""
    code = getattr(forward, "__code__", None)
    return code is not None and code.co_filename.startswith(os.path.join(os.path.dirname(torch.__file__), ""))


def is_silu_gated_norm(module: nn.Module) -> bool:
    """Whether ours stand in for a gated RMSNorm: a known one without hooks, whose gate goes through SiLU."""
    changed = "forward" in module.__dict__ or hooks_of(module)
    activation = getattr(module, "activation", "silu")
    return not changed and activation in ("silu", "swish") and has_known_forward(module, GATED_NORM)


@functools.cache
def _content(code: CodeType) -> tuple:
    """What a function does, without where it stands and what its documentation says."""
    constants = tuple(
        _content(one) if isinstance(one, CodeType) else one
        for one in code.co_consts
        if not (isinstance(one, str) and "\n" in one)
    )
    return code.co_code, code.co_names, code.co_varnames, constants
