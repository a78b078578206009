# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whether a prompt's forward can be replayed without the host: known code alone, from the model down to its norms.

A decode step is one token after another through the same kernels. A prompt's forward may choose its experts, its mask
or its path by what the host reads of the prompt, and a hook may count tokens; so here unknown code is left alone.
"""

import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch import nn

from deepspeed_hybrid.autotp import stays_on_device
from deepspeed_hybrid.compat import own_attention, text_config, text_model
from deepspeed_hybrid.hung_on import global_hooks, hooks_of, is_zero3_hook
from deepspeed_hybrid.segments.known_forwards import (
    ATTENTION_CORE,
    CAUSAL_MODEL,
    DECODER,
    FAMILIES,
    GATED_DELTA_NET,
    GATED_NORM,
    LAYER,
    MLP,
    NORM,
    TRANSFORMERS_FOLDER,
    has_known_forward,
)

KINDS = (LAYER, ATTENTION_CORE, MLP, GATED_DELTA_NET, GATED_NORM, NORM, DECODER, CAUSAL_MODEL)
# Layers of these packages compute on the device; PEFT's choose their adapters by what fingerprints compare.
PLAIN_PACKAGES = ("torch.nn.", "transformers.activations", "peft.")
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # without a forward
WRAPPERS = (TRANSFORMERS_FOLDER, os.path.join(os.path.dirname(torch.__file__), ""))  # whose decorators compute nothing


def prompt_obstacle(model: nn.Module) -> str | None:
    """Why a prompt's forward through ``model`` is not captured, or None. An engine's hooks are for training."""
    if global_hooks():
        return "hooks run at the call of every module"
    attention = text_config(model)._attn_implementation
    if not own_attention(attention):
        return f"attention {attention!r} was registered by somebody else"
    for module in _taking_part(model):
        name = type(module).__name__
        if "forward" in module.__dict__ or not all(map(is_zero3_hook, hooks_of(module))):
            return f"{name} has a forward or hooks of its own"
        if not _is_plain(module) and not any(has_known_forward(module, kind) for kind in KINDS):
            return f"the forward of {name} is not known to run without the host"
    return None


def _taking_part(model: nn.Module) -> Iterator[nn.Module]:
    """The decoder with all below it, what lies between the model and it, and the head; no reader of images."""
    decoder, head = text_model(model), model.get_output_embeddings()
    for module in model.modules():
        if any(part is decoder for part in module.modules()):
            yield module
    for part in (decoder, head):
        yield from part.modules()


def _is_plain(module: nn.Module) -> bool:
    if isinstance(module, CONTAINERS):
        return True
    home = type(module).__module__
    if not _is_from(type(module).forward, home):
        return False  # somebody has exchanged it
    return home.startswith(PLAIN_PACKAGES) or _is_rotary(module, home) or stays_on_device(module)


def _is_from(forward: Callable, home: str) -> bool:
    """Whether a function's code is in the file of that module, which a wrapper may claim of itself but cannot be."""
    while hasattr(forward, "__wrapped__"):
        if not _file_of(forward).startswith(WRAPPERS):
            return False
        forward = forward.__wrapped__
    return _file_of(forward) == getattr(sys.modules.get(home), "__file__", None)


def _file_of(function: Callable) -> str:
    code = getattr(function, "__code__", None)
    return "" if code is None else code.co_filename


def _is_rotary(module: nn.Module, home: str) -> bool:
    """A family's own; which types of it read positions on the host, the model's call knows."""
    return hasattr(module, "inv_freq") and home in {f"transformers.models.{one}.modeling_{one}" for one in FAMILIES}
