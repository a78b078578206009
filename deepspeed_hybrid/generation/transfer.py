# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Small host lists onto the device, without waiting for it."""

import torch


def upload(values: list, device: torch.device) -> torch.Tensor:
    """Integers, or lists of them of one length, as int64 on ``device``.

    They go through pinned memory where the device runs ahead of the host.
    """
    return _staged(values, device).to(device, non_blocking=True)


def upload_rows(target: torch.Tensor, rows: list[list[int]]) -> None:
    """Write lists of one length into ``target`` [rows, length], in place."""
    target.copy_(_staged(rows, target.device), non_blocking=True)


def _staged(values: list, device: torch.device) -> torch.Tensor:
    """On the host, where a copy to ``device`` can take it from without anybody waiting."""
    tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
    return tensor if device.type == "cpu" else tensor.pin_memory()
