# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""keep_tokens on a CPU, and its Triton kernel in the interpreter: bits in their places, and none anywhere else."""

import pytest
import torch
from decode_cases import same_bits
from gdn_decode_cases import interpreted
from keep_tokens_cases import arguments_of, entering, kept

from deepspeed_hybrid.ops.keep_tokens import keep_tokens, keep_tokens_reference


def kernel(**arguments) -> None:
    from deepspeed_hybrid.ops.triton.keep_tokens import launch  # under the interpreter only

    launch(**arguments)


both = pytest.mark.parametrize(
    "op", [keep_tokens, pytest.param(kernel, marks=[pytest.mark.interpreter, interpreted])], ids=["op", "kernel"]
)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, heads, tokens, size", [(1, 1, 1, 1), (2, 3, 17, 20), (3, 2, 9, 256), (1, 2, 70, 32)])
def test_places(op, rows, heads, tokens, size, dtype):
    arguments = arguments_of(rows, heads, tokens, size, dtype)
    expected = kept(**arguments)
    op(**arguments)
    assert all(same_bits(arguments[name], buffer) for name, buffer in expected.items())


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, heads, tokens, size", [(1, 1, 1, 1), (5, 3, 17, 20), (3, 2, 9, 256), (4, 2, 70, 32)])
def test_a_row_that_enters_leaves_zeros_behind_it(op, rows, heads, tokens, size, dtype):
    arguments = entering(arguments_of(rows, heads, tokens, size, dtype))
    expected = kept(**arguments)
    op(**arguments)
    assert all(same_bits(arguments[name], buffer) for name, buffer in expected.items())


@both
def test_a_slot_longer_than_a_tile_is_cleared(op):
    arguments = entering(arguments_of(2, 1, 3, 256))
    for name in ("keys", "values"):
        arguments[name] = torch.full((4, 1, 300, 256), float("nan"))
    expected = kept(**arguments)
    op(**arguments)
    assert all(same_bits(arguments[name], buffer) for name, buffer in expected.items())


@both
def test_no_tokens(op):
    arguments = arguments_of(0, 2, 3, 16)
    op(**arguments)
    assert arguments["keys"].isnan().all() and arguments["values"].isnan().all()


def test_opcheck():
    arguments = arguments_of(2, 2, 5, 8)
    for case in (arguments, entering(arguments)):
        torch.library.opcheck(torch.ops.deepspeed_hybrid.keep_tokens.default, tuple(case.values()))


def test_a_gradient_is_refused():
    arguments = arguments_of(1, 1, 2, 4)
    arguments["value"] = arguments["value"].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="keep_tokens is for inference and has no gradient"):
        keep_tokens(**arguments)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("keys", lambda tensor: tensor.double(), "keys must be"),
        ("keys", lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2), "keys must be contiguous"),
        ("values", lambda tensor: tensor[:1], "values must be"),
        ("key", lambda tensor: tensor[0], "key must have 4 dimensions"),
        ("key", lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2], "last dimension of key must be contiguous"),
        ("value", lambda tensor: tensor.half(), "value must be"),
        ("slots", lambda tensor: tensor.int(), "slots must be"),
        ("positions", lambda tensor: tensor[:, 1:], "positions must be"),
        ("positions", lambda tensor: tensor.to("meta"), "positions is on meta"),
        ("lengths", lambda tensor: tensor[:1], "lengths must be"),
        ("lengths", lambda tensor: tensor.int(), "lengths must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused(name, change, message):
    arguments = entering(arguments_of(2, 2, 5, 8))
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        keep_tokens_reference(**arguments)
