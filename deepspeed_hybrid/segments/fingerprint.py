# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whether anything about a model has changed that its plan or a captured step has baked in, in one quick walk.

Planning asks every module what it is, and takes tens of milliseconds on a model of some hundred modules; this takes
one or two, at every call, while the device has nothing to do: so a module is first compared by the identity of what
hangs on it, and by what that says only where some of it is another object.
"""

from collections.abc import Iterator

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

PLAIN_VALUES = frozenset((bool, int, float, str, bytes, type(None)))  # compared by value, others by identity


class _Telling(dict):
    """Whether an attribute of that name says something that the walk does not look at itself; asked once a name."""

    tables = frozenset(vars(nn.Module()))  # parameters, hooks and children: the walk compares what is in them

    def __missing__(self, name: str) -> bool:
        self[name] = name not in self.tables and not is_bookkeeping(name)
        return self[name]


TELLING = _Telling()


class SeenModule:
    """A module as it was. ``training``, and what a DeepSpeed engine counts on modules, does not take part."""

    __slots__ = ("alive", "hooks", "ids", "module", "names", "places", "told", "type")

    def __init__(self, module: nn.Module):
        self.module, self.type = module, type(module)
        self._remember(module.__dict__)
        self.told = _told(module.__dict__)
        self.places, self.hooks = _places(module), _hooks(module)

    def _remember(self, own: dict) -> None:
        # As long as the objects are kept no other object can get one of their ids.
        self.names, self.alive = tuple(own), [*own.values(), *own["_modules"].values()]
        self.ids = [*map(id, self.alive)]

    def is_same(self) -> bool:
        module = self.module
        own = module.__dict__
        if [*map(id, own.values()), *map(id, own["_modules"].values())] != self.ids or tuple(own) != self.names:
            if _told(own) != self.told:
                return False
            self._remember(own)
        return type(module) is self.type and _places(module) == self.places and _hooks(module) == self.hooks


def _told(own: dict) -> list:
    """What the attributes of a module say, and which modules are below it."""
    values = [value for name, value in own.items() if TELLING[name]]
    told = [value if type(value) in PLAIN_VALUES else id(value) for value in values]
    return told + [id(child) for child in own["_modules"].values()]


def _places(module: nn.Module) -> list:
    """Where weights and buffers lie and in which form, and which adapters take part."""
    own = module.__dict__
    places: list = []
    for table in (own["_parameters"], own["_buffers"]):
        if table:
            places.extend([None if one is None else address(one) for one in table.values()])
    if "merged_adapters" in own:
        places.append(adapter_state(module))
    return places


def _hooks(module: nn.Module) -> list:
    return [hook for hook in hooks_of(module) if not is_zero3_hook(hook)]  # an engine's come and go


class SeenModel:
    """A model as it was when this was made. Weights that are written in place leave it the same."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.modules = [SeenModule(module) for module in _walk(model)]
        attentions = {type(one.module): one.module for one in self.modules if "q_proj" in one.module._modules}
        self.attentions = list(attentions.values())
        self.types = list({one.type for one in self.modules})
        self.shared = self._shared()

    def is_same(self) -> bool:
        return self._shared() == self.shared and all(one.is_same() for one in self.modules)

    def _shared(self) -> tuple:
        """What modules of one class have in common, and all modules."""
        forwards = [kind.forward for kind in self.types]
        helpers = [helpers_of(module) for module in self.attentions]
        return global_hooks(), attention_function(self.model), forwards, helpers


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
