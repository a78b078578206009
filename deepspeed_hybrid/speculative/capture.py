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
        self._parts: dict[int, torch.Tensor] = {}  # by column

    @contextmanager
    def on(self, layers: nn.ModuleList) -> Iterator[None]:
        """Watch these decoder layers inside.

        Raises:
            RuntimeError: there are too few of them.
        """
        if self._last >= len(layers):
            raise RuntimeError(
                f"draft_model reads from layer {self._last}, and the model has {len(layers)} layers now"
            )
        handles = []
        try:
            for column, index in enumerate(self.layer_ids):
                handles.append(layers[index].register_forward_hook(partial(self._take, column, index)))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._parts = {}

    def _take(self, column: int, index: int, module: nn.Module, inputs, output) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpointed layer, run once more by a backward pass
        hidden = output[0] if isinstance(output, tuple) else output
        self._parts[column] = hidden.detach()  # else the features keep every graph
        if index == self._last:
            parts, self._parts = self._parts, {}
            if len(parts) != len(self.layer_ids):
                raise RuntimeError(f"{len(parts)} of {len(self.layer_ids)} features were seen in a forward")
            self.consume(torch.cat([parts[place] for place in range(len(parts))], dim=-1))
