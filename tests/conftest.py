# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One thread, so that results do not depend on the machine, and DeepSpeed engines in one process."""

import warnings

import deepspeed
import pytest
import torch
import torch.distributed
from ranks import Ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks():
    """Two processes for tests of what ranks do together; such tests are of one xdist group, ``two_ranks``."""
    pair = Ranks()
    yield pair
    pair.stop()


@pytest.fixture(scope="session")
def replicas():
    """Two more: DeepSpeed makes no plain engine in a process that has made one whose layers ranks share."""
    pair = Ranks()
    yield pair
    pair.stop()


@pytest.fixture(scope="session")
def one_process():
    """torch.distributed over gloo with this process alone, as DeepSpeed's engine wants it."""
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # whichever is free when it is taken
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        # Its shared-memory collective would be compiled first; one process has no use for it.
        patch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        yield
        torch.distributed.destroy_process_group()


@pytest.fixture
def make_engine(one_process):
    """model, options -> a DeepSpeed engine with ZeRO-1 and AdamW, in fp32 unless said otherwise.

    ``groups`` are the optimizer's parameter groups; ``config`` is DeepSpeed's.
    """

    def make(model: torch.nn.Module, learning_rate: float = 1e-2, stage: int = 1, groups=None, **config):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": learning_rate, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
            **config,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the imports and defaults of other packages
            return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]

    return make
