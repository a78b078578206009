# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Small host lists onto the device, without waiting for it."""

import torch


def upload(values: list[int], device: torch.device) -> torch.Tensor:
    """[len(values)] int64 on ``device``; through pinned memory where the device runs ahead of the host."""
    tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
