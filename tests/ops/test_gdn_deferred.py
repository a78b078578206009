# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gdn_deferred on a CPU, and its kernel in Triton's interpreter: what as many decode steps do, with states that are
written at every 15th token."""

from functools import partial

import pytest
import torch
from decode_cases import same_bits
from gdn_block_cases import step_by_step
from gdn_decode_cases import REAL, SHAPES, Shape, interpreted
from gdn_deferred_cases import deferred_block, one_by_one, settled, without_rings
from glue_cases import poisoned_outputs
from tolerances import assert_close, assert_close_but_for_roundings

from deepspeed_hybrid.ops.gdn_decode import gdn_decode_reference
from deepspeed_hybrid.ops.gdn_deferred import BLOCK, checked_deferred, gdn_deferred, gdn_deferred_op
from deepspeed_hybrid.ops.gdn_heads import gdn_heads

SMALL = Shape(1, 2, 8, 16)


def kernel(projected, *, heads=gdn_heads, **named) -> torch.Tensor:
    """Behind the heads of the reference."""
    from deepspeed_hybrid.ops.triton.gdn_deferred import launch  # under the interpreter only

    layer = {name: named[name] for name in ("window", "conv_weight", "conv_bias", "A_log", "dt_bias")}
    of_rows = {name: named[name] for name in ("position", "counts", "key_heads", "rounded_heads")}
    rest = {name: named[name] for name in ("keys", "deltas", "decays", "state", "norm_weight", "eps", "answered")}
    sizes = checked_deferred(projected, **layer, **of_rows, **{name: rest[name] for name in rest if name != "eps"})
    made = heads(projected, **layer, **of_rows, key_dim=sizes.key_dim)
    of_rows = {name: named[name] for name in ("position", "counts")}
    return launch(projected, *made, window=named["window"], **rest, **of_rows, sizes=sizes)


both = pytest.mark.parametrize(
    "op",
    [gdn_deferred, pytest.param(kernel, marks=[pytest.mark.interpreter, interpreted])],
    ids=["op", "kernel"],
)


def run(op, arguments: dict) -> torch.Tensor:
    """Outputs and windows are those of decode steps, and so are the states with what is kept beside them."""
    out, window, state = step_by_step(gdn_decode_reference, without_rings(arguments))
    counts, before = arguments["counts"], arguments["state"].clone()
    live = (torch.arange(len(out) // len(counts))[:, None] < counts).flatten()
    with poisoned_outputs():
        mine = one_by_one(op, arguments)
    assert mine.dtype == arguments["projected"].dtype and mine.is_contiguous()
    assert (mine[~live] == 0).all()
    assert_close(mine[live], out[live])
    assert same_bits(arguments["window"], window)
    assert_close(settled(arguments)[:-1].to(state.dtype), state[:-1])
    ends = (arguments["position"] + counts - 1) // BLOCK > arguments["position"] // BLOCK
    untouched = torch.cat([~ends, torch.tensor([True])])
    assert same_bits(arguments["state"][untouched], before[untouched])
    return mine


@both
@pytest.mark.parametrize(
    "shape", [SHAPES[0], SHAPES[3], SHAPES[4], SHAPES[6]], ids=lambda shape: "-".join(map(str, shape))
)
def test_as_many_decode_steps(op, shape):
    run(op, deferred_block(shape, [19, 0, 7], 19))
    run(op, deferred_block(shape, [2], 2, bias=False))


@both
@pytest.mark.parametrize("first", [15, 16, 29, 30])
def test_from_every_place_of_the_ring(op, first):
    """Rows begin behind a prompt, whose tokens are in the state, and are full at their own times."""
    arguments = deferred_block(SMALL, [35, 16, 1, 0], 35)
    arguments["position"] = torch.tensor([first, first + 1, 14, 3])
    run(op, arguments)


@both
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dtypes(op, dtype, state_dtype):
    """Short of a full ring nothing of a state is rounded. (Of bf16 the interpreter cuts bits off.)"""
    arguments = deferred_block(SMALL, [9, 3], 9, dtype=dtype, state_dtype=state_dtype, weights=dtype)
    arguments["position"] = torch.tensor([32, 39])
    if state_dtype == torch.float32:
        run(op, arguments)
    else:
        wide = arguments | {"state": arguments["state"].float()}
        out, *_ = step_by_step(gdn_decode_reference, without_rings(wide))
        live = (torch.arange(9)[:, None] < arguments["counts"]).flatten()
        assert_close(one_by_one(op, arguments)[live], out[live])


@both
def test_heads_of_16_bits(op):
    """Next to decode steps, whose queries meet a whole state, a rounding more."""
    arguments = deferred_block(SMALL, [18, 5], 18, rounded=True, dtype=torch.float16, weights=torch.float16)
    out, *_ = step_by_step(gdn_decode_reference, without_rings(arguments))
    live = (torch.arange(18)[:, None] < arguments["counts"]).flatten()
    assert_close_but_for_roundings(one_by_one(op, arguments)[live], out[live])


@pytest.mark.interpreter
@interpreted
def test_products_of_queries_and_keys_are_rounded():
    """Without that, a fifth of the outputs that several tokens have made are not those of the op."""
    of_op, of_kernel = (deferred_block(REAL, [15], 15, rounded=True, dtype=torch.float16) for _ in range(2))
    for arguments in (of_op, of_kernel):
        arguments["position"] = torch.tensor([32])
    expected, mine = one_by_one(gdn_deferred, of_op), one_by_one(kernel, of_kernel)
    assert float((mine == expected).float().mean()) > 0.95


@both
def test_decays_that_leave_nothing(op):
    """What is left of a token is a product of decays, never a quotient."""
    arguments = deferred_block(SMALL, [20], 20, bias=False)
    arguments["A_log"], arguments["dt_bias"] = torch.full((2,), 5.0), torch.full((2,), 3.0)
    arguments["position"] = torch.tensor([16])
    mine = run(op, arguments)
    assert bool(mine.isfinite().all())


@pytest.mark.interpreter
@interpreted
def test_rows_do_not_depend_on_one_another():
    """A row has the same bits alone and beside rows that are elsewhere in their rings."""
    many = deferred_block(SMALL, [18, 18, 18], 18)
    slots = {name: many[name][:2].clone() for name in ("window", "state", "keys", "deltas", "decays")}
    rows = {name: many[name][:1] for name in ("counts", "position")}
    made = []

    def heads(*args, **named):
        made.append(gdn_heads(*args, **named))
        return made[-1]

    among_others = one_by_one(partial(kernel, heads=heads), many)
    steps = iter([tuple(part[:1] for part in parts) for parts in made])
    one = many | slots | rows | {"projected": many["projected"][::3]}
    alone = one_by_one(partial(kernel, heads=lambda *_, **__: next(steps)), one)
    assert same_bits(alone, among_others[::3])


@both
def test_rows_that_are_none_keep_their_bits_whatever_they_hold(op):
    arguments = deferred_block(SMALL, [3, 0], 3)
    arguments["state"][1], arguments["window"][1], arguments["position"][1] = float("nan"), float("inf"), -7
    before = {name: arguments[name][1].clone() for name in ("window", "state", "keys", "deltas", "decays")}
    out = one_by_one(op, arguments)
    assert (out[1::2] == 0).all() and bool(out.isfinite().all())
    assert all(same_bits(arguments[name][1], old) for name, old in before.items())


# -------------------------------------------------------------------------------------------------------------- as ops


@pytest.mark.parametrize("rounded", [False, True])
def test_opcheck(rounded):
    arguments = deferred_block(SMALL, [2, 0, 1], 2, rounded, dtype=torch.bfloat16)

    def checked(*args, **named):
        torch.library.opcheck(gdn_deferred_op, args, named)
        return gdn_deferred_op(*args, **named)

    for name in ("keys", "deltas", "decays"):  # opcheck compares bits, which no NaN has in common with itself
        arguments[name].zero_()
    one_by_one(checked, arguments)


def test_there_is_no_gradient():
    arguments = deferred_block(SMALL, [1], 1)
    arguments["projected"].requires_grad_()
    with pytest.raises(RuntimeError, match="gdn_deferred is for inference and has no gradient"):
        one_by_one(gdn_deferred, arguments)


@pytest.mark.parametrize(
    "name, change",
    [
        ("keys", lambda ring: ring[:, :, 1:]),
        ("keys", torch.Tensor.double),
        ("deltas", torch.Tensor.half),
        ("deltas", lambda ring: ring.transpose(2, 3).contiguous().transpose(2, 3)),
        ("decays", lambda ring: ring[1:]),
        ("state", lambda state: state[..., None]),
    ],
)
def test_arguments_that_do_not_fit(name, change):
    arguments = deferred_block(SMALL, [1, 1], 1)
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=name):
        one_by_one(gdn_deferred, arguments)


@pytest.mark.parametrize("name", ["position", "answered", "counts"])
def test_rows_of_another_number_are_refused(name):
    arguments = deferred_block(SMALL, [1, 1], 1) | {"answered": torch.ones(2, dtype=torch.int64)}
    arguments[name] = arguments[name][:1]
    with pytest.raises(RuntimeError, match=f"{name} must have shape"):
        gdn_deferred(**arguments)
