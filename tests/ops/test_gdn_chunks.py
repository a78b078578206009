# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gdn_chunks on a CPU, and its Triton kernels in the interpreter, against the recurrence in float64."""

import pytest
import torch
from decode_cases import same_bits
from gdn_chunks_cases import (
    Heads,
    arguments_of,
    as_training_rounds,
    assert_near,
    assert_same_roundings,
    oracle,
)
from gdn_decode_cases import interpreted
from glue_cases import poisoned_outputs
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_hybrid.ops.gdn_chunks import checked_sizes, gdn_chunks, gdn_chunks_reference, obstacle

SMALL = Heads(1, 2, 16, 32)


def kernel(**arguments) -> torch.Tensor:
    from deepspeed_hybrid.ops.triton.gdn_chunks import launch  # under the interpreter only

    names = ("query", "key", "value", "b", "a", "A_log", "dt_bias", "state", "slots", "key_heads")
    sizes = checked_sizes(*(arguments[name] for name in names))
    return launch(**{name: value for name, value in arguments.items() if name != "key_heads"}, sizes=sizes)


both = pytest.mark.parametrize(
    "op", [gdn_chunks, pytest.param(kernel, marks=[pytest.mark.interpreter, interpreted])], ids=["op", "kernel"]
)


def run(op, arguments: dict) -> torch.Tensor:
    """Over poison; what is read and the rows' states must agree, and every other slot must keep its bits."""
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    core, memory = oracle(**arguments)
    with poisoned_outputs():
        result = op(**arguments)
    dtype, state, slots = arguments["value"].dtype, arguments["state"], arguments["slots"]
    assert result.dtype == dtype and result.is_contiguous() and result.shape == core.shape
    assert_near(result, core, dtype)
    assert_near(state[slots], memory, min(dtype, state.dtype, key=lambda one: torch.finfo(one).bits))
    others = [slot for slot in range(len(state)) if slot not in slots.tolist()]
    assert same_bits(state[others], before.pop("state")[others])
    assert all(same_bits(arguments[name].clone(), value) for name, value in before.items())
    return result


@both
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("tokens", [1, 63, 64, 130])
def test_lengths(op, tokens, first):
    run(op, arguments_of(SMALL, 2, tokens, first=first))


@both
@pytest.mark.parametrize(
    "heads", [Heads(2, 2, 64, 16), Heads(1, 3, 32, 64)], ids=lambda heads: "-".join(map(str, heads))
)
def test_heads(op, heads):
    run(op, arguments_of(heads, 1, 70))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes(dtype, state_dtype):
    run(gdn_chunks, arguments_of(SMALL, 2, 70, dtype=dtype, state_dtype=state_dtype))


@pytest.mark.interpreter
@interpreted
def test_a_state_of_fewer_bits():
    """The interpreter has no products of bf16."""
    run(kernel, arguments_of(SMALL, 1, 70, state_dtype=torch.float16))


@pytest.mark.interpreter
@interpreted
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_roundings_are_those_of_the_training_forward(first):
    arguments = arguments_of(SMALL, 1, 130, first=first)
    expected, _ = as_training_rounds(**arguments)
    assert_same_roundings(kernel(**arguments), expected)


@both
@pytest.mark.parametrize("a, b", [(-30.0, 30.0), (30.0, 30.0), (-30.0, -30.0)], ids=["kept", "forgotten", "ignored"])
def test_extreme_gates(op, a, b):
    """One key over and over is the worst for the inverse of a chunk's triangle: all of it is one where gates are."""
    arguments = arguments_of(SMALL, 1, 130)
    arguments["key"].copy_(arguments["key"][:, :1].clone())
    arguments["a"].fill_(a)
    arguments["b"].fill_(b)
    run(op, arguments)


