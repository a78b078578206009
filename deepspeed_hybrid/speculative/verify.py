# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the target says of a block of proposed tokens, without keeping any of it; then as much of it as is accepted.

The block runs as lanes of one token each, so that products and norms are those of any decode step. Attention writes
keys beyond a row's committed length, where nobody reads them before they are written anew, and so does a GatedDeltaNet
layer with what it keeps of tokens beside its states, if it is to; then windows alone are left to commit. Otherwise it
scans without writing, and remembers its inputs; committing scans the first of them once more, in the order of decode
steps, so that the state is what as many of them leave.
"""

import torch

from deepspeed_hybrid.cache.layers import BlockPlan, StepPlan, Uncommitted
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall
from deepspeed_hybrid.generation.state import DecodeState
from deepspeed_hybrid.ops.block_step import block_inputs


def verify(
    model: ModelCall, cache: SlotCache, state: DecodeState, drafts: torch.Tensor, kv_length: int
) -> tuple[torch.Tensor, BlockPlan]:
    """Feed every lane's last token and the drafts behind it.

    Args:
        state: B rows; not changed.
        drafts: [B, T - 1] int64.
        kv_length: cache positions attention reads.

    Returns:
        Logits [T, B, V] of what follows each token; and the block, to commit. Where a row's limit leaves no room for
        a token, its logits mean nothing.
    """
    lanes, tokens = drafts.shape[0], drafts.shape[1] + 1
    rows = state.token, state.position, state.length, state.limit, state.parked
    ids, positions, idle, counts = block_inputs(*rows, drafts, 0, tokens)
    block = BlockPlan(tokens=tokens, positions=positions, idle=idle, counts=counts)
    plan = StepPlan(
        lanes=lanes,
        slots=None,
        kv_length=kv_length,
        parked=state.parked,
        write_positions=positions.view(-1, 1),
        before=state.position,
        block=block,
        ids=ids.view(-1, 1),
        answered=state.length,
        stepped=state.stepped,
    )
    with cache.planned(plan):
        logits = model.logits(ids.view(-1, 1), positions.view(-1, 1), None, cache)
    return logits.unflatten(0, (tokens, lanes)), block


def commit(block: BlockPlan, counts: torch.Tensor) -> None:
    """Take over the first ``counts`` [B] int64 tokens of every lane into conv windows and recurrent states."""
    alike: dict[tuple, list[Uncommitted]] = {}
    for layer in block.commits:
        alike.setdefault(layer.kind, []).append(layer)
    first = block.positions[0]  # the rows' own positions have moved on by now
    for layers in alike.values():
        tensors = (list(of_layers) for of_layers in zip(*(layer.tensors for layer in layers), strict=True))
        layers[0].commit(*tensors, first, counts, *layers[0].rest)
