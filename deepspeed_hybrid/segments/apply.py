# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Bind forwards, parameters and hooks on module instances while generating, and take every one of them back."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Binding:
    """``forward`` replaces that of ``module``, of this instance alone.

    ``forget`` is called behind it, to drop what a forward has kept for another that never came: after an error that
    may be the activations of a whole prompt.
    """

    module: nn.Module
    forward: Callable
    forget: Callable[[], None] | None = None


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
        surely(lambda: _take_back(originals))
        for forget in {binding.forget for binding in bindings if binding.forget is not None}:
            forget()


def surely(undo: Callable[[], None]) -> None:
    """Run an ``undo`` that does no harm twice; once more where an interrupt strikes in the midst of it."""
    try:
        undo()
    except BaseException:
        undo()
        raise


def _take_back(originals: list[tuple[nn.Module, Callable | None]]) -> None:
    for module, original in reversed(originals):
        if original is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = original


class ModuleTables:
    """The tables in which modules keep parameters and hooks, exchanged for plain ones.

    Args:
        model: all of its modules.
        dropped: says of a forward hook that it is not to run meanwhile.
    """

    HOOKS = ("_forward_hooks", "_forward_pre_hooks")

    def __init__(self, model: nn.Module, dropped: Callable[[Callable], bool]):
        self.model, self.dropped = model, dropped
        self._originals: list[tuple[nn.Module, str, dict]] = []

    @contextmanager
    def exchanged(self, stand_in: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:
        """Inside, each module has ``stand_in(parameter)`` for its parameters; on exit, the very tables it had."""
        self._take_back()  # what is left where an interrupt struck while they were being taken back
        try:
            for module in self.model.modules():
                for name, table in self._tables(module, stand_in).items():
                    self._originals.append((module, name, module.__dict__[name]))
                    module.__dict__[name] = table
            yield
        finally:
            surely(self._take_back)

    def _tables(self, module: nn.Module, stand_in: Callable) -> dict[str, dict]:
        own = module.__dict__["_parameters"].items()
        tables = {"_parameters": {name: None if one is None else stand_in(one) for name, one in own}} if own else {}
        for name in self.HOOKS:
            hooks = module.__dict__[name].items()
            if hooks:  # an ordered table, since handles to hooks refer to theirs weakly
                tables[name] = OrderedDict((key, hook) for key, hook in hooks if not self.dropped(hook))
        return tables

    def _take_back(self) -> None:
        while self._originals:
            module, name, table = self._originals[-1]
            module.__dict__[name] = table
            self._originals.pop()
