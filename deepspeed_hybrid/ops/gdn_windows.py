# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The conv windows of GatedDeltaNet layers behind a block of tokens, when it is decided how many have been."""

import torch

from deepspeed_hybrid.ops.gdn_decode import MODEL_DTYPES, check_tensors
from deepspeed_hybrid.ops.gdn_heads import tokens_a_row
from deepspeed_hybrid.ops.inference import refuse_recording

# Shapes: T tokens, B rows, S slots, C conv channels, K conv kernel.


def gdn_windows_reference(
    projected: list[torch.Tensor], window: list[torch.Tensor], position: torch.Tensor, counts: torch.Tensor
) -> None:
    """What :func:`gdn_windows` does, in plain torch on any device."""
    checked_windows(projected, window, position, counts)
    lanes = counts.numel()
    for of_layer, ring in zip(projected, window, strict=True):
        channels, kernel = ring.shape[1:]
        for index, rows in enumerate(of_layer[:, :channels].split(lanes) if lanes else ()):
            column = ((position + index) % kernel)[:, None, None].expand(-1, channels, 1)
            new = ring[:lanes].scatter(2, column, rows[:, :, None])
            ring[:lanes] = torch.where(counts[:, None, None] > index, new, ring[:lanes])


@torch.library.custom_op("deepspeed_hybrid::gdn_windows", mutates_args=("window",), device_types="cuda")
def gdn_windows_op(
    projected: list[torch.Tensor], window: list[torch.Tensor], position: torch.Tensor, counts: torch.Tensor
) -> None:
    """:func:`gdn_windows` without the refusal of gradients."""
    from deepspeed_hybrid.ops.triton.gdn_windows import launch  # here, because a torch for CPUs has no Triton

    launch(projected, window, position, counts)


gdn_windows_op.register_kernel("cpu")(gdn_windows_reference)


def gdn_windows(
    projected: list[torch.Tensor], window: list[torch.Tensor], position: torch.Tensor, counts: torch.Tensor
) -> None:
    """Windows of layers, in place, behind each row's first ``counts`` tokens; rows of none keep their bits.

    On CUDA this is one launch for up to 64 layers, without a host sync.

    Args:
        projected: of each layer [T * B, N], token by token; the first C columns are what enters the window.
        window: of each layer [S, C, K] in projected's dtype, rings as of
            :func:`deepspeed_hybrid.ops.gdn_decode.gdn_decode`; updated. Layers have the same sizes and dtypes.
        position: [B] int64, the first token's place in its sequence.
        counts: [B] int64, 0 to T: tokens to take over.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device, or layers that differ; nothing changed.
    """
    refuse_recording("gdn_windows", *projected, *window)
    gdn_windows_op(projected, window, position, counts)


def checked_windows(
    projected: list[torch.Tensor], window: list[torch.Tensor], position: torch.Tensor, counts: torch.Tensor
) -> None:
    """A RuntimeError that names what does not fit."""
    if len(projected) != len(window):
        raise RuntimeError("projected and window must be of the same layers")
    lanes, facts = counts.numel(), set()
    for rows, ring in zip(projected, window, strict=True):
        tokens_a_row(rows, lanes)
        if ring.dim() != 3 or ring.shape[0] < lanes or ring.shape[1] > rows.shape[1]:
            raise RuntimeError(f"window must be [S, C, K] with a slot for each of {lanes}, got {tuple(ring.shape)}")
        expected = {
            "projected": (rows, tuple(rows.shape), MODEL_DTYPES),
            "window": (ring, tuple(ring.shape), (rows.dtype,)),
            "position": (position, (lanes,), (torch.int64,)),
            "counts": (counts, (lanes,), (torch.int64,)),
        }
        check_tensors(expected, rows.device)
        facts.add((rows.shape, rows.stride(0), rows.dtype, ring.shape))
    if len(facts) > 1:
        raise RuntimeError("layers that are taken over together must have the same sizes and dtypes")
