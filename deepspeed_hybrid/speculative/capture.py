# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The target's features: what leaves some of its decoder layers, side by side in the configured order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn


class FeatureCapture:
    """Forward hooks on decoder layers. A feature is the residual stream behind a layer, before any later norm.

    transformers' ``hidden_states`` has that of layer i at i + 1, but for the last layer, which it has behind the last
    norm; a hook has it before.

    Args:
        layer_ids: in the order of the columns, which need not be the order of the layers.
        consume: is called with each forward's features [B, T, layers * D] when the last of them is there.
    """

    def __init__(self, layer_ids: tuple[int, ...], consume: Callable[[torch.Tensor], None]):
        self.layer_ids, self.consume = layer_ids, consume
        self._last = max(layer_ids)
        self._buffer: torch.Tensor | None = None
        self._seen = 0

    @contextmanager
    def on(self, layers: nn.ModuleList) -> Iterator[None]:
        """Watch these decoder layers inside."""
        handles = []
        try:
            for column, index in enumerate(self.layer_ids):
                handles.append(layers[index].register_forward_hook(partial(self._take, column, index)))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._buffer, self._seen = None, 0

    def _take(self, column: int, index: int, module: nn.Module, inputs, output) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpointed layer, run once more by a backward pass
        hidden = (output[0] if isinstance(output, tuple) else output).detach()  # else the buffer keeps every graph
        width = hidden.shape[-1]
        shape = (*hidden.shape[:-1], width * len(self.layer_ids))
        if self._buffer is None or self._buffer.shape != shape or self._buffer.dtype != hidden.dtype:
            self._buffer, self._seen = hidden.new_empty(shape), 0
        self._buffer[..., column * width : (column + 1) * width] = hidden
        self._seen += 1
        if index == self._last:
            seen, self._seen = self._seen, 0
            if seen != len(self.layer_ids):
                raise RuntimeError(f"{seen} of {len(self.layer_ids)} features were seen in a forward")
            buffer, self._buffer = self._buffer, None  # a captured forward's memory is not to be written by others
            self.consume(buffer)
