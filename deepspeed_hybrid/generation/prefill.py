# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Prompts into slots: left-padded columns in, compact positions in the cache, last-position logits out."""

from contextlib import nullcontext

import torch

from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall, attention_configs
from deepspeed_hybrid.generation.prompt_forward import prompt_logits
from deepspeed_hybrid.generation.prompt_graphs import PromptGraphs
from deepspeed_hybrid.generation.prompt_shapes import next_shape
from deepspeed_hybrid.generation.transfer import upload
from deepspeed_hybrid.segments.continued_attention import can_continue, continuing

# Tokens of one prefill forward, and so of the largest one that is captured; longer prompts run eagerly, in chunks.
# It bounds activations. At shapes of Qwen3.5-4B the library's products of 32,768 tokens take an H200 361 ms in four
# forwards, 352 in two and 349 in one, so that a card with room takes twice as many.
TOKEN_BUDGET = 8192
LARGE_CARD = 64 * 2**30  # bytes


def token_budget_of(device: torch.device, shared: bool) -> int:
    """Tokens of one prefill forward on a device; ranks that share a model take prompts alike, whatever their cards."""
    if shared or device.type != "cuda" or torch.cuda.get_device_properties(device).total_memory < LARGE_CARD:
        return TOKEN_BUDGET
    return 2 * TOKEN_BUDGET


def prefill(
    model: ModelCall,
    cache: SlotCache,
    ids: torch.Tensor,
    lengths: list[int],
    slots: list[int],
    token_budget: int | None = None,
    graphs: PromptGraphs | None = None,
    alone: bool = False,
) -> torch.Tensor:
    """Prefill prompts, a group of rows and a chunk of columns at a time.

    Args:
        ids: [P, T] int64, left-padded.
        lengths: real tokens of each row.
        slots: the slot of each row.
        token_budget: most tokens of one forward; None: the model's, or TOKEN_BUDGET.
        graphs: pads forwards to a few shapes, and captures and replays them; None: exact shapes, eagerly. A prompt
            longer than the budget runs eagerly either way.
        alone: one prompt at a time, so that none's numbers depend on the others.

    Returns:
        Logits of each prompt's last token, [P, V].
    """
    budget = token_budget or model.token_budget or TOKEN_BUDGET
    logits: list[torch.Tensor] = []
    start = 0
    while start < len(lengths):
        left = lengths[start : start + 1] if alone else lengths[start:]
        count, shape = _exact_group(left, budget), None
        if graphs is not None:
            count, shape = next_shape(left, budget)
        group = slice(start, start + count)
        columns = ids[group, ids.shape[1] - max(lengths[group]) :]
        if graphs is not None and shape is not None:
            logits.append(graphs.logits(cache, columns, lengths[group], slots[group], shape))
        else:
            logits.append(_in_chunks(model, cache, columns, lengths[group], slots[group], budget))
        start += count
    return logits[0] if len(logits) == 1 else torch.cat(logits)


def _exact_group(lengths: list[int], token_budget: int) -> int:
    """How many of the first prompts fit the budget at the width of the longest of them; at least one."""
    count = widest = 0
    for length in lengths:
        widest = max(widest, length)
        if count and widest * (count + 1) > token_budget:
            break
        count += 1
    return count


def _in_chunks(
    model: ModelCall, cache: SlotCache, ids: torch.Tensor, lengths: list[int], slots: list[int], token_budget: int
) -> torch.Tensor:
    width, chunk = ids.shape[1], max(1, token_budget // len(slots))
    row_lengths, row_slots = upload(lengths, ids.device), upload(slots, ids.device)
    padded, only_slot = min(lengths) < width, slots[0] if len(slots) == 1 else None
    configs = attention_configs(model.model) if width > chunk else []
    unmasked = only_slot is not None and not padded and can_continue(configs)
    logits = None
    for start in range(0, width, chunk):
        columns = ids[:, start : start + chunk]
        with continuing(configs) if unmasked and start > 0 else nullcontext():
            logits = prompt_logits(
                model, cache, columns, row_lengths, row_slots, start, width, padded, only_slot, not unmasked
            )
    return logits
