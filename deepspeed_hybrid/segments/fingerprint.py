# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whether anything about a model has changed that its plan or a captured step has baked in, in one quick walk.

Planning asks every module what it is, and takes tens of milliseconds on a model of some hundred modules; this takes a
few, at every call.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from deepspeed_hybrid.compat import (
    adapter_state,
    attention_function,
    global_hooks,
    hooks_of,
    is_bookkeeping,
    is_zero3_hook,
)
from deepspeed_hybrid.segments.gathered import address
from deepspeed_hybrid.segments.known_forwards import helpers_of


class Alive(tuple):
    """The objects whose ids are compared. As long as they are kept no other object can get such an id; the ids say all
    there is to say, so that any two of these are equal."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class Fingerprint(NamedTuple):
    """What is compared. Weights that were written in place leave both as they are."""

    places: tuple  # where weights and buffers lie, in which form, and which adapters take part
    held: tuple  # the modules, their forwards and hooks, and what hangs on them
    alive: Alive


PLAIN_VALUES = frozenset((bool, int, float, str, bytes, type(None)))  # compared by value, others by identity


class _Telling(dict):
    """Whether an attribute of that name says something that the walk does not look at itself; asked once a name."""

    tables = frozenset(vars(nn.Module()))  # parameters, hooks and children: the walk compares what is in them

    def __missing__(self, name: str) -> bool:
        self[name] = name not in self.tables and not is_bookkeeping(name)
        return self[name]


TELLING = _Telling()


def fingerprint(model: nn.Module) -> Fingerprint:
    """Of a model as it is now; ``training``, and what a DeepSpeed engine counts on modules, does not take part."""
    places: list = []
    held: list = [global_hooks(), attention_function(model)]
    alive: list = []
    for module in _walk(model):
        own = module.__dict__
        for table in (own["_parameters"], own["_buffers"]):
            if table:
                places.extend([None if one is None else address(one) for one in table.values()])
        places.append(adapter_state(module))
        hooks = tuple(hook for hook in hooks_of(module) if not is_zero3_hook(hook))  # an engine's come and go
        held.append((module, type(module), type(module).forward, hooks))
        if "q_proj" in own["_modules"]:
            held.append(helpers_of(module))
        values = [value for name, value in own.items() if TELLING[name]]
        held.extend([value if type(value) in PLAIN_VALUES else id(value) for value in values])
        alive.append(values)
    return Fingerprint(tuple(places), tuple(held), Alive(alive))


def _walk(model: nn.Module) -> Iterator[nn.Module]:
    """Every module once, in a fixed order. ``modules()`` would make a generator for each level."""
    seen, stack = set(), [model]
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            children = module.__dict__["_modules"]
            if children:
                stack.extend([child for child in children.values() if child is not None])
