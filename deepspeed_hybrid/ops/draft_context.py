# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Keys and values of a draft model's context, from the one product for all its layers to their cache."""

import torch

from deepspeed_hybrid.ops.attention_decode import DTYPES, normed_heads, rotated_heads
from deepspeed_hybrid.ops.draft_attention import CACHE_DTYPES
from deepspeed_hybrid.ops.inference import refuse_recording

# Shapes: M tokens, L layers, S slots, C places, G key heads, E dimensions of a head.

FP8 = torch.float8_e4m3fn
FP8_LIMIT = torch.finfo(FP8).max


def stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As a cache holds them. What fp8 cannot hold becomes the most that it can, and not NaN."""
    return (values.clamp(-FP8_LIMIT, FP8_LIMIT) if dtype == FP8 else values).to(dtype)


def draft_context_reference(
    product: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_norms: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor | None,
    position: torch.Tensor,
    idle: torch.Tensor | None,
    lanes: int,
    eps: float,
) -> None:
    """What :func:`draft_context` does, in plain torch on any device; rows of nobody go to the last slot."""
    count, (scratch, _, layers, heads, head_dim) = product.shape[0], keys.shape
    if slots is None:
        slots = torch.arange(count, device=keys.device) % lanes
    if idle is not None:
        slots, position = slots.masked_fill(idle, scratch - 1), position.masked_fill(idle, 0)
    new_keys, new_values = product.unflatten(-1, (layers, 2, heads, head_dim)).unbind(dim=2)
    normed = normed_heads(new_keys, key_norms[:, None], 0.0, eps).flatten(1, 2)
    new_keys = rotated_heads(normed, cos, sin).unflatten(1, (layers, heads))
    for cache, new in ((keys, new_keys), (values, new_values)):
        # As integers: torch copies these by index everywhere.
        raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()]
        cache.view(raw)[slots, position] = stored(new, cache.dtype).view(raw)


@torch.library.custom_op("deepspeed_hybrid::draft_context", mutates_args=("keys", "values"), device_types="cuda")
def draft_context_op(
    product: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_norms: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor | None,
    position: torch.Tensor,
    idle: torch.Tensor | None,
    lanes: int,
    eps: float,
) -> None:
    """:func:`draft_context` as torch's dispatcher knows it."""
    _check(product, cos, sin, key_norms, keys, values, slots, position, idle, lanes)
    # Not at the top: a torch built for CPUs only comes without Triton.
    from deepspeed_hybrid.ops.triton.draft_context import launch

    launch(product, cos, sin, key_norms, keys, values, slots, position, idle, lanes, eps)


@draft_context_op.register_kernel("cpu")
def _(*arguments) -> None:
    _check(*arguments[:-1])
    draft_context_reference(*arguments)


@draft_context_op.register_fake
def _(*arguments) -> None:
    """Nothing is returned; everything happens in the cache."""


def draft_context(
    product: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_norms: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor | None,
    position: torch.Tensor,
    idle: torch.Tensor | None,
    lanes: int,
    eps: float,
) -> None:
    """Norm and rotate the keys of all layers, and write them and the values to their places.

    Math is in fp32, and a result is rounded once, to the cache's dtype; an fp8 cache has a scale of 1, and takes what
    is beyond its range as the end of it. On CUDA this is one launch, without a host sync; the first call for a set of
    sizes compiles it. On a CPU it is :func:`draft_context_reference`. There is no gradient.

    Args:
        product: [M, L * 2 * G * E] fp32, bf16 or fp16, contiguous: of each layer keys, and then values.
        cos, sin: [M, R] of the tokens' positions, of these dtypes, contiguous. The first R dimensions of a head are
            rotated, the first half of them against the second.
        key_norms: [L, E] weights of an RMSNorm over each head, of these dtypes, contiguous.
        keys, values: [S, C, L, G, E] fp32, bf16, fp16 or float8_e4m3fn, contiguous. Updated.
        slots: [M] int64, each token's; None: token m is of slot m % ``lanes``.
        position: [M] int64, each token's place. They must be below C: no kernel looks.
        idle: [M] bool, tokens that are none, and change nothing below the last slot, which is scratch; None: all are.
        lanes: see ``slots``.
        eps: of the norms.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    refuse_recording("draft_context", product, cos, sin, key_norms, keys, values)
    draft_context_op(product, cos, sin, key_norms, keys, values, slots, position, idle, lanes, eps)


def _check(product, cos, sin, key_norms, keys, values, slots, position, idle, lanes: int) -> None:
    """Raise before anything is written."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise RuntimeError(f"draft_context: {message}")

    require(keys.dim() == 5, f"keys must be [slots, places, layers, heads, head_dim], not {list(keys.shape)}")
    _, _, layers, heads, head_dim = keys.shape
    require(
        values.shape == keys.shape and values.dtype == keys.dtype,
        f"values must be {list(keys.shape)} {keys.dtype} as keys, not {list(values.shape)} {values.dtype}",
    )
    count = position.shape[0] if position.dim() else -1
    require(
        cos.dim() == 2 and cos.shape[1] % 2 == 0 and 0 < cos.shape[1] <= head_dim,
        f"cos must be [{count}, an even number up to {head_dim}], not {list(cos.shape)}",
    )
    expected = {
        "product": (product, (count, layers * 2 * heads * head_dim), DTYPES),
        "cos": (cos, (count, cos.shape[1]), DTYPES),
        "sin": (sin, cos.shape, DTYPES),
        "key_norms": (key_norms, (layers, head_dim), DTYPES),
        "keys": (keys, keys.shape, CACHE_DTYPES),
        "values": (values, keys.shape, CACHE_DTYPES),
        "slots": (slots, (count,), (torch.int64,)),
        "position": (position, (count,), (torch.int64,)),
        "idle": (idle, (count,), (torch.bool,)),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        require(tuple(tensor.shape) == tuple(shape), f"{name} must be {list(shape)}, not {list(tensor.shape)}")
        require(tensor.dtype in dtypes, f"{name} must be one of {dtypes}, not {tensor.dtype}")
        require(tensor.is_contiguous(), f"{name} must be contiguous, but its strides are {tensor.stride()}")
        require(tensor.device == product.device, f"{name} is on {tensor.device}, and product on {product.device}")
    require(slots is not None or 0 < lanes <= keys.shape[0], f"lanes must be 1 to {keys.shape[0]}, not {lanes}")
