# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whether anything about a model has changed that its plan or a captured step has baked in, in one quick walk.

Planning asks every module what it is, and takes tens of milliseconds on a model of some hundred modules; this takes a
few, at every call.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from deepspeed_hybrid.compat import adapter_state, attention_function, global_hooks, hooks_of, is_bookkeeping
from deepspeed_hybrid.segments.gathered import address
from deepspeed_hybrid.segments.known_forwards import helpers_of


class Fingerprint(NamedTuple):
    """What is compared. Weights that were written in place leave both as they are."""

    places: tuple  # where weights and buffers lie, in which form, and which adapters take part
    held: tuple  # the modules, their forwards and hooks, and what hangs on them


PLAIN_VALUES = (int, float, str, bytes, type(None))  # compared by value, everything else by identity


def fingerprint(model: nn.Module) -> Fingerprint:
    """Of a model as it is now; ``training``, and what a DeepSpeed engine counts on modules, does not take part."""
    places: list = []
    held: list = [global_hooks(), attention_function(model)]
    for module in _walk(model):
        for table in (module._parameters, module._buffers):
            places.extend([None if one is None else address(one) for one in table.values()])
        places.append(adapter_state(module))
        held.append((module, type(module), type(module).forward, hooks_of(module)))
        if "q_proj" in module._modules:
            held.append(helpers_of(module))
        held.extend(
            [
                value if isinstance(value, PLAIN_VALUES) else id(value)
                for name, value in module.__dict__.items()
                if not is_bookkeeping(name)
            ]
        )
    return Fingerprint(tuple(places), tuple(held))


def _walk(model: nn.Module) -> Iterator[nn.Module]:
    """Every module once, in a fixed order. ``modules()`` would make a generator for each level."""
    seen, stack = set(), [model]
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            stack.extend(child for child in module._modules.values() if child is not None)
