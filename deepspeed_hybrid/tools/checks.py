# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a machine lacks for a part of the work, each as a sentence that names the cause and the fix."""

import importlib

from packaging.version import Version

from deepspeed_hybrid.tools.device import capability, has_cuda
from deepspeed_hybrid.tools.results import distribution_version

HOPPER = 9  # major compute capability
FIRST_WRONG_TRITON, FIRST_RIGHT_TRITON = Version("3.4.0"), Version("3.7.1")


def training_obstacle() -> str | None:
    """Why a model with GatedDeltaNet layers cannot be trained on this machine, or None."""
    if not has_cuda():
        return None
    missing = fla_obstacle()
    if missing:
        return f"GatedDeltaNet layers on CUDA need flash-linear-attention, and {missing}"
    return backward_obstacle(distribution_version("triton"), capability()[0])


def fla_obstacle() -> str | None:
    """Why FLA's kernels cannot be imported, or None."""
    try:
        importlib.import_module("fla.ops.gated_delta_rule")
    except Exception as cause:
        return (
            f"it cannot be imported ({type(cause).__name__}: {cause}); install it with: "
            "pip install flash-linear-attention"
        )
    return None


def backward_obstacle(triton: str | None, major: int) -> str | None:
    """Why FLA refuses the backward of GatedDeltaNet: these Triton releases compile it wrongly for Hopper cards.

    Args:
        triton: its version, or None.
        major: the card's compute capability.
    """
    if triton is None or major != HOPPER or not FIRST_WRONG_TRITON <= Version(triton) < FIRST_RIGHT_TRITON:
        return None
    return (
        f"flash-linear-attention refuses the backward of GatedDeltaNet on Hopper cards with Triton {triton}: "
        f"releases from {FIRST_WRONG_TRITON} up to {FIRST_RIGHT_TRITON} compute wrong gradients there; "
        f"pip install 'triton>={FIRST_RIGHT_TRITON}' (generation alone is not affected)"
    )
