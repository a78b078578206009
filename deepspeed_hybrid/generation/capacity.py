# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How many bytes buffers take, before any of them is made, and how many there are for them."""

from dataclasses import dataclass

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_hybrid.autotp import outputs_of
from deepspeed_hybrid.compat import layer_kinds, text_config, text_model
from deepspeed_hybrid.generation.sampling import SamplingKind
from deepspeed_hybrid.generation.state import DecodeState

FP32_BYTES = 4
SORTING_BYTES = 32  # a number of the vocabulary: sorted scores and their order, probabilities and their sums
ANSWER_BYTES = 8 + 4  # a token and its logprob


@dataclass(frozen=True)
class SlotBytes:
    """What a slot of the cache takes."""

    fixed: int  # conv windows and recurrent states
    per_token: int  # keys and values
    beside: int = 0  # a token beside the states, of whom there may be some

    def total(self, capacity: int) -> int:
        return self.fixed + capacity * self.per_token

    @classmethod
    def of(cls, model: nn.Module, state_dtype: torch.dtype) -> "SlotBytes":
        """From the modules' sizes, which ZeRO-3 leaves alone."""
        fixed = per_token = beside = 0
        for layer, kind in zip(text_model(model).layers, layer_kinds(model), strict=True):
            if kind == "linear_attention":
                mixer = layer.linear_attn
                window = mixer.conv1d.in_channels * mixer.conv_kernel_size * _itemsize(mixer)
                fixed += window + mixer.num_v_heads * mixer.head_k_dim * mixer.head_v_dim * state_dtype.itemsize
                of_keys = mixer.num_k_heads * mixer.head_k_dim * _itemsize(mixer)
                beside += of_keys + mixer.num_v_heads * (mixer.head_v_dim + 1) * FP32_BYTES
            else:
                mixer = layer.self_attn
                per_token += (_outputs(model, mixer.k_proj) + _outputs(model, mixer.v_proj)) * _itemsize(mixer)
        return cls(fixed, per_token, beside)


def _itemsize(module: nn.Module) -> int:
    return next(module.parameters()).dtype.itemsize


def _outputs(model: nn.Module, projection: nn.Module) -> int:
    config = text_config(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    outputs = outputs_of(projection)
    return config.num_key_value_heads * head_dim if outputs is None else outputs


def cache_bytes(slot: SlotBytes, slots: int, capacity: int, places: int = 0) -> int:
    """Of a cache, scratch slot included, with places for so many tokens beside states."""
    return (slots + 1) * (slot.total(capacity) + places * slot.beside)


def state_bytes(slots: int, capacity: int, vocab_size: int, kind: SamplingKind) -> int:
    """Of the decode state, with the tokens seen where they are penalised."""
    seen = slots * vocab_size if kind.penalised else 0
    return DecodeState.empty(slots, capacity, torch.device("meta")).bytes() + seen


def logits_bytes(lanes: int, vocab_size: int, itemsize: int, kind: SamplingKind, sorts: bool = True) -> int:
    """Of a step's logits, and of what becomes of them before a token is chosen.

    Args:
        sorts: scores are truncated by sorting them, and not by the CUDA op.
    """
    number = itemsize
    if kind.penalised or kind.truncated:
        number += FP32_BYTES
    if kind.truncated:
        number += SORTING_BYTES if sorts else FP32_BYTES
    return lanes * vocab_size * number


def free_bytes(device: torch.device) -> int | None:
    """What the accelerator has free, and what torch keeps of it unused; None on a CPU, whose memory is no limit."""
    if device.type == "cpu":
        return None
    accelerator = get_accelerator()
    kept = accelerator.memory_reserved(device.index) - accelerator.memory_allocated(device.index)
    return accelerator.available_memory(device.index) + kept


def readable(size: int) -> str:
    """'12.3 GB'."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
