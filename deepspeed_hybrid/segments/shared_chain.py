# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The ends of a decoder layer's two halves: a product, the residual, the next norm. Where ranks share the inputs of
the product, a sum over them comes in between."""

from dataclasses import dataclass

import torch
from torch import nn

from deepspeed_hybrid.autotp import inputs_here, is_column_shard, is_row_shard, outputs_of
from deepspeed_hybrid.segments.head_parallel import HeadParallelGdn, head_parallel_obstacle
from deepspeed_hybrid.segments.norm import Norm
from deepspeed_hybrid.segments.plan import output_obstacle


@dataclass(frozen=True)
class HalfEnd:
    """The product that ends a half of a layer.

    Args:
        module: a linear layer, a row shard of one, or what a rank runs of a GatedDeltaNet layer.
    """

    module: nn.Module | HeadParallelGdn

    def __call__(
        self, ops, inputs: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[M, K] -> hidden [M, N], and scaled and squares of the norm that comes next.

        Args:
            ops: a :class:`~deepspeed_hybrid.segments.decoder_layer.DecodeOps`.
        """
        module = self.module
        if isinstance(module, HeadParallelGdn):
            weight, bias, group = module.output, None, module.group
        else:
            weight, bias, group = module.weight, module.bias, getattr(module, "mp_group", None)
        if group is None:
            return ops.residual_linear(inputs, weight, bias, residual, norm.weight, norm.offset, norm.eps)
        return ops.shared_sum(inputs, weight, bias, residual, norm.weight, norm.offset, norm.eps, group)


def end_obstacle(name: str, projection: nn.Module) -> str | None:
    """Why a projection is neither a plain linear layer nor a row shard of one, or None."""
    if not is_row_shard(projection):
        return output_obstacle(name, projection)
    return None if projection.weight.is_contiguous() else f"the share of {name} is not contiguous"


def shared_gdn_obstacle(mixer: nn.Module) -> str | None:
    """Why what ranks have of a GatedDeltaNet layer cannot be a chain, or None."""
    if not is_column_shard(mixer.in_proj_qkv):
        return output_obstacle("out_proj", mixer.out_proj)
    reason = head_parallel_obstacle(mixer)
    return None if reason is None else f"all heads run here: {reason}"


def attention_sizes(module: nn.Module) -> tuple[int, int, int]:
    """Columns of queries (with gates where there are any), of keys, and of what the output projection reads, here."""
    return outputs_of(module.q_proj) or 0, outputs_of(module.k_proj) or 0, inputs_here(module.o_proj)
