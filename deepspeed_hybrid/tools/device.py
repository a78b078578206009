# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The device the commands run on."""

import torch
from deepspeed.accelerator import get_accelerator


def has_cuda() -> bool:
    """Whether DeepSpeed's accelerator is a CUDA device that is there."""
    accelerator = get_accelerator()
    return accelerator.device_name() == "cuda" and accelerator.is_available()


def gpu_name() -> str | None:
    """The CUDA device in use, or None."""
    return torch.cuda.get_device_name() if has_cuda() else None


def capability() -> tuple[int, int]:
    """Major and minor compute capability of the CUDA device in use."""
    return torch.cuda.get_device_capability()
