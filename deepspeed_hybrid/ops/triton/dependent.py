# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits on the device.

A kernel that takes PDL announces its successor at once, asks for what no kernel of the same step writes (weights, the
recurrent state), and only then waits for its predecessor; everything else is read and written after that. Steps do not
overlap: the first kernel of a step is launched plainly, behind all of the step before, and a captured step is a graph
of its own.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def announce(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@functools.cache
def _capable(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


def pdl(tensor: torch.Tensor, first: bool = False) -> dict[str, bool]:
    """Arguments of a launch: PDL for the kernel, and Triton's own where the card has it.

    Args:
        first: of a step. The kernel announces its successor, and does not start before its predecessor has ended.
    """
    if tensor.is_cuda and _capable(tensor.device.index):
        return {"PDL": True, "launch_pdl": not first}
    return {"PDL": False}
