# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A GatedDeltaNet layer of which each rank runs some heads: their conv channels, their state, their gated norm.

AutoTP cuts the layer's products by rows and gathers every one of them, so that each rank runs all heads. Here a rank
has the weights of its own heads, re-laid from the shards at every refresh, and one sum behind the output product is
all that goes between ranks.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import deepspeed
import torch
from torch import nn

from deepspeed_hybrid.autotp import gathers, is_column_shard, is_plain, shard_sizes
from deepspeed_hybrid.ops.collectives import everyones
from deepspeed_hybrid.segments.weights import PACKED, FusedLinear

INPUTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def head_parallel_obstacle(module: nn.Module) -> str | None:
    """Why the heads of a GatedDeltaNet layer, whose input projections are one segment, cannot be shared by the ranks;
    None where they can."""
    if not hasattr(module, "in_proj_qkv"):
        return "the columns of its input projections are interleaved by head"
    layers = [getattr(module, name) for name in (*INPUTS, "out_proj")]
    if not all(is_column_shard(layer) and gathers(layer) and is_plain(layer) for layer in layers):
        return "ranks do not share all of its projections"
    ranks = len(shard_sizes(module.out_proj))
    if module.num_k_heads % ranks or module.num_v_heads % ranks:
        return f"{module.num_k_heads} key and {module.num_v_heads} value heads do not divide by {ranks} ranks"
    if any(len(set(shard_sizes(layer))) > 1 for layer in layers):
        return "ranks have different numbers of its rows"
    if any(layer.bias is not None for layer in layers):
        return "its projections have a bias"
    return None


class HeadParallelGdn(FusedLinear):
    """One layer's share of this rank. It has what a layer has that runs these heads alone, and is the product of their
    qkv, z, b and a; its weights are copies, made by the first ``refresh()``.

    Args:
        module: a layer without an obstacle.
    """

    mode = PACKED

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, module: nn.Module):
        self.module = module
        self.group = module.out_proj.mp_group
        self.ranks = len(shard_sizes(module.out_proj))
        self.num_k_heads, self.num_v_heads = module.num_k_heads // self.ranks, module.num_v_heads // self.ranks
        self.head_k_dim, self.head_v_dim = module.head_k_dim, module.head_v_dim
        self.key_dim, self.value_dim = module.key_dim // self.ranks, module.value_dim // self.ranks
        self.conv_kernel_size, self.activation = module.conv_kernel_size, module.activation
        self.layer_idx, self.norm = module.layer_idx, module.norm
        self.in_proj_qkv = True  # the layout: one product of queries, keys and values, and others of z, b and a
        self.sizes = [2 * self.key_dim + self.value_dim, self.value_dim, self.num_v_heads, self.num_v_heads]
        like = module.out_proj.weight
        self._inputs = like.new_empty(sum(self.sizes), module.in_proj_qkv.weight.shape[1])
        self._output = like.new_empty(self.ranks * like.shape[0], self.value_dim)
        conv = module.conv1d
        self.conv1d = SimpleNamespace(
            weight=torch.empty_like(conv.weight[: self.sizes[0]], requires_grad=False),
            bias=None if conv.bias is None else torch.empty_like(conv.bias[: self.sizes[0]], requires_grad=False),
        )
        self.A_log = torch.empty_like(module.A_log[: self.num_v_heads], requires_grad=False)
        self.dt_bias = torch.empty_like(module.dt_bias[: self.num_v_heads], requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        return self._inputs

    @property
    def output(self) -> torch.Tensor:
        """[D, this rank's values], of the output product."""
        return self._output

    @property
    def bias(self) -> None:
        return None

    @property
    def packed_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._copies())

    def _copies(self) -> Iterator[torch.Tensor]:
        yield from (self._inputs, self._output, self.conv1d.weight, self.A_log, self.dt_bias)
        if self.conv1d.bias is not None:
            yield self.conv1d.bias

    def out_proj(self, core: torch.Tensor) -> torch.Tensor:
        """[..., this rank's values] -> [..., D], the same on every rank. A collective operation."""
        output = nn.functional.linear(core, self._output)
        deepspeed.comm.all_reduce(output, group=self.group)
        return output

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> int:
        """Follow the parameters; the bytes written. A collective operation."""
        module, rank = self.module, deepspeed.comm.get_rank(group=self.group)
        shards = [getattr(module, name).weight for name in INPUTS]
        rows = [len(shard) for shard in shards]
        every = everyones(torch.cat([shard.detach() for shard in shards]), self.group)
        qkv, z, b, a = (part.flatten(0, 1) for part in every.split(rows, dim=1))
        torch.cat([self._of_heads(qkv, rank), *(self._own(part, rank) for part in (z, b, a))], out=self._inputs)
        output = everyones(module.out_proj.weight.detach(), self.group).flatten(0, 1)
        self._output.copy_(output[:, rank * self.value_dim : (rank + 1) * self.value_dim])
        self.conv1d.weight.copy_(self._of_heads(module.conv1d.weight.detach(), rank))
        if self.conv1d.bias is not None:
            self.conv1d.bias.copy_(self._of_heads(module.conv1d.bias.detach(), rank))
        self.A_log.copy_(self._own(module.A_log.detach(), rank))
        self.dt_bias.copy_(self._own(module.dt_bias.detach(), rank))
        return self.packed_bytes

    def _own(self, rows: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's share of rows that are in the order of heads."""
        return rows.chunk(self.ranks)[rank]

    def _of_heads(self, channels: torch.Tensor, rank: int) -> torch.Tensor:
        """Of the rows of all queries, then keys, then values: those of a rank's heads."""
        module = self.module
        kinds = channels.split([module.key_dim, module.key_dim, module.value_dim])
        return torch.cat([self._own(kind, rank) for kind in kinds])
