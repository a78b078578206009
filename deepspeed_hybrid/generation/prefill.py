# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Prompts into slots: left-padded columns in, compact positions in the cache, last-position logits out."""

import torch

from deepspeed_hybrid.cache.layers import StepPlan
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall
from deepspeed_hybrid.generation.transfer import upload

# Tokens of one prefill forward. It bounds activations; more would not be faster on an H200.
TOKEN_BUDGET = 8192


def prefill(
    model: ModelCall,
    cache: SlotCache,
    ids: torch.Tensor,
    lengths: list[int],
    slots: list[int],
    token_budget: int = TOKEN_BUDGET,
) -> torch.Tensor:
    """Prefill prompts, a group of rows and a chunk of columns at a time.

    Padding stays on the left of the columns, where zeroed inputs leave a zero conv window and recurrent state as they
    are. In the cache a row's tokens are at their own positions 0..length-1, whatever its padding.

    Args:
        ids: [P, T] int64, left-padded.
        lengths: real tokens of each row.
        slots: the slot of each row.
        token_budget: most tokens of one forward.

    Returns:
        Logits of each prompt's last token, [P, V].
    """
    logits = []
    rows = list(range(len(lengths)))
    while rows:
        widest = 0
        group: list[int] = []
        for row in rows:
            widest = max(widest, lengths[row])
            if group and widest * (len(group) + 1) > token_budget:
                break
            group.append(row)
        rows = rows[len(group) :]
        longest = max(lengths[row] for row in group)
        columns = ids[group[0] : group[-1] + 1, ids.shape[1] - longest :]
        logits.append(
            _prefill_group(
                model, cache, columns, [lengths[row] for row in group], [slots[row] for row in group], token_budget
            )
        )
    return torch.cat(logits)


def _prefill_group(
    model: ModelCall, cache: SlotCache, ids: torch.Tensor, lengths: list[int], slots: list[int], token_budget: int
) -> torch.Tensor:
    device, width = ids.device, ids.shape[1]
    chunk = max(1, token_budget // len(slots))
    slot_index = upload(slots, device)
    padding = width - upload(lengths, device)
    ragged = min(lengths) < width
    logits = None
    for start in range(0, width, chunk):
        end = min(start + chunk, width)
        positions = torch.arange(start, end, device=device)[None, :] - padding[:, None]
        real = positions >= 0
        plan = StepPlan(
            lanes=len(slots),
            slots=slot_index,
            kv_length=end,
            first=start == 0,
            write_slots=slot_index,
            # Padding is written where no prompt token is: a slot has room for at least one token of the answer.
            write_positions=torch.where(real, positions, cache.capacity - 1),
            before=(start - padding).clamp(min=0),
            after=(end - padding).clamp(min=0),
            token_mask=real if ragged else None,
        )
        reach = positions.clamp(min=0)
        whole = start == 0 and not ragged
        mask = None if whole else torch.arange(end, device=device)[None, None, None, :] <= reach[:, None, :, None]
        with cache.planned(plan):
            logits = model.logits(ids[:, start:end], reach, mask, cache)
    return logits
