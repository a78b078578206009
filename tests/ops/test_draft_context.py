# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""draft_context on a CPU, and its Triton kernel in the interpreter, against an oracle, over a cache of NaN."""

import os

import pytest
import torch
from decode_cases import same_bits
from draft_cases import FP8, draft_context_arguments, draft_context_oracle
from glue_cases import moved
from tolerances import assert_close

from deepspeed_hybrid.ops.draft_context import draft_context, draft_context_op, stored

INTERPRETED = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


def kernel(**arguments) -> None:
    """The Triton kernel on CPU tensors."""
    from deepspeed_hybrid.ops.triton.draft_context import launch

    launch(**arguments)


RUNS = [pytest.param(draft_context, id="reference"), pytest.param(kernel, marks=INTERPRETED, id="kernel")]


def interpreted_well(exact: torch.Tensor) -> torch.Tensor:
    """Where Triton's interpreter rounds to fp8 as a GPU does: it loses a mantissa's carry, and small numbers' bits."""
    return exact.isnan() | (exact.frexp().mantissa.abs() < 1 - 2**-5) & (exact.abs() >= 2**-6)


def check(run, arguments: dict) -> None:
    before = moved(arguments, "cpu")
    expected = draft_context_oracle(**before)
    run(**arguments)
    used = slice(None) if before["idle"] is None else slice(-1)  # the last slot is scratch
    for name, exact in zip(("keys", "values"), expected, strict=True):
        mine = arguments[name][used]
        if mine.dtype == FP8:
            compared = interpreted_well(exact[used]) if run is kernel else slice(None)
            mine, right = mine.double()[compared], exact[used][compared]
            torch.testing.assert_close(mine, right, rtol=0.07, atol=2**-9, equal_nan=True)
        else:
            assert_close(mine, exact[used])
    for name, tensor in before.items():
        if isinstance(tensor, torch.Tensor) and name not in ("keys", "values"):
            assert same_bits(arguments[name], tensor), f"{name} was written to"


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize(
    "options",
    [dict(), dict(lanes=2), dict(lanes=3, idle=(1, 4)), dict(lanes=6, idle=(0,), rotary=10, dtype=torch.float16)],
    ids=str,
)
def test_all_layers_of_all_tokens(run, options, cache_dtype):
    options = {"dtype": torch.float32, **options}
    check(run, draft_context_arguments([7, 0, 8, 2, 9, 19], cache_dtype=cache_dtype, **options))


def test_what_fp8_cannot_hold_is_the_most_that_it_can():
    given = torch.tensor([0.3, 447.0, 449.0, 1e30, -float("inf"), float("nan")])
    assert stored(given, FP8).float().tolist()[:-1] == [0.3125, 448.0, 448.0, 448.0, -448.0]
    assert stored(given, FP8).float()[-1].isnan()


def test_opcheck():
    torch.library.opcheck(draft_context_op, tuple(draft_context_arguments([3, 9]).values()))


def test_there_is_no_gradient():
    arguments = draft_context_arguments([3])
    arguments["product"].requires_grad_()
    with pytest.raises(RuntimeError, match="draft_context is for inference and has no gradient"):
        draft_context(**arguments)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("product", lambda tensor: tensor[:, :-1], "product must be"),
        ("keys", lambda tensor: tensor.double(), "values must be"),
        ("values", lambda tensor: tensor[:, :-1], "values must be"),
        ("position", lambda tensor: tensor[:1], "product must be"),
        ("idle", lambda _: torch.zeros(2), "idle must be one of"),
        ("cos", lambda tensor: tensor[:, :7], "cos must be"),
        ("slots", lambda _: None, "lanes must be 1 to 3, not 0"),
    ],
)
def test_arguments_that_do_not_fit_are_named(name, change, message):
    arguments = draft_context_arguments([3, 9])
    with pytest.raises(RuntimeError, match=message):
        draft_context(**{**arguments, name: change(arguments[name])})
