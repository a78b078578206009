# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One token through a GatedDeltaNet layer, from the input projection to the output projection, as one op.

The short conv's window is a ring: the value that entered the conv at sequence position p lies in column p % K. A token
then overwrites one column instead of shifting all of them, and programs that share channels need not wait for each
other. The rest of the package may keep a window in the order of time, whose last column is the latest token;
:func:`ring_from_window` and :func:`window_from_ring` go from one to the other.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from deepspeed_hybrid.ops.gdn_gates import gdn_gates_reference
from deepspeed_hybrid.ops.inference import refuse_recording
from deepspeed_hybrid.ops.rounding import rounded, rounded_product

MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHT_DTYPES = (*MODEL_DTYPES, torch.float64)
MAX_CONV_KERNEL = 8
L2_EPS = 1e-6  # under the root when q and k are normalised

# Shapes: B rows, S slots, C conv channels, K conv kernel, HK/HV key/value heads, DK/DV their dims.


class GdnSizes(NamedTuple):
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def keys(self) -> int:
        """Channels of all keys; of all queries as many."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    @property
    def columns(self) -> list[int]:
        """Widths of qkv, z, b and a in ``projected``."""
        return [self.channels, self.values, self.value_heads, self.value_heads]


def ring_from_window(window: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The ring that holds the same tokens as a window in the order of time.

    Args:
        window: [B, C, K], whose last column is the token at position ``lengths - 1``; zeros before position 0.
        lengths: [B] int64, tokens so far.

    Returns:
        [B, C, K], contiguous.
    """
    return window.gather(2, ring_order(lengths, window.shape[-1]).expand(window.shape))


def window_from_ring(ring: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The window in the order of time that holds the same tokens as a ring; undoes :func:`ring_from_window`.

    Args:
        ring: [B, C, K].
        positions: [B] int64, tokens so far: the last column returned is the token at ``positions - 1``.

    Returns:
        [B, C, K], contiguous.
    """
    return ring.gather(2, window_order(positions, ring.shape[-1]).expand(ring.shape))


def ring_order(lengths: torch.Tensor, kernel: int) -> torch.Tensor:
    """[B, 1, K]: which column of a window in the order of time is in each column of the ring."""
    return window_order(-lengths, kernel)


def window_order(positions: torch.Tensor, kernel: int) -> torch.Tensor:
    """[B, 1, K]: which column of the ring is in each column of the window in the order of time."""
    return ((torch.arange(kernel, device=positions.device) + positions[:, None]) % kernel)[:, None, :]


def gdn_decode_reference(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    parked: torch.Tensor,
    key_heads: int,
    rounded_heads: bool = False,
) -> torch.Tensor:
    """What :func:`gdn_decode` does, in plain torch on any device."""
    sizes = checked_sizes(
        projected, window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight, position, parked, key_heads
    )
    rows = projected.shape[0]
    window, state = window[:rows], state[:rows]
    conv = conv_weight, conv_bias
    ring, heads = next_heads(projected, window, *conv, position, sizes, rounded_heads)
    beta, decay = head_gates(projected, A_log, dt_bias, sizes)
    written = projected.dtype if rounded_heads else torch.float32
    core, memory = delta_rule(heads, beta, decay, state.float(), sizes, written)
    out = gated_core(core, projected, norm_weight, eps, sizes)
    window.copy_(torch.where(parked[:, None, None], window, ring))
    state.copy_(torch.where(parked[:, None, None, None], state, memory.to(state.dtype)))
    return out.masked_fill(parked[:, None], 0.0)


def next_heads(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    position: torch.Tensor,
    sizes: GdnSizes,
    rounded_heads: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What conv, activation and norm make of one token a row: the ring with it, and [B, C] fp32, normalised queries
    and keys and then values."""
    raw, dtype = projected[:, : sizes.channels], projected.dtype
    column = (position % sizes.conv_kernel)[:, None, None].expand(-1, sizes.channels, 1)
    ring = window.scatter(2, column, raw[:, :, None])
    mixed = (window_from_ring(ring, position + 1).float() * conv_weight.float()).sum(-1)
    mixed = mixed if conv_bias is None else mixed + conv_bias.float()
    if conv_weight.dtype == dtype:
        mixed = rounded(mixed, dtype)
    mixed = rounded(F.silu(mixed), dtype)
    heads = mixed[:, : 2 * sizes.keys].reshape(-1, 2 * sizes.key_heads, sizes.key_dim)
    heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)
    heads = rounded(heads, dtype) if rounded_heads else heads
    return ring, torch.cat([heads.flatten(1), mixed[:, 2 * sizes.keys :]], dim=1)


