# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Keys and values of a prompt's tokens, into the slots of their rows."""

import torch

from deepspeed_hybrid.ops.gdn_decode import MODEL_DTYPES
from deepspeed_hybrid.ops.inference import refuse_recording

# Shapes: B rows, T tokens, S slots, H key-value heads, L positions of a slot, D dimensions of a head.


def keep_tokens_reference(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor | None = None,
) -> None:
    """What :func:`keep_tokens` does, in plain torch on any device."""
    _check(keys, values, key, value, slots, positions, lengths)
    wanted = torch.ones_like(positions, dtype=torch.bool)
    if lengths is not None:
        wanted = positions < lengths[:, None]
        behind = torch.arange(keys.shape[2], device=keys.device) >= lengths[:, None]
        for buffer in (keys, values):
            buffer[slots] = buffer[slots].masked_fill(behind[:, None, :, None], 0.0)
    row, token = wanted.nonzero(as_tuple=True)
    for buffer, part in ((keys, key), (values, value)):
        buffer[slots[row], :, positions[row, token]] = part[row, :, token]


@torch.library.custom_op("deepspeed_hybrid::keep_tokens", mutates_args=("keys", "values"), device_types="cuda")
def _keep_tokens(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor | None = None,
) -> None:
    _check(keys, values, key, value, slots, positions, lengths)
    from deepspeed_hybrid.ops.triton.keep_tokens import launch  # here, because a torch for CPUs has no Triton

    launch(keys, values, key, value, slots, positions, lengths)


_keep_tokens.register_fake(lambda *_: None)
_keep_tokens.register_kernel("cpu")(keep_tokens_reference)


def keep_tokens(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor | None = None,
) -> None:
    """Write every token's keys and values to its position of its row's slot, in place.

    On CUDA this is one launch for both, without a host sync; the first call for a set of sizes and dtypes compiles it.
    On a CPU it is :func:`keep_tokens_reference`. There is no gradient.

    Args:
        keys, values: [S, H, L, D] in one dtype (fp32, bf16 or fp16), contiguous.
        key, value: [B, H, T, D] in that dtype, each contiguous in the last dimension, at any other strides.
        slots: [B] int64.
        positions: [B, T] int64, contiguous. Tokens that share a place are ones that nobody reads.
        lengths: [B] int64, for rows that enter their slots: from there on a slot becomes zeros, whatever lay there,
            and tokens at such positions are left out. None: all tokens are written, and nothing else is touched.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    refuse_recording("keep_tokens", keys, values, key, value)
    _keep_tokens(keys, values, key, value, slots, positions, lengths)


def _check(keys, values, key, value, slots, positions, lengths) -> None:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise RuntimeError(f"keep_tokens: {message}")

    require(keys.dim() == 4 and keys.dtype in MODEL_DTYPES, "keys must be [S, H, L, D] in a model's dtype")
    require(key.dim() == 4, f"key must have 4 dimensions, got shape {tuple(key.shape)}")
    _, heads, _, size = keys.shape
    rows, _, tokens, _ = key.shape
    expected = {
        "values": (values, tuple(keys.shape), keys.dtype),
        "key": (key, (rows, heads, tokens, size), keys.dtype),
        "value": (value, (rows, heads, tokens, size), keys.dtype),
        "slots": (slots, (rows,), torch.int64),
        "positions": (positions, (rows, tokens), torch.int64),
    }
    if lengths is not None:
        expected["lengths"] = (lengths, (rows,), torch.int64)
    for name, (tensor, shape, dtype) in expected.items():
        fits = tuple(tensor.shape) == shape and tensor.dtype == dtype
        require(fits, f"{name} must be {list(shape)} {dtype}, got {list(tensor.shape)} {tensor.dtype}")
        require(tensor.device == keys.device, f"{name} is on {tensor.device}, keys on {keys.device}")
    require(keys.is_contiguous(), f"keys must be contiguous, got strides {keys.stride()}")
    for name in expected.keys() - {"key", "value"}:
        tensor = expected[name][0]
        require(tensor.is_contiguous(), f"{name} must be contiguous, got strides {tensor.stride()}")
    for name, tensor in (("key", key), ("value", value)):
        require(tensor.stride(3) == 1 or size == 1, f"the last dimension of {name} must be contiguous")
