# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gdn_block and gdn_commit on a CPU, and their Triton kernels in the interpreter: as many decode steps."""

from collections.abc import Callable, Iterator

import pytest
import torch
from decode_cases import same_bits
from gdn_decode_cases import SHAPES, Shape, arguments_of, interpreted, tokens_of
from glue_cases import poisoned_outputs, slice_of_poison
from tolerances import assert_close

from deepspeed_hybrid.ops.gdn_block import gdn_block, gdn_block_op, gdn_commit, gdn_commit_op
from deepspeed_hybrid.ops.gdn_decode import gdn_decode_reference

SMALL = Shape(1, 2, 8, 16)


def block_kernel(**arguments) -> torch.Tensor:
    from deepspeed_hybrid.ops.triton.gdn_block import launch  # under the interpreter only

    return launch(**arguments)


def commit_kernel(**arguments) -> None:
    from deepspeed_hybrid.ops.triton.gdn_block import launch_commit

    launch_commit(**arguments)


both = pytest.mark.parametrize(
    "ops",
    [
        (gdn_block, gdn_commit),
        pytest.param((block_kernel, commit_kernel), marks=[pytest.mark.interpreter, interpreted]),
    ],
    ids=["op", "kernel"],
)


def block_of(shape: Shape, counts: list[int], tokens: int, seed: int = 0, **options) -> dict:
    """Keyword arguments of a block over as many rows as counts, in the middle of sequences, beside a free slot."""
    rows = len(counts)
    arguments = arguments_of(shape, rows, slots=rows + 1, seed=seed, **options)
    del arguments["parked"]
    projected = tokens_of(shape, rows, tokens, dtype=arguments["projected"].dtype, seed=seed + 1)
    projected = projected.transpose(0, 1).flatten(0, 1)
    arguments["projected"] = slice_of_poison(projected, projected.shape[1] + 5, 2)
    return arguments | {"counts": torch.tensor(counts, dtype=torch.int64)}


