# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Blocks of tokens for gdn_heads and the ops of gdn_block.py, and the same as decode steps one after another."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from gdn_decode_cases import Shape, arguments_of, tokens_of
from glue_cases import slice_of_poison


class BlockOps(NamedTuple):
    heads: Callable
    block: Callable
    commit: Callable

    def prepared(self, arguments: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The products, and what ``heads`` makes of them."""
        names = "window", "conv_weight", "conv_bias", "A_log", "dt_bias", "position", "counts", "key_heads"
        rounded = arguments.get("rounded_heads", False)
        key_dim = arguments["state"].shape[2]
        named = {name: arguments[name] for name in names}
        made = self.heads(arguments["projected"], **named, key_dim=key_dim, rounded_heads=rounded)
        return arguments["projected"], *made

    def verify(self, arguments: dict) -> torch.Tensor:
        """The outputs of all tokens, from arguments by the names of gdn_decode, and ``counts``."""
        named = {name: arguments[name] for name in ("state", "norm_weight", "eps", "counts", "key_heads")}
        return self.block(*self.prepared(arguments), **named)

    def take_over(self, arguments: dict) -> None:
        """Window and state behind the counted ones."""
        self.take_over_together([arguments])

    def take_over_together(self, layers: list[dict]) -> None:
        """The same of layers that have rows in common."""
        tensors = [(*self.prepared(layer), layer["window"], layer["state"]) for layer in layers]
        named = {name: layers[0][name] for name in ("position", "counts", "key_heads")}
        self.commit(*map(list, zip(*tensors, strict=True)), **named)


def block_of(shape: Shape, counts: list[int], tokens: int, seed: int = 0, **options) -> dict:
    """Keyword arguments of a block over as many rows as counts, in the middle of sequences, beside a free slot."""
    rows = len(counts)
    arguments = arguments_of(shape, rows, slots=rows + 1, seed=seed, **options)
    del arguments["parked"]
    projected = tokens_of(shape, rows, tokens, dtype=arguments["projected"].dtype, seed=seed + 1)
    projected = projected.transpose(0, 1).flatten(0, 1)
    arguments["projected"] = slice_of_poison(projected, projected.shape[1] + 5, 2)
    return arguments | {"counts": torch.tensor(counts, dtype=torch.int64)}


def step_by_step(decode: Callable, arguments: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, and window and state behind the counted tokens, of decode steps."""
    arguments = dict(arguments)
    counts, position, projected = (arguments.pop(name) for name in ("counts", "position", "projected"))
    window, state = (arguments.pop(name).clone() for name in ("window", "state"))
    out = []
    for index, rows in enumerate(projected.split(len(counts))):
        where = dict(projected=rows, position=position + index, parked=counts <= index)
        out.append(decode(**where, window=window, state=state, **arguments))
    return torch.cat(out), window, state
