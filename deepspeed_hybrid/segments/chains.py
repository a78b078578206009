# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The ops of decode steps and of prompts on a device: Triton's and CUDA's, or their references."""

from collections.abc import Callable
from functools import partial

import torch

from deepspeed_hybrid.ops import attention_streamed, few_rows, fused_linear, gdn_streamed, warpgroup
from deepspeed_hybrid.ops import gdn_kept_block as kept_block
from deepspeed_hybrid.ops.attention_block import attention_block, token_by_token
from deepspeed_hybrid.ops.attention_decode import attention_decode, attention_decode_reference
from deepspeed_hybrid.ops.batch_invariant import (
    SPLITS,
    attention_of_one_row,
    embedded_rows_one_by_one,
    normed_linear_in_groups,
    residual_linear_in_groups,
    rotary_tables_one_by_one,
)
from deepspeed_hybrid.ops.copy_slots import copy_slots, copy_slots_reference
from deepspeed_hybrid.ops.embedded_rows import embedded_rows, embedded_rows_reference
from deepspeed_hybrid.ops.gated_heads import gated_heads
from deepspeed_hybrid.ops.gated_norm import gated_norm
from deepspeed_hybrid.ops.gdn_block import (
    gdn_block,
    gdn_block_reference,
    gdn_commit,
    gdn_commit_reference,
)
from deepspeed_hybrid.ops.gdn_chunks import gdn_chunks
from deepspeed_hybrid.ops.gdn_conv import gdn_conv
from deepspeed_hybrid.ops.gdn_decode import gdn_decode, gdn_decode_reference
from deepspeed_hybrid.ops.gdn_deferred import gdn_deferred
from deepspeed_hybrid.ops.gdn_heads import gdn_heads, gdn_heads_reference
from deepspeed_hybrid.ops.gdn_kept_block import gdn_kept_block
from deepspeed_hybrid.ops.gdn_windows import gdn_windows
from deepspeed_hybrid.ops.keep_tokens import keep_tokens
from deepspeed_hybrid.ops.loader import triton_obstacle
from deepspeed_hybrid.ops.prompt_heads import prompt_heads
from deepspeed_hybrid.ops.rotary_tables import rotary_tables, rotary_tables_reference
from deepspeed_hybrid.ops.shared_sum import SharedSum
from deepspeed_hybrid.segments.decoder_layer import DecodeOps
from deepspeed_hybrid.segments.prompts import MODELS_OWN, PromptOps

DEFERRING: dict[str, Callable] = {"gdn_deferred": gdn_deferred, "gdn_kept_block": gdn_kept_block}
PRODUCTS = {"few_rows_linear": few_rows, "warpgroup_linear": warpgroup}


def chain_ops(
    device: torch.device, backend: str, batch_invariant: bool = False, train_consistent: bool = False
) -> DecodeOps | str:
    """The ops of whole decoder layers in a decode step, Triton's on CUDA, or why there are none."""
    if device.type != "cuda":
        return _reference_ops(batch_invariant)
    obstacle = triton_off(backend)
    if obstacle:
        return obstacle
    products: tuple[Callable, Callable] = fused_linear.normed_linear, fused_linear.residual_linear
    if train_consistent:
        products = fused_linear.normed_linear_by_library, fused_linear.residual_linear_by_library
    if batch_invariant:
        products = partial(normed_linear_in_groups, products[0]), partial(residual_linear_in_groups, products[1])
    shared = SharedSum(products[0], fused_linear.normed_rows, direct=True)
    attention = partial(attention_decode, splits=SPLITS) if batch_invariant else attention_decode
    block = partial(token_by_token, attention) if batch_invariant else attention_block
    rest = attention, block, embedded_rows, rotary_tables
    deferred: dict[str, Callable] = {}  # which are for many rows only
    if not batch_invariant:
        deferred = {name: partial(op, rounded_heads=True) for name, op in DEFERRING.items()}
        deferred["gdn_windows"] = gdn_windows
    gdn = partial(gdn_decode, rounded_heads=True), partial(gdn_heads, rounded_heads=True), gdn_block, gdn_commit
    return DecodeOps(fused_linear.normed_rows, *products, shared, *gdn, *rest, **deferred)


def ops_off(index: int, chain: DecodeOps, train_consistent: bool) -> dict[str, str]:
    """Why ops of a chain that are for some cards alone are not for this one."""
    ours = {"attention_streamed op": attention_streamed.obstacle(index)}
    if chain.gdn_deferred is not None:
        ours["gdn_streamed op"] = gdn_streamed.obstacle(index)
        ours["gdn_streamed_block op"] = kept_block.obstacle(index)
    if not train_consistent:
        ours |= {f"{name} op": op.obstacle(index) for name, op in PRODUCTS.items()}
    return {name: obstacle for name, obstacle in ours.items() if obstacle}


def _reference_ops(batch_invariant: bool) -> DecodeOps:
    """In plain torch. To have a row's bits in any batch, rows go one by one: a speculative step has several a slot."""
    products = fused_linear.normed_linear_reference, fused_linear.residual_linear_reference
    gdn = gdn_decode_reference, gdn_heads_reference, gdn_block_reference, gdn_commit_reference
    attention: Callable = attention_decode_reference
    rest = embedded_rows_reference, rotary_tables_reference
    if batch_invariant:
        products = partial(normed_linear_in_groups, products[0]), partial(residual_linear_in_groups, products[1])
        attention = partial(attention_of_one_row, attention)
        rest = partial(embedded_rows_one_by_one, rest[0]), partial(rotary_tables_one_by_one, rest[1])
    mixers = *gdn, attention, partial(token_by_token, attention)
    norm = fused_linear.normed_rows_reference
    return DecodeOps(norm, *products, SharedSum(products[0], norm), *mixers, *rest)


def prompt_ops(device: torch.device, backend: str, off: dict[str, str], train_consistent: bool = False) -> PromptOps:
    """Triton's on CUDA, where norms are made whole by their writers and products are the library's, as in training;
    on a CPU, and where rollouts are to be consistent with training, the model's own code, for the very bits of it."""
    if device.type != "cuda" or train_consistent:
        return MODELS_OWN
    obstacle = triton_off(backend)
    if obstacle:
        off["prompt ops"] = obstacle
        return MODELS_OWN
    attention = rotary_tables, prompt_heads, gated_heads, keep_tokens
    products = fused_linear.normed_linear_by_library, fused_linear.residual_linear_by_library
    shared = SharedSum(products[0], fused_linear.normed_rows)  # inboxes would be as large as prompts
    return PromptOps(gdn_conv, gdn_chunks, fused_linear.normed_rows, gated_norm, *attention, *products, shared)


def slot_copy(device: torch.device, backend: str) -> Callable[..., None]:
    """How slots of a cache are copied: by Triton's kernel on CUDA, where it may run, and by torch elsewhere."""
    return copy_slots if device.type == "cuda" and triton_off(backend) is None else copy_slots_reference


def triton_off(backend: str) -> str | None:
    """Why the Triton ops are not used on a CUDA device, or None."""
    return f"segki_backend is {backend!r}" if backend in ("cuda", "torch") else triton_obstacle()