def step_by_step(arguments: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, and window and state behind the counted tokens, of decode steps."""
    arguments = dict(arguments)
    counts, position, projected = (arguments.pop(name) for name in ("counts", "position", "projected"))
    window, state = (arguments.pop(name).clone() for name in ("window", "state"))
    out = [
        gdn_decode_reference(
            projected=rows, window=window, state=state, position=position + index, parked=counts <= index, **arguments
        )
        for index, rows in enumerate(projected.split(len(counts)))
    ]
    return torch.cat(out), window, state


def run(ops: tuple[Callable, Callable], arguments: dict) -> None:
    """Outputs over poison, and then the slots, are those of decode steps; what is no row's keeps its bits."""
    block, commit = ops
    out, window, state = step_by_step(arguments)
    before = {name: arguments[name].clone() for name in ("window", "state")}
    counts = arguments["counts"]
    live = torch.arange(len(out) // len(counts))[:, None] < counts
    with poisoned_outputs():
        mine = block(**arguments)
    assert mine.dtype == arguments["projected"].dtype and mine.is_contiguous()
    assert (mine.view(*live.shape, -1)[~live] == 0).all()
    assert_close(mine, out)
    assert all(same_bits(arguments[name], old) for name, old in before.items())
    commit(**arguments)
    assert same_bits(arguments["window"], window)
    assert_close(arguments["state"], state)
    untouched = torch.cat([counts == 0, torch.tensor([True])])
    assert same_bits(arguments["state"][untouched], before["state"][untouched])


@both
@pytest.mark.parametrize(
    "shape", [SHAPES[0], SHAPES[3], SHAPES[4], SHAPES[6]], ids=lambda shape: "-".join(map(str, shape))
)
def test_a_block_is_as_many_decode_steps(ops, shape):
    run(ops, block_of(shape, [5, 0, 2], 5))
    run(ops, block_of(shape, [2], 2, bias=False))


@both
@pytest.mark.parametrize("tokens", [1, 5])
def test_every_number_of_tokens(ops, tokens):
    """More than the conv's taps, as many and fewer; and near the beginning of sequences."""
    arguments = block_of(SMALL, list(range(tokens + 1)), tokens)
    arguments["position"] = torch.arange(tokens + 1)
    run(ops, arguments)


@both
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dtypes(ops, dtype, state_dtype):
    """A state of 16 bits is rounded behind each token, as it is in slots. (Of bf16 the interpreter cuts bits off.)"""
    run(ops, block_of(SMALL, [3, 1], 3, dtype=dtype, state_dtype=state_dtype, weights=dtype))


@both
@pytest.mark.parametrize("garbage", [float("nan"), -1e30])
def test_tokens_that_do_not_count_reach_nothing(ops, garbage):
    block, commit = ops
    arguments = block_of(SMALL, [0, 2, 4], 4)
    spoilt = {name: value.clone() if name in ("window", "state") else value for name, value in arguments.items()}
    beyond = (torch.arange(4)[:, None] >= arguments["counts"]).flatten()
    spoilt["projected"] = torch.where(beyond[:, None], garbage, arguments["projected"])
    assert same_bits(block(**spoilt), block(**arguments))
    for one in (spoilt, arguments):
        commit(**one)
    assert all(same_bits(spoilt[name], arguments[name]) for name in ("window", "state"))
    assert bool(spoilt["state"].isfinite().all())


@both
def test_rows_of_none_keep_their_bits_whatever_they_hold(ops):
    arguments = block_of(SMALL, [2, 0], 3)
    arguments["state"][1], arguments["window"][1], arguments["position"][1] = float("nan"), float("inf"), -7
    run(ops, arguments)


@both
def test_nothing_to_do(ops):
    arguments = block_of(SMALL, [], 2)
    assert ops[0](**arguments).shape == (0, 32)
    ops[1](**arguments)


# ---------------------------------------------------------------------------------------------------- dependent launch


class LateStores:
    """What a kernel has stored is seen when the next one waits for it, and no earlier."""

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def delay(self, buffer: torch.Tensor, stored: torch.Tensor, before: torch.Tensor) -> None:
        buffer.copy_(before)
        self._pending.append((buffer, stored))

    def flush(self) -> None:
        for buffer, stored in self._pending:
            buffer.copy_(stored)
        self._pending = []


@pytest.fixture
def stores(monkeypatch) -> Iterator[LateStores]:
    from deepspeed_hybrid.ops.triton import dependent, gdn_block

    late = LateStores()
    monkeypatch.setattr(gdn_block, "pdl", lambda tensor: {"PDL": True, "launch_pdl": True})
    monkeypatch.setattr(dependent, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(dependent, "gdc_wait", late.flush)
    return late


@pytest.mark.interpreter
@interpreted
@pytest.mark.parametrize("kernel", [block_kernel, commit_kernel], ids=["block", "commit"])
def test_what_the_kernel_before_stores_is_waited_for(stores, kernel):
    """The products, and how many of them count. A token sees what the one before it made of the state, in any case."""
    arguments = block_of(SMALL, [3, 1, 0, 4], 4)
    out, window, state = step_by_step(arguments)
    for name in ("projected", "counts"):
        buffer = arguments[name]
        stores.delay(buffer, buffer.clone(), torch.full_like(buffer, 1))
    mine = kernel(**arguments)
    if kernel is block_kernel:
        assert_close(mine, out)
    else:
        assert same_bits(arguments["window"], window)
        assert_close(arguments["state"], state)


# -------------------------------------------------------------------------------------------------------------- as ops


@pytest.mark.parametrize("op", [gdn_block_op, gdn_commit_op])
def test_opcheck(op):
    torch.library.opcheck(op, (), block_of(SMALL, [2, 0, 1], 2))


@pytest.mark.parametrize("op", [gdn_block, gdn_commit])
def test_there_is_no_gradient(op):
    arguments = block_of(SMALL, [2], 2)
    arguments["projected"].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{op.__name__} is for inference and has no gradient"):
        op(**arguments)


@both
@pytest.mark.parametrize(
    "name, change, message",
    [
        ("counts", lambda tensor: tensor.int(), "counts must be contiguous int64"),
        ("counts", lambda tensor: tensor[:, None], "counts must be contiguous int64"),
        ("projected", lambda tensor: tensor[:-1], "as many rows for each token as counts, 2"),
        ("projected", lambda tensor: tensor[:, :-1], "projected must have shape"),
        ("state", lambda tensor: tensor.double(), "state must be float32 or bfloat16 or float16"),
        ("position", lambda tensor: tensor[:1], "position must have shape"),
        ("window", lambda tensor: tensor[:1], "window must have a slot for each of the 2 rows"),
    ],
)
def test_arguments_that_do_not_fit_are_named(ops, name, change, message):
    arguments = block_of(SMALL, [2, 1], 2)
    before = arguments["state"].clone()
    for op in ops:
        with pytest.raises(RuntimeError, match=message):
            op(**{**arguments, name: change(arguments[name])})
    assert same_bits(arguments["state"], before)
