# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""torch.distributed as DeepSpeed's engine wants it, whether a launcher started this process or a person did."""

import logging
import os

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator

from deepspeed_hybrid.tools.device import has_cuda


def start_distributed() -> None:
    """Join the launcher's processes, or be the only one."""
    if "RANK" not in os.environ:
        # Port 0: whichever is free when it is taken.
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    if os.environ.get("WORLD_SIZE") == "1" or not has_cuda():
        # DeepSpeed would compile a shared-memory collective first; tensors are too small here to have a use for it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if has_cuda():
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed(dist_backend="nccl" if has_cuda() else "gloo", auto_mpi_discovery=False)


def sharing_obstacle(tensor_parallel: int) -> str | None:
    """Why the launcher's processes cannot share models by so many, or None."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes % tensor_parallel == 0:
        return None
    return (
        f"--tensor-parallel {tensor_parallel} does not divide the number of processes, which is {processes}; start "
        f"them with a launcher: torchrun --nproc-per-node {tensor_parallel} -m deepspeed_hybrid demo ..."
    )


def stop_distributed() -> None:
    torch.distributed.destroy_process_group()


def quiet() -> None:
    """Only what is wrong, from packages that also report what is usual."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    transformers.logging.set_verbosity_error()


def mean_over_ranks(values: list[float]) -> list[float]:
    """Element by element; every rank gets the result."""
    device = get_accelerator().current_device_name()
    total = torch.tensor(values, dtype=torch.float64 if device == "cpu" else torch.float32, device=device)
    deepspeed.comm.all_reduce(total)
    return (total / deepspeed.comm.get_world_size()).tolist()
