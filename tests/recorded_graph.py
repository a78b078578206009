# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""CUDA graphs on a CPU: kernels are recorded with the very tensors they touch, and replayed on them.

What makes a CUDA graph treacherous is kept: nothing recorded takes effect before the first replay, host code runs once
only, addresses are frozen, and reading a value on the host while recording is an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed_hybrid import HybridEngineRollout
from deepspeed_hybrid.generation import graph
from deepspeed_hybrid.generation.graph import GraphRunner
from deepspeed_hybrid.generation.prompt_graphs import PromptGraphs

aten = torch.ops.aten
HOST_READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
}


class RecordedGraph:
    """The kernels of one capture."""

    def __init__(self):
        self.calls: list[tuple] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for function, args, kwargs, outputs in self.calls:
                fresh = function(*args, **kwargs)
                if outputs is not None and all(one.alias_info is None for one in function._schema.returns):
                    for target, source in zip(tree_leaves(outputs), tree_leaves(fresh), strict=True):
                        target.copy_(source)


class _Recording(TorchDispatchMode):
    def __init__(self, recorded: RecordedGraph):
        super().__init__()
        self.recorded = recorded
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in HOST_READS:
            raise RuntimeError(f"{function} reads device values on the host, which a capture does not permit")
        arguments = function._schema.arguments
        for argument, value in [
            *zip(arguments, args, strict=False),
            *((argument, kwargs.get(argument.name)) for argument in arguments),
        ]:
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                self.before.append((value, value.clone()))
        outputs = function(*args, **kwargs)
        self.recorded.calls.append((function, args, kwargs, outputs))
        return outputs

    def undo(self) -> None:
        for value, earlier in reversed(self.before):
            value.copy_(earlier)


class RecordingAccelerator:
    """As much of an accelerator as a graph runner asks for."""

    def __init__(self):
        self.graphs: list[RecordedGraph] = []

    def Stream(self):
        return self.current_stream()

    def current_stream(self):
        return type("Stream", (), {"wait_stream": lambda self, other: None})()

    def stream(self, stream):
        return nullcontext()

    def create_graph(self) -> RecordedGraph:
        self.graphs.append(RecordedGraph())
        return self.graphs[-1]

    @contextmanager
    def capture_to_graph(self, recorded: RecordedGraph, pool=None) -> Iterator[None]:
        recording = _Recording(recorded)
        try:
            with recording:
                yield
        finally:
            recording.undo()

    def replay_graph(self, recorded: RecordedGraph) -> None:
        recorded.replay()


@contextmanager
def recording_accelerator() -> Iterator[RecordingAccelerator]:
    """Graph runners record and replay inside."""
    accelerator = RecordingAccelerator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "get_accelerator", lambda: accelerator)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: object())
        yield accelerator


def capture_steps(rollout: HybridEngineRollout, max_graphs: int = 8) -> GraphRunner:
    """Have a CPU rollout capture and replay its steps; use within :func:`recording_accelerator`."""
    rollout._graphs = rollout._arena.graphs = GraphRunner(max_graphs, rollout._figures.trace)
    return rollout._graphs


def capture_prompts(rollout: HybridEngineRollout, max_graphs: int = 8) -> PromptGraphs:
    """Have a CPU rollout pad, capture and replay its prompt forwards, as on a GPU."""
    arena = rollout._arena
    arena.prompts = PromptGraphs(
        rollout._paths.call, GraphRunner(max_graphs), lambda: rollout._injection.prompt_obstacle
    )
    return arena.prompts
