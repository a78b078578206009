# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whether anything about a model has changed that its plan or a captured step has baked in, in one quick walk.

Planning asks every module what it is, and takes tens of milliseconds on a model of some hundred modules; this takes
about one, at every call, while the device has nothing to do: so all is first compared by identity, and by what it says
only where some of it is another object.
"""

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, eq, is_, itemgetter

import torch
from torch import nn

from deepspeed_hybrid.compat import adapter_state, attention_function, text_config
from deepspeed_hybrid.hung_on import global_hooks, hooks_of, is_bookkeeping, is_zero3_hook
from deepspeed_hybrid.segments.gathered import address, is_partitioned
from deepspeed_hybrid.segments.known_forwards import helpers_of
from deepspeed_hybrid.segments.norm import NORM_METHODS

PLAIN_VALUES = frozenset((bool, int, float, str, bytes, type(None)))  # compared by value, others by identity


class _Telling(dict):
    """Whether an attribute of that name says something that the walk does not look at itself; asked once a name."""

    tables = frozenset(vars(nn.Module()))  # parameters, hooks and children: the walk compares what is in them

    def __missing__(self, name: str) -> bool:
        self[name] = name not in self.tables and not is_bookkeeping(name)
        return self[name]


TELLING = _Telling()


class SeenModule:
    """A module as it was. What is of training alone, and what a DeepSpeed engine counts on modules, takes no part."""

    def __init__(self, module: nn.Module):
        self.module, self.type, self.table = module, type(module), module.__dict__
        self.told, self.places, self.hooks = _told(module.__dict__), _places(module), _hooks(module)

    def is_same(self) -> bool:
        module = self.module
        return (
            type(module) is self.type
            and module.__dict__ is self.table  # into which generation writes modes and forwards
            and _told(module.__dict__) == self.told
            and _places(module) == self.places
            and _hooks(module) == self.hooks
        )


def _told(own: dict) -> list:
    """What the attributes of a module say, and which modules are below it."""
    names = [name for name in own if TELLING[name]]
    values = [own[name] for name in names]
    told = [value if type(value) in PLAIN_VALUES else id(value) for value in values]
    children = own["_modules"]
    return [names, told, [*children], [*map(id, children.values())]]


def _places(module: nn.Module) -> list:
    """Where weights and buffers lie and in which form, and which adapters take part."""
    own = module.__dict__
    places: list = []
    for table in (own["_parameters"], own["_buffers"]):
        if table:
            places.extend([(name, id(one), one is not None and address(one)) for name, one in table.items()])
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
        attentions = {one.type: one.module for one in self.modules if "q_proj" in one.module._modules}
        self.attentions = list(attentions.values())
        self.types = list({one.type for one in self.modules})
        self.shared = self._shared()
        self._remember()

    def is_same(self) -> bool:
        if self._shared() != self.shared:
            return False
        if self._is_untouched():
            return True
        same = all(one.is_same() for one in self.modules)
        if same and not self._partitioned:  # whose attributes an engine touches all the time
            self._remember()
        return same

    def _shared(self) -> tuple:
        """What modules of one class have in common, and all modules."""
        methods = [getattr(kind, name, None) for kind in self.types for name in NORM_METHODS]
        helpers = [helpers_of(module) for module in self.attentions]
        layers = getattr(text_config(self.model), "num_hidden_layers", None)  # how many of them a forward runs
        return global_hooks(), attention_function(self.model), layers, methods, helpers

    def _remember(self) -> None:
        """The very objects; being kept, none of them leaves its id to another."""
        self._owners = [one.module for one in self.modules]
        self._tables = [module.__dict__ for module in self._owners]
        self._names, self._held = [*map(list, self._tables)], [*_values(self._tables), END]
        inner = [*chain.from_iterable(map(INNER_TABLES, self._tables))]
        self._filled, self._empty = [table for table in inner if table], [table for table in inner if not table]
        self._inner_names, self._inner_held = [*map(list, self._filled)], [*_values(self._filled), END]
        tensors = (table[kind].values() for table in self._tables for kind in ("_parameters", "_buffers"))
        self._tensors = [one for one in chain.from_iterable(tensors) if one is not None]
        self._partitioned = any(map(is_partitioned, self._tensors))
        self._forms = _forms(self._tensors)
        self._adapted = [one for one in self.modules if "merged_adapters" in one.module.__dict__]

    def _is_untouched(self) -> bool:
        """Whether every attribute of every module is the same object, and weights lie where they lay.

        It runs no line of Python a module, for a call on a model that nobody has touched waits for this.
        """
        return (
            not self._partitioned
            and all(map(is_, map(TABLE, self._owners), self._tables))
            and all(map(is_, map(type, self._owners), map(TYPE, self.modules)))
            and all(map(eq, map(list, self._tables), self._names))
            and all(map(is_, chain(_values(self._tables), (END,)), self._held))
            # The tables below them are then those that were looked at, and most are empty.
            and not any(self._empty)
            and all(map(eq, map(list, self._filled), self._inner_names))
            and all(map(is_, chain(_values(self._filled), (END,)), self._inner_held))
            and _forms(self._tensors) == self._forms
            and all(_places(one.module) == one.places for one in self._adapted)
        )


END = object()  # tells a list that ends from one that goes on
TABLE, TYPE = attrgetter("__dict__"), attrgetter("type")
INNER_TABLES = itemgetter("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")


def _values(tables: list[dict]) -> Iterator[object]:
    return chain.from_iterable(map(dict.values, tables))


def _forms(tensors: list[torch.Tensor]) -> list:
    """What a tensor's ``data`` may be exchanged for while it stays the same object."""
    return [
        *map(torch.Tensor.data_ptr, tensors),
        *map(torch.Tensor.stride, tensors),
        *map(attrgetter("shape", "dtype"), tensors),
    ]


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
