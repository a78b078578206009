# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The short conv of a GatedDeltaNet layer over the tokens of a prompt: from the input projection to q, k and v.

The window that is read is in the order of time, its last column the token before the first of these; the one that is
written is a ring, in the slots.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from deepspeed_hybrid.ops.gdn_decode import L2_EPS, MAX_CONV_KERNEL, MODEL_DTYPES, WEIGHT_DTYPES, ring_from_window
from deepspeed_hybrid.ops.inference import refuse_recording
from deepspeed_hybrid.ops.rounding import rounded

NORMED_HEADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# Shapes: B rows, T tokens, S slots, C conv channels, K conv kernel.


class ConvSizes(NamedTuple):
    rows: int
    tokens: int
    channels: int
    kernel: int


def gdn_conv_reference(
    qkv: torch.Tensor,
    window: torch.Tensor | None,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    ring: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    key_dim: int,
    value_dim: int,
    head_dim: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`gdn_conv` does, in plain torch on any device."""
    sizes = checked_sizes(qkv, window, conv_weight, conv_bias, ring, slots, lengths, key_dim, value_dim, head_dim)
    before = qkv.new_zeros(sizes.rows, sizes.channels, sizes.kernel) if window is None else window
    extended = torch.cat([before, qkv.transpose(1, 2)], dim=-1)
    bias = None if conv_bias is None else conv_bias.float()
    mixed = F.conv1d(extended.float(), conv_weight.float()[:, None], bias, groups=sizes.channels)
    mixed = mixed[..., -sizes.tokens :]
    if conv_weight.dtype == qkv.dtype:
        mixed = rounded(F.silu(rounded(mixed, qkv.dtype)), qkv.dtype)
    else:
        mixed = F.silu(mixed)
    mixed = mixed.transpose(1, 2)
    ring.index_copy_(0, slots, ring_from_window(extended[..., -sizes.kernel :], lengths))
    query, key, value = mixed.split([key_dim, key_dim, value_dim], dim=-1)
    if head_dim is not None:
        query, key = (_normalised(part, head_dim) for part in (query, key))
    return tuple(part.to(qkv.dtype).clone(memory_format=torch.contiguous_format) for part in (query, key, value))


def _normalised(part: torch.Tensor, head_dim: int) -> torch.Tensor:
    heads = part.unflatten(-1, (-1, head_dim))
    return (heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)).flatten(-2)


@torch.library.custom_op("deepspeed_hybrid::gdn_conv", mutates_args=("ring",), device_types="cuda")
def _gdn_conv(
    qkv: torch.Tensor,
    window: torch.Tensor | None,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    ring: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    key_dim: int,
    value_dim: int,
    head_dim: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from deepspeed_hybrid.ops.triton.gdn_conv import launch  # here, because a torch for CPUs has no Triton

    return launch(qkv, window, conv_weight, conv_bias, ring, slots, lengths, key_dim, value_dim, head_dim)


@_gdn_conv.register_fake
def _(qkv, window, conv_weight, conv_bias, ring, slots, lengths, key_dim, value_dim, head_dim):
    return tuple(qkv.new_empty(*qkv.shape[:2], width) for width in (key_dim, key_dim, value_dim))


_gdn_conv.register_kernel("cpu")(gdn_conv_reference)


def gdn_conv(
    qkv: torch.Tensor,
    window: torch.Tensor | None,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    ring: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    key_dim: int,
    value_dim: int,
    head_dim: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Causal depthwise conv and SiLU over qkv, as three packed tensors, and into ``ring`` what the next tokens need.

    Math is fp32; the conv's sums are rounded to qkv's dtype where the weight has it too, as in transformers, and so is
    the activation.

    On CUDA this is one launch, in which every token is read from memory once, without a host sync; the first call for
    a set of sizes and dtypes compiles it. A token's bits follow from the K tokens that the conv reaches, whatever lies
    around them and however a sequence is cut. On a CPU it is :func:`gdn_conv_reference`. There is no gradient.

    Args:
        qkv: [B, T, C] fp32, bf16 or fp16, contiguous in the last dimension; columns of a wider tensor will do. At
            least one token.
        window: [B, C, K] in qkv's dtype, contiguous, apart from ``ring``: the K tokens before these; None for zeros,
            before the first of a sequence.
        conv_weight: [C, K] of any float dtype; the last tap is for the newest token.
        conv_bias: [C] of any float dtype, or None.
        ring: [S, C, K] in qkv's dtype, contiguous; the token at position p goes to column p % K of its row's slot.
        slots, lengths: [B] int64: the slot of each row, and its tokens with these. Rows may share a slot that nobody
            reads.
        key_dim, value_dim: columns of q, of k, and of v; C = 2 * key_dim + value_dim.
        head_dim: divide q and k by their length, head by head of so many columns, a power of two; None: leave them.

    Returns:
        q and k [B, T, key_dim] and v [B, T, value_dim], all in qkv's dtype and contiguous.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    refuse_recording("gdn_conv", qkv, window, conv_weight, conv_bias, ring)
    return _gdn_conv(qkv, window, conv_weight, conv_bias, ring, slots, lengths, key_dim, value_dim, head_dim)


def checked_sizes(
    qkv: torch.Tensor,
    window: torch.Tensor | None,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    ring: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    key_dim: int,
    value_dim: int,
    head_dim: int | None,
) -> ConvSizes:
    """The sizes, from arguments that fit each other; otherwise a RuntimeError that names one."""
    for name, tensor in (("qkv", qkv), ("window", window), ("ring", ring)):
        if tensor is not None and tensor.dim() != 3:
            raise RuntimeError(f"{name} must have 3 dimensions, got shape {tuple(tensor.shape)}")
    rows, tokens, channels = qkv.shape
    sizes = ConvSizes(rows, tokens, channels, ring.shape[2])
    if tokens < 1:
        raise RuntimeError("qkv must have at least one token")
    if qkv.stride(2) != 1 and channels > 1:
        raise RuntimeError(f"the last dimension of qkv must be contiguous, got strides {qkv.stride()}")
    if not 1 <= sizes.kernel <= MAX_CONV_KERNEL:
        raise RuntimeError(f"ring must have 1 to {MAX_CONV_KERNEL} columns, got {sizes.kernel}")
    if key_dim < 1 or value_dim < 1 or 2 * key_dim + value_dim != channels:
        raise RuntimeError(
            f"twice key_dim and value_dim must be the {channels} channels of qkv, got {key_dim} and {value_dim}"
        )
    if head_dim is not None and (head_dim not in NORMED_HEADS or key_dim % head_dim):
        raise RuntimeError(
            f"head_dim must be a power of two up to {NORMED_HEADS[-1]} that divides key_dim={key_dim}, got {head_dim}"
        )
    expected = {
        "qkv": (qkv, tuple(qkv.shape), MODEL_DTYPES),
        "window": (window, (rows, channels, sizes.kernel), (qkv.dtype,)),
        "conv_weight": (conv_weight, (channels, sizes.kernel), WEIGHT_DTYPES),
        "conv_bias": (conv_bias, (channels,), WEIGHT_DTYPES),
        "ring": (ring, (ring.shape[0], channels, sizes.kernel), (qkv.dtype,)),
        "slots": (slots, (rows,), (torch.int64,)),
        "lengths": (lengths, (rows,), (torch.int64,)),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            accepted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise RuntimeError(f"{name} must be {accepted}, got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise RuntimeError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if tensor is not qkv and not tensor.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous, got strides {tensor.stride()}")
        if tensor.device != qkv.device:
            raise RuntimeError(f"{name} is on {tensor.device}, qkv on {qkv.device}")
    return sizes
