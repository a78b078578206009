# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The bookkeeping of a block on a CPU, and its Triton kernels in the interpreter, against loops over lanes."""

import os
from types import SimpleNamespace

import pytest
import torch
from decode_cases import same_bits
from draft_cases import accept_arguments, accept_oracle, lanes_of
from glue_cases import poisoned_outputs

from deepspeed_hybrid.ops import block_step
from deepspeed_hybrid.ops.block_step import REAL, WHOLE, block_accept, block_inputs, block_rows, count_reached

INTERPRETED = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


class Kernels:
    """The Triton kernels on CPU tensors, by the names of the ops."""

    def __getattr__(self, name: str):
        from deepspeed_hybrid.ops.triton import block_step as kernels

        names = {"block_inputs": "inputs", "block_rows": "rows", "block_accept": "accept", "count_reached": "count"}
        return getattr(kernels, names[name])


RUNS = [pytest.param(block_step, id="reference"), pytest.param(Kernels(), marks=INTERPRETED, id="kernels")]
SIZES = [(1, 2), (5, 4), (3, 16), (70, 5)]


def states(lanes: dict, names: tuple[str, ...]) -> list[torch.Tensor]:
    return [lanes[name] for name in names]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("count, tokens", SIZES)
@pytest.mark.parametrize("drafted", [True, False], ids=["drafts", "masks"])
def test_inputs(run, count, tokens, drafted):
    lanes = lanes_of(count, tokens)
    drafts = torch.randint(0, 100, (tokens - 1, count)).t() if drafted else None
    state = SimpleNamespace(**{name: tensor.tolist() for name, tensor in lanes.items()})
    with poisoned_outputs():
        ids, positions, idle, counts = run.block_inputs(
            *states(lanes, ("token", "position", "length", "limit", "parked")), drafts, 99, tokens
        )
    for lane in range(count):
        behind = drafts[lane].tolist() if drafted else [99] * (tokens - 1)
        room = 0 if state.parked[lane] else min(tokens, state.limit[lane] - state.length[lane])
        assert ids[:, lane].tolist() == [state.token[lane], *behind]
        assert positions[:, lane].tolist() == [state.position[lane] + step for step in range(tokens)]
        assert idle[:, lane].tolist() == [step >= room for step in range(tokens)]
        assert counts[lane] == room
    assert ids.is_contiguous() and positions.is_contiguous() and idle.dtype == torch.bool


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("count, tokens", SIZES)
def test_rows(run, count, tokens):
    lanes = lanes_of(count, tokens)
    with poisoned_outputs():
        whole, real, parked, finish = run.block_rows(
            states(lanes, WHOLE), states(lanes, REAL), lanes["parked"], lanes["finish"], tokens
        )
    for step in range(tokens):
        part = slice(step * count, (step + 1) * count)
        for name, rows in zip((*WHOLE, *REAL), (*whole, *real), strict=True):
            expected = lanes[name] + step if name in ("position", "length") else lanes[name]
            assert same_bits(rows[part], expected), name
        beyond = lanes["length"] + step >= lanes["limit"]
        assert torch.equal(parked[part], lanes["parked"] | beyond) and same_bits(finish[part], lanes["finish"])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("count, tokens", SIZES)
def test_what_is_accepted_is_what_decode_steps_choose(run, count, tokens):
    for seed in range(3 if count < 10 else 1):
        arguments, expected = (accept_arguments(count, tokens, seed) for _ in range(2))
        wanted = accept_oracle(expected)
        with poisoned_outputs():
            counts = run.block_accept(**arguments)
        assert torch.equal(counts, wanted)
        for name, tensor in expected.items():
            assert same_bits(arguments[name], tensor), name


@pytest.mark.parametrize("run", RUNS)
def test_a_choice_beyond_the_buffers_is_at_their_end(run):
    arguments = accept_arguments(2, 4)
    arguments["parked"].fill_(False)
    arguments["ended"].fill_(False)
    arguments["length"].fill_(arguments["tokens"].shape[1] - 2)
    arguments["drafts"] = arguments["chosen"].view(4, 2)[:-1].t()
    assert run.block_accept(**arguments).tolist() == [4, 4]
    chosen = arguments["chosen"].view(4, 2)
    assert torch.equal(arguments["tokens"][:, -2:], torch.stack([chosen[0], chosen[3]], dim=1))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("count", [1, 300])
def test_reached(run, count):
    counts, reached = torch.randint(0, 6, (count,)), torch.arange(5)
    run.count_reached(counts, reached)
    assert reached.tolist() == [step + sum(one > step for one in counts.tolist()) for step in range(5)]


def test_opcheck():
    lanes = lanes_of(3, 4)
    inputs = states(lanes, ("token", "position", "length", "limit", "parked"))
    torch.library.opcheck(block_inputs, (*inputs, None, 9, 4))
    rows = states(lanes, WHOLE), states(lanes, REAL)
    torch.library.opcheck(block_rows, (*rows, lanes["parked"], lanes["finish"], 4))
    torch.library.opcheck(block_accept, (), accept_arguments(3, 4))
    torch.library.opcheck(count_reached, (torch.tensor([1, 2]), torch.zeros(3, dtype=torch.int64)))
