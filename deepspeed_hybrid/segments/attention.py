# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Attention projections: one product for q, k and v, under whatever attention forward the model has."""

from functools import partial

import torch
from torch import nn

from deepspeed_hybrid.segments.apply import Binding
from deepspeed_hybrid.segments.weights import FusedLinear


def attention_bindings(projections: list[nn.Linear], fused: FusedLinear) -> list[Binding]:
    """The first projection called makes the product; the others take their columns of it."""
    product = SharedProduct(fused)
    forwards = [partial(product.part, index) for index in range(len(projections))]
    return [Binding(*pair, product.forget) for pair in zip(projections, forwards, strict=True)]


class SharedProduct:
    """One product for layers that are called one after another on the same tensor object."""

    def __init__(self, fused: FusedLinear):
        self.fused = fused
        self._inputs: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}

    def part(self, index: int, inputs: torch.Tensor) -> torch.Tensor:
        """Columns of layer ``index``, a view [..., outputs] of the product, handed out once and then forgotten."""
        if inputs is not self._inputs or index not in self._parts:
            self._inputs = inputs
            self._parts = dict(enumerate(self.fused.parts(inputs)))
        part = self._parts.pop(index)
        if not self._parts:
            self._inputs = None
        return part

    def forget(self) -> None:
        self._inputs, self._parts = None, {}
