# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Capture a step once, replay it for ever after. Nothing here knows of models or tokens."""

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_hybrid.generation.trace import OFF, Tracer

WARMUPS = 2
CAPTURE_ERROR_MODE = "thread_local"  # of cudaStreamBeginCapture


@contextmanager
def garbage_kept() -> Iterator[None]:
    """No cyclic garbage is collected: to free an old graph, or an event, would invalidate a capture under way."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def capturing(graph: torch.cuda.CUDAGraph, pool) -> AbstractContextManager[None]:
    """DeepSpeed's capture, in which this thread alone must not ask the device for what a graph cannot hold.

    Others of the process may: a data loader's that pins memory, and the one that watches over NCCL's operations.
    """
    context = get_accelerator().capture_to_graph(graph, pool=pool)
    if isinstance(context, torch.cuda.graph):
        context.capture_error_mode = CAPTURE_ERROR_MODE
    return context


class GraphRunner:
    """An LRU of captured graphs over static buffers.

    Args:
        max_graphs: how many to keep. The least recently used is dropped, and its memory returns to the shared pool.
        trace: is told of captures, as 'capture'.
    """

    def __init__(self, max_graphs: int, trace: Tracer = OFF):
        self.max_graphs, self.trace = max_graphs, trace
        self.captures = 0
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._pool = None
        self._warm_up_stream = None  # one for all: libraries keep a workspace for every stream they have seen

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    @property
    def keys(self) -> list[Hashable]:
        """Of the graphs there are, the least recently used first."""
        return list(self._graphs)

    def prepare(
        self,
        key: Hashable,
        step: Callable[[], None],
        harmless: Callable[[], AbstractContextManager],
        warmups: int = WARMUPS,
    ) -> Callable[[], None]:
        """A callable that replays ``step``; it is captured first if ``key`` is new.

        Args:
            key: must differ whenever the step would launch other kernels or touch other buffers.
            step: reads and writes static buffers only.
            harmless: a context in which running ``step`` changes no live state; the warm-ups run inside it.
            warmups: how often to run ``step`` before its capture; 0 where it has run already.
        """
        graph = self._graphs.get(key)
        if graph is None:
            with self.trace.span("capture"):
                graph = self._capture(step, harmless, warmups)
            self._graphs[key] = graph
            while len(self._graphs) > self.max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        accelerator = get_accelerator()
        return lambda: accelerator.replay_graph(graph)

    @property
    def pool_bytes(self) -> int:
        """What the graphs' private pool has reserved, as the allocator tells; 0 before the first capture."""
        if not isinstance(self._pool, tuple):
            return 0
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment.get("segment_pool_id", ())) == self._pool
        )

    def release(self) -> None:
        """Drop every graph and the pool."""
        self._graphs.clear()
        self._pool = None

    def _capture(
        self, step: Callable[[], None], harmless: Callable[[], AbstractContextManager], warmups: int
    ) -> torch.cuda.CUDAGraph:
        accelerator = get_accelerator()
        if warmups:
            stream = self._warm_up_stream = self._warm_up_stream or accelerator.Stream()
            stream.wait_stream(accelerator.current_stream())
            try:
                with accelerator.stream(stream), harmless():
                    for _ in range(warmups):
                        step()
            finally:  # also after an error: buffers that are given back then are still in use on that stream
                accelerator.current_stream().wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = accelerator.create_graph()
        with garbage_kept(), capturing(graph, self._pool):
            step()
        self.captures += 1
        return graph
