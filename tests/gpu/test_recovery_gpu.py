# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Calls cut short anywhere on a GPU, captures among them, and memory that really runs out: the next call is right."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from harness import rollout_of
from test_recovery import assert_no_trace, cut_calls, draw, run, small_model, undisturbed

from deepspeed_hybrid.generation import tail

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_fp32"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # torch's word on a capture that was cut short
]

CALLS, LIMITED_CALLS = 200, 40
HEADROOM = [0, 0, 2, 4, 8, 16, 64, 512]  # MiB; a private pool takes 2 MiB at least, so that nothing is too little


@pytest.fixture(scope="module")
def model():
    return small_model().cuda()


@pytest.fixture(scope="module")
def oracle(model):
    return undisturbed(model)


def test_calls_cut_at_any_operation(model, oracle, monkeypatch):
    """Exceptions, interrupts and errors of the kind that memory brings, in eager parts and in captures."""
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)
    rollout = rollout_of(model, use_graph_capture=True, poll_every=3, max_graphs=3)
    cut_calls(rollout, oracle, CALLS, lambda: True, least=0.1)  # a replay is no operation of torch's
    assert rollout._graphs.captures > 0


@contextmanager
def only(headroom: int) -> Iterator[None]:
    """Inside, torch may take so many bytes more from the driver than it has."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + headroom) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def ran_out(error: BaseException | None) -> bool:
    """Whether memory is behind it: the end of a capture that was cut short may have an error of its own."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__context__
    return error is not None


def test_memory_that_runs_out(model, oracle, monkeypatch):
    """The allocator itself says no, wherever a call happens to ask it for more: every buffer is made anew."""
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)
    chance = random.Random(3)
    modes = [module.training for module in model.modules()]
    rollout = rollout_of(model, use_graph_capture=True, poll_every=3)
    failed = succeeded = 0
    for _ in range(LIMITED_CALLS):
        call, headroom = draw(chance), chance.choice(HEADROOM) * 2**20
        rollout.release_memory()
        try:
            with only(headroom):
                assert run(rollout, call) == oracle[call.size, call.kind], call
            succeeded += 1
        except RuntimeError as error:
            assert ran_out(error), error
            failed += 1
            del error
            assert rollout._arena.cache is None and len(rollout._graphs) == 0
        assert_no_trace(model, modes)
        again = draw(chance)
        assert run(rollout, again) == oracle[again.size, again.kind], again
    print(f"{failed} calls ran out of memory, {succeeded} did not")
    assert failed >= 5 and succeeded >= 5