@both
def test_zeros_before_a_sequence_leave_a_state_of_zeros(op):
    """Padding comes as zeros of q, k and v, at whatever gates."""
    arguments = arguments_of(SMALL, 1, 90, first=True)
    shorter = {name: arguments[name][:, 70:].contiguous() for name in ("query", "key", "value", "b", "a")}
    for name in ("query", "key", "value"):
        arguments[name][:, :70] = 0.0
    state = arguments["state"].clone()
    result = run(op, arguments)
    assert not result[:, :70].any()
    expected = run(op, {**arguments, **shorter, "state": state})
    assert_near(result[:, 70:], expected.double(), torch.float16)


@pytest.mark.interpreter
@interpreted
def test_a_row_has_the_same_bits_in_any_batch():
    op, together = kernel, arguments_of(SMALL, 3, 70)
    state = together["state"].clone()
    results = op(**together)
    for row in range(3):
        alone = {name: together[name][row : row + 1] for name in ("query", "key", "value", "b", "a", "slots")}
        own = {**together, **alone, "state": state.clone()}
        assert same_bits(op(**own)[0], results[row])
        assert same_bits(own["state"][own["slots"]], together["state"][own["slots"]])


@both
def test_chunks_of_a_prompt_carry_the_state_on(op):
    arguments = arguments_of(SMALL, 1, 150, first=True)
    pieces = {**arguments, "state": arguments["state"].clone()}
    whole, parts = op(**arguments), []
    for start, end in ((0, 64), (64, 100), (100, 150)):
        part = {name: arguments[name][:, start:end] for name in ("query", "key", "value", "b", "a")}
        parts.append(op(**{**pieces, **part, "first": start == 0}))
    assert_near(torch.cat(parts, dim=1), whole.double(), torch.float16)


@both
def test_no_rows(op):
    assert op(**arguments_of(SMALL, 0, 3)).shape == (0, 3, 2, 32)


# -------------------------------------------------------------------------------------------------------------- as op


def test_a_gradient_is_refused():
    arguments = arguments_of(SMALL, 1, 3)
    arguments["value"].requires_grad_()
    with pytest.raises(RuntimeError, match="gdn_chunks is for inference and has no gradient"):
        gdn_chunks(**arguments)


def test_opcheck():
    arguments = arguments_of(SMALL, 2, 5)
    torch.library.opcheck(torch.ops.deepspeed_hybrid.gdn_chunks.default, tuple(arguments.values()))


def test_fake_tensors_need_no_kernel():
    with FakeTensorMode() as mode:
        arguments = {
            name: mode.from_tensor(value).to("meta") if isinstance(value, torch.Tensor) else value
            for name, value in arguments_of(SMALL, 3, 5).items()
        }
        result = gdn_chunks(**arguments)
    assert result.shape == (3, 5, 2, 32) and result.dtype == torch.float16


def test_what_the_kernels_take():
    assert obstacle(torch.bfloat16, 128, 128) is None
    assert "bfloat16 or float16" in obstacle(torch.float32, 128, 128)
    assert "dimensions, got 48 and 128" in obstacle(torch.bfloat16, 48, 128)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("query", lambda tensor: tensor.double(), "query must be bfloat16 or float16 or float32"),
        ("query", lambda tensor: tensor[0], "query must have 3 dimensions"),
        ("query", lambda tensor: tensor[:, :0], "query must have at least one token"),
        ("key", lambda tensor: tensor.float(), "key must be float16"),
        ("key", lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2], "key must be contiguous"),
        ("value", lambda tensor: tensor[..., 1:], "value must have shape"),
        ("b", lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2], "last dimension of b must be contiguous"),
        ("a", lambda tensor: tensor.int(), "a must be float32 or"),
        ("A_log", lambda tensor: tensor[1:], "A_log must have shape"),
        ("dt_bias", lambda tensor: tensor.to("meta"), "dt_bias is on meta, query on cpu"),
        ("state", lambda tensor: tensor.double(), "state must be float32"),
        ("state", lambda tensor: tensor[0], "state must have 4 dimensions"),
        ("slots", lambda tensor: tensor.int(), "slots must be int64"),
        ("key_heads", lambda _: 3, "key_heads must divide the 2 heads of state, got 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused(name, change, message):
    arguments = arguments_of(SMALL, 3, 5)
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        gdn_chunks_reference(**arguments)