def head_gates(
    projected: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, sizes: GdnSizes
) -> tuple[torch.Tensor, torch.Tensor]:
    """beta and the decay of the state, both [B, HV] fp32."""
    b, a = projected.split(sizes.columns, dim=-1)[2:]
    beta, g = (gate[:, 0] for gate in gdn_gates_reference(b[:, None], a[:, None], A_log, dt_bias, None))
    return beta, g.exp()


def delta_rule(
    heads: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    memory: torch.Tensor,
    sizes: GdnSizes,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a token reads, [B, HV, DV] fp32, and the state [B, HV, DK, DV] fp32 behind it; values times beta are
    rounded to ``dtype``."""
    query, key, value = heads.split([sizes.keys, sizes.keys, sizes.values], dim=-1)
    query, key = (
        part.reshape(-1, sizes.key_heads, sizes.key_dim).repeat_interleave(sizes.group, dim=1) for part in (query, key)
    )
    query, value = query * sizes.key_dim**-0.5, value.reshape(-1, sizes.value_heads, sizes.value_dim)
    memory = memory * decay[..., None, None]
    known = (memory * key[..., None]).sum(-2)
    delta = rounded(value * beta[..., None], dtype) - known * beta[..., None]
    memory = memory + key[..., None] * delta[..., None, :]
    return (memory * query[..., None]).sum(-2), memory


def gated_core(
    core: torch.Tensor, projected: torch.Tensor, norm_weight: torch.Tensor, eps: float, sizes: GdnSizes
) -> torch.Tensor:
    """RMSNorm of what was read, times its weight and the gate's SiLU: [B, HV * DV] in projected's dtype."""
    z, dtype = projected[:, sizes.channels : sizes.channels + sizes.values], projected.dtype
    core = rounded(core, dtype)
    normed = rounded(core * torch.rsqrt(core.square().mean(-1, keepdim=True) + eps), dtype)
    out = rounded_product(normed, norm_weight, dtype) * F.silu(z.float()).reshape(core.shape)
    return out.flatten(1).to(dtype)


@torch.library.custom_op("deepspeed_hybrid::gdn_decode", mutates_args=("window", "state"), device_types="cuda")
def gdn_decode_op(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    parked: torch.Tensor,
    key_heads: int,
    rounded_heads: bool = False,
) -> torch.Tensor:
    """:func:`gdn_decode` without the refusal of gradients."""
    from deepspeed_hybrid.ops.triton.gdn_decode import launch  # here, because a torch for CPUs has no Triton

    layer = window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight, eps
    return launch(projected, *layer, position, parked, key_heads, rounded_heads)


@gdn_decode_op.register_fake
def _(
    projected, window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight, eps, position, parked, *_
) -> torch.Tensor:
    return projected.new_empty(projected.shape[0], state.shape[1] * state.shape[3])


gdn_decode_op.register_kernel("cpu")(gdn_decode_reference)


def gdn_decode(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    parked: torch.Tensor,
    key_heads: int,
    rounded_heads: bool = False,
) -> torch.Tensor:
    """Short conv, gates, gated delta rule and gated norm for one new token a row; window and state change in place.

    Row b uses slot b. All arithmetic is fp32, and the state is rounded once where it is not. Rounded to projected's
    dtype are, as in transformers: the conv's sums and their activation, beta, what the delta rule reads, and in the
    norm what meets its weight and what comes of it; sums and products with a weight only where it has that dtype.

    On CUDA this is one launch, in which every state is read once and written once, without a host sync; the first call
    for a set of sizes and dtypes compiles it. A row's bits are the same in any batch. On a CPU it is
    :func:`gdn_decode_reference`. There is no gradient.

    Args:
        projected: [B, N] fp32, bf16 or fp16, contiguous in the last dimension; the columns are qkv (C = 2 * HK * DK +
            HV * DV, in this order), z (HV * DV), b (HV) and a (HV).
        window: [S, C, K] ring in projected's dtype, updated; columns of tokens before position 0 are zeros.
        conv_weight: [C, K] of any float dtype; the last tap is for the new token.
        conv_bias: [C] of any float dtype, or None.
        A_log, dt_bias: [HV] of any float dtype.
        state: [S, HV, DK, DV] fp32, bf16 or fp16, updated.
        norm_weight: [DV] of any float dtype.
        eps: of the norm.
        position: [B] int64, the new token's place in its sequence, 0 for the first.
        parked: [B] bool, rows of which nothing changes and whose output is zeros, whatever they hold.
        key_heads: HK; value head h reads key head h // (HV / HK).
        rounded_heads: round normalised queries and keys, and values times beta, to projected's dtype, as
            flash-linear-attention's kernels of whole sequences do, and transformers' function does not.

    Returns:
        [B, HV * DV] in projected's dtype, contiguous.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device; nothing was changed.
    """
    refuse_recording("gdn_decode", projected, window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight)
    layer = window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight, eps
    return gdn_decode_op(projected, *layer, position, parked, key_heads, rounded_heads)


def checked_sizes(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    position: torch.Tensor,
    parked: torch.Tensor | None,
    key_heads: int,
) -> GdnSizes:
    """The layer's sizes, from arguments that fit each other; otherwise a RuntimeError that names one."""
    for name, tensor, dims in (("projected", projected, 2), ("window", window, 3), ("state", state, 4)):
        if tensor.dim() != dims:
            raise RuntimeError(f"{name} must have {dims} dimensions, got shape {tuple(tensor.shape)}")
    rows, channels, kernel = projected.shape[0], window.shape[1], window.shape[2]
    slots, value_heads, key_dim, value_dim = state.shape
    if key_heads < 1 or value_heads % key_heads:
        raise RuntimeError(f"key_heads must divide the {value_heads} value heads of state, got {key_heads}")
    if not 1 <= kernel <= MAX_CONV_KERNEL:
        raise RuntimeError(f"window must have 1 to {MAX_CONV_KERNEL} columns, got {kernel}")
    sizes = GdnSizes(key_heads, value_heads, key_dim, value_dim, kernel)
    if channels != sizes.channels:
        raise RuntimeError(f"window must have {sizes.channels} channels to fit state and key_heads, got {channels}")
    for name, tensor in (("window", window), ("state", state)):
        if tensor.shape[0] < rows:
            raise RuntimeError(f"{name} must have a slot for each of the {rows} rows, got {tensor.shape[0]}")

    expected = {
        "projected": (projected, (rows, sum(sizes.columns)), MODEL_DTYPES),
        "window": (window, (window.shape[0], channels, kernel), (projected.dtype,)),
        "conv_weight": (conv_weight, (channels, kernel), WEIGHT_DTYPES),
        "conv_bias": (conv_bias, (channels,), WEIGHT_DTYPES),
        "A_log": (A_log, (value_heads,), WEIGHT_DTYPES),
        "dt_bias": (dt_bias, (value_heads,), WEIGHT_DTYPES),
        "state": (state, (slots, value_heads, key_dim, value_dim), STATE_DTYPES),
        "norm_weight": (norm_weight, (value_dim,), WEIGHT_DTYPES),
        "position": (position, (rows,), (torch.int64,)),
        "parked": (parked, (rows,), (torch.bool,)),
    }
    check_tensors(expected, projected.device)
    return sizes


def check_tensors(
    expected: dict[str, tuple[torch.Tensor | None, tuple[int, ...], tuple[torch.dtype, ...]]], device: torch.device
) -> None:
    """Refuse a tensor of another dtype, shape, layout or device than these, by its name; None is none.

    All must be contiguous but ``projected``, of which only the last dimension must be.
    """
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            accepted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise RuntimeError(f"{name} must be {accepted}, got {tensor.dtype}")
        if tensor.shape != shape:
            raise RuntimeError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if name == "projected":
            if tensor.stride(1) != 1:
                raise RuntimeError("the last dimension of projected must be contiguous")
        elif not tensor.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous, got strides {tensor.stride()}")
        if tensor.device != device:
            raise RuntimeError(f"{name} is on {tensor.device}, projected on {device}")
