# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One forward over columns of left-padded prompts. It reads no value on the host, so that a graph can hold it."""

import torch

from deepspeed_hybrid.cache.layers import StepPlan
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall


def prompt_logits(
    model: ModelCall,
    cache: SlotCache,
    ids: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    start: int,
    width: int,
    padded: bool,
    only_slot: int | None = None,
    masked: bool = True,
) -> torch.Tensor:
    """Feed columns ``start`` to ``start + C`` of prompts that end in column ``width``.

    Padding is closed off: zeroed inputs leave a zero conv window and recurrent state as they are, and in the cache a
    row's tokens are at their own positions 0..length-1, whatever its padding. A row may be all padding.

    Args:
        ids: [B, C] int64.
        lengths: [B] int64, real tokens of each row.
        slots: [B] int64, the slot of each row.
        padded: whether any of the columns 0 to ``width`` is padding.
        only_slot: the slot of the only row, where the host knows it.
        masked: attention wants a mask where it is not plainly causal from position 0.

    Returns:
        Logits of the last column fed, [B, V].
    """
    device, end = ids.device, start + ids.shape[1]
    padding = width - lengths
    positions = torch.arange(start, end, device=device)[None, :] - padding[:, None]
    real, reach = positions >= 0, positions.clamp(min=0)
    # Padding is written where no prompt token is, and is not read: a slot has room for a token of the answer.
    kv_length = min(end, cache.capacity - 1) if padded else end
    plan = StepPlan(
        lanes=ids.shape[0],
        slots=slots,
        kv_length=kv_length,
        first=start == 0,
        only_slot=only_slot,
        last_column=True,
        write_positions=positions.masked_fill(~real, cache.capacity - 1),  # where() would copy the number from here
        before=(start - padding).clamp(min=0),
        after=(end - padding).clamp(min=0),
        token_mask=real if padded else None,
        ids=ids,
    )
    mask = None
    if masked and (padded or start > 0):
        mask = torch.arange(kv_length, device=device)[None, None, None, :] <= reach[:, None, :, None]
    with cache.planned(plan):
        return model.logits(ids, reach, mask, cache)
