# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What is known of a group of ranks, with one rank in it."""

from datetime import timedelta
from types import SimpleNamespace

import deepspeed
import pytest
import torch

from deepspeed_hybrid.ops import collectives
from deepspeed_hybrid.ops.collectives import (
    bounded_waits,
    capture_obstacle,
    everyones,
    is_lost_peer,
    post,
    posted,
    waits_are_bounded,
)

CPU = torch.device("cpu")


@pytest.fixture
def group(one_process):
    return torch.distributed.group.WORLD


def test_what_every_rank_passes(group):
    mine = torch.arange(12.0).view(4, 3).t()  # not contiguous
    assert torch.equal(everyones(mine, group), mine[None])


def test_gloo_is_no_part_of_a_graph(group):
    assert "'gloo'" in capture_obstacle(group, CPU)


def test_nccl_is_unless_somebody_looks_on(group, monkeypatch):
    monkeypatch.setattr(collectives, "_backend", lambda group, device: SimpleNamespace(name=lambda: "nccl"))
    assert capture_obstacle(group, CPU) is None
    with monkeypatch.context() as logging:
        logging.setattr(deepspeed.comm.comm.comms_logger, "enabled", True)
        assert "comms_logger" in capture_obstacle(group, CPU)
    monkeypatch.setattr(torch.distributed, "get_debug_level", lambda: torch.distributed.DebugLevel.DETAIL)
    assert "TORCH_DISTRIBUTED_DEBUG" in capture_obstacle(group, CPU)


def test_waits_are_bounded_inside_and_as_before_behind(group):
    backend = group._get_backend(CPU)
    before = backend.options._timeout
    assert waits_are_bounded(group, CPU) and before > timedelta(seconds=9)
    with pytest.raises(OSError), bounded_waits(group, CPU, 9):
        assert backend.options._timeout == timedelta(seconds=9)
        raise OSError
    assert backend.options._timeout == before
    with bounded_waits(group, CPU, 10**6):
        assert backend.options._timeout == before, "a shorter one stays"


def test_lost_peers_are_told_from_other_errors():
    assert is_lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer"))
    assert is_lost_peer(torch.distributed.DistBackendError("NCCL communicator was aborted"))
    assert not is_lost_peer(RuntimeError("CUDA out of memory")) and not is_lost_peer(OSError("gloo"))


def test_messages_are_there_for_everybody(group):
    assert posted("deepspeed_hybrid/test") is None
    post("deepspeed_hybrid/test", "the disk is full")
    assert posted("deepspeed_hybrid/test") == "the disk is full"
