# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What ranks need of one another while they generate."""

import deepspeed
import torch


def everyones(mine: torch.Tensor, group) -> torch.Tensor:
    """[ranks, ...]: what each rank of ``group`` passes, of one shape. A collective operation."""
    ranks = deepspeed.comm.get_world_size(group=group)
    every = mine.new_empty((ranks * mine.shape[0], *mine.shape[1:]))
    deepspeed.comm.all_gather_into_tensor(every, mine.contiguous(), group=group)
    return every.view(ranks, *mine.shape)
