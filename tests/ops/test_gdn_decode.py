# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gdn_decode on a CPU, and its Triton kernel in the interpreter, against transformers' functions in float64."""

import pytest
import torch
from decode_cases import same_bits
from gdn_decode_cases import (
    SHAPES,
    Shape,
    arguments_of,
    buffers_of,
    decoded,
    interpreted,
    layer_of,
    one_token_oracle,
    oracle,
    tokens_of,
)
from glue_cases import DTYPES, poisoned_outputs, slice_of_poison
from tolerances import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_hybrid.ops.gdn_decode import (
    gdn_decode,
    gdn_decode_op,
    gdn_decode_reference,
    ring_from_window,
    window_from_ring,
)

SMALL = Shape(1, 2, 8, 16)


def kernel(**arguments) -> torch.Tensor:
    from deepspeed_hybrid.ops.triton.gdn_decode import launch  # under the interpreter only

    return launch(**arguments)


both = pytest.mark.parametrize(
    "op", [gdn_decode, pytest.param(kernel, marks=[pytest.mark.interpreter, interpreted])], ids=["op", "kernel"]
)


def copied(arguments: dict) -> dict:
    """Slices become packed."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def unchanged(arguments: dict, before: dict, but: tuple[str, ...] = ()) -> bool:
    return all(
        same_bits(value, before[name])
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and name not in but
    )


def run(op, shape: Shape, arguments: dict) -> torch.Tensor:
    """One token, over poison: it must agree with float64, and what no row in work owns must keep its bits."""
    before = copied(arguments)
    exact, exact_state = one_token_oracle(shape, before)
    with poisoned_outputs():
        out = op(**arguments)
    assert out.dtype == arguments["projected"].dtype and out.is_contiguous()
    rows, live = len(out), ~arguments["parked"]
    assert_close(out[live], exact[live])
    assert (out[~live] == 0).all()
    state = arguments["state"][:rows][live]
    assert_close(state.to(out.dtype) if state.dtype == torch.float32 else state, exact_state[live])  # of rounded keys

    expected = before["window"].clone()
    for row in live.nonzero().flatten().tolist():
        column = before["position"][row] % shape.kernel
        expected[row, :, column] = before["projected"][row, : shape.channels]
    assert same_bits(arguments["window"], expected)
    assert same_bits(arguments["state"][:rows][~live], before["state"][:rows][~live])
    assert same_bits(arguments["state"][rows:], before["state"][rows:])
    assert unchanged(arguments, before, but=("window", "state"))
    return out


# ---------------------------------------------------------------------------------------------------------- sequences


@both
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_sequences_from_their_first_token(op, shape):
    """Rows begin in different steps, and are parked before they begin and after they end."""
    layer, tokens = layer_of(shape), tokens_of(shape, 3, 12)
    exact, exact_state = oracle(shape, layer, tokens)
    buffers = buffers_of(shape, 3)
    assert_close(decoded(op, layer, tokens, buffers, starts=[0, 2, 1]), exact)
    assert_close(buffers["state"], exact_state)


@both
@pytest.mark.parametrize("prefix", [1, 3, 6])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[5]], ids=lambda shape: "-".join(map(str, shape)))
def test_sequences_after_a_prefill(op, shape, prefix):
    layer, tokens = layer_of(shape, bias=True), tokens_of(shape, 2, 10)
    exact, exact_state = oracle(shape, layer, tokens)
    raw = tokens[:, :prefix, : shape.channels].transpose(1, 2)
    window = torch.nn.functional.pad(raw, (shape.kernel, 0))[..., -shape.kernel :]
    buffers = {
        "window": ring_from_window(window, torch.tensor([prefix, prefix])),
        "state": oracle(shape, layer, tokens[:, :prefix])[1].float(),
    }
    assert_close(decoded(op, layer, tokens[:, prefix:], buffers, first=prefix), exact[:, prefix:])
    assert_close(buffers["state"], exact_state)
    in_order = window_from_ring(buffers["window"], torch.tensor([10, 10]))
    assert same_bits(in_order, tokens[:, -shape.kernel :, : shape.channels].transpose(1, 2).contiguous())


# ---------------------------------------------------------------------------------------------------------- one token


@both
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_one_token_anywhere(op, shape):
    run(op, shape, arguments_of(shape, 3, slots=4))
    run(op, shape, arguments_of(shape, 1, bias=False))


@both
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(op, dtype, state_dtype):
    run(op, SMALL, arguments_of(SMALL, 3, dtype=dtype, state_dtype=state_dtype, weights=dtype))


@both
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weights_of_another_dtype(op, weights):
    run(op, SMALL, arguments_of(SMALL, 2, weights=weights))


@both
def test_parked_rows_keep_their_bits_whatever_they_hold(op):
    arguments = arguments_of(SMALL, 4, slots=5)
    arguments["parked"] = torch.tensor([True, False, True, False])
    arguments["projected"][0], arguments["projected"][2] = float("nan"), float("inf")
    arguments["state"][0], arguments["window"][2] = float("nan"), float("nan")
    arguments["position"][0], arguments["position"][2] = -7, 2**62
    run(op, SMALL, arguments)


@both
def test_strides_of_projected_do_not_matter(op):
    shape = SHAPES[0]
    slices = arguments_of(shape, 3, dtype=torch.float16)
    packed = copied(slices)
    wider = copied(slices)
    width = packed["projected"].shape[1]
    wider["projected"] = slice_of_poison(packed["projected"], width + 16, 16)
    assert packed["projected"].is_contiguous() and not slices["projected"].is_contiguous()
    expected = run(op, shape, slices)
    for other in (packed, wider):
        assert same_bits(run(op, shape, other), expected)
        assert same_bits(other["state"], slices["state"])


@both
def test_a_row_has_the_same_bits_in_any_batch(op):
    shape = SHAPES[0]
    together = arguments_of(shape, 5)
    together["parked"][:] = False
    per_row = ("projected", "window", "state", "position", "parked")
    alone = [
        {name: value[row : row + 1].clone() if name in per_row else value for name, value in together.items()}
        for row in range(5)
    ]
    out = op(**together)
    for row, arguments in enumerate(alone):
        assert same_bits(op(**arguments)[0], out[row])
        assert same_bits(arguments["state"][0], together["state"][row])


@both
@pytest.mark.parametrize("extreme", [-1e4, -90.0, -30.0, 19.9, 20.1, 90.0, 1e4])
def test_extreme_gates(op, extreme):
    arguments = arguments_of(SMALL, 2)
    arguments["projected"][:, -2 * SMALL.value_heads :] = extreme
    run(op, SMALL, arguments)


@both
@pytest.mark.parametrize("extreme", [-1e4, -90.0, 90.0, 1e4])
def test_extreme_projections_stay_finite(op, extreme):
    arguments = arguments_of(SMALL, 2)
    arguments["projected"].fill_(extreme)
    assert op(**arguments).isfinite().all()
    assert arguments["state"].isfinite().all()


@both
def test_a_token_of_zeros(op):
    """The norms divide by what is then only their epsilon."""
    arguments = arguments_of(SMALL, 2, bias=False)
    for name in ("projected", "window", "state"):
        arguments[name].zero_()
    run(op, SMALL, arguments)


@both
@pytest.mark.parametrize("change", ["rows", "state"])
def test_nothing_to_do(op, change):
    arguments = arguments_of(SMALL, 0 if change == "rows" else 2, slots=2)
    if change == "rows":
        before = copied(arguments)
        assert op(**arguments).shape == (0, 32)
        assert unchanged(arguments, before)
    else:
        arguments["parked"][:] = True
        run(op, SMALL, arguments)


# --------------------------------------------------------------------------------------------------------------- rings


@pytest.mark.parametrize("kernel_size", [1, 3, 4, 8])
def test_a_ring_holds_each_token_at_its_position(kernel_size):
    lengths = torch.tensor([0, 1, 3, 4, 5, 11, 1000003])
    window = torch.zeros(7, 2, kernel_size)
    expected = torch.zeros(7, 2, kernel_size)
    for row, length in enumerate(lengths.tolist()):
        for position in range(max(0, length - kernel_size), length):
            values = torch.tensor([position + 1.0, -position])
            window[row, :, kernel_size - length + position] = values
            expected[row, :, position % kernel_size] = values
    ring = ring_from_window(window, lengths)
    assert same_bits(ring, expected) and ring.is_contiguous()
    assert same_bits(window_from_ring(ring, lengths), window)


# -------------------------------------------------------------------------------------------------------------- as op


def test_the_cpu_runs_the_reference():
    one, other = arguments_of(SMALL, 3), arguments_of(SMALL, 3)
    assert same_bits(gdn_decode(**one), gdn_decode_reference(**other))
    assert unchanged(one, other)


@pytest.mark.parametrize("name", ["projected", "conv_weight", "A_log", "norm_weight", "state"])
def test_a_gradient_is_refused(name):
    arguments = arguments_of(SMALL, 2)
    arguments[name] = arguments[name].clone().requires_grad_()
    before = {key: value.detach().clone() for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(RuntimeError, match="gdn_decode is for inference and has no gradient"):
        gdn_decode(**arguments)
    assert unchanged(arguments, before)
    exact, _ = one_token_oracle(SMALL, {**arguments, **before})
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = gdn_decode(**{**arguments, **{key: value.clone() for key, value in before.items()}})
        assert_close(out[0], exact[0])
    with torch.no_grad():
        assert not gdn_decode(**arguments).requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_opcheck(dtype, bias):
    torch.library.opcheck(gdn_decode_op, (), arguments_of(SMALL, 3, dtype=dtype, bias=bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_tensors_need_no_kernel(dtype):
    with FakeTensorMode():
        arguments = {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta")
            if isinstance(value, torch.Tensor)
            else value
            for name, value in arguments_of(SMALL, 3, dtype=dtype, slots=4).items()
        }
        out = gdn_decode(**arguments)
    assert out.shape == (3, 32) and out.dtype == dtype and out.device.type == "meta" and out.is_contiguous()


@both
@pytest.mark.parametrize(
    "name, change, message",
    [
        ("projected", lambda tensor: tensor.double(), "projected must be float32 or bfloat16 or float16"),
        ("projected", lambda tensor: tensor[0], "projected must have 2 dimensions"),
        ("projected", lambda tensor: tensor[:, :-1], "projected must have shape"),
        ("projected", lambda tensor: tensor.t().contiguous().t(), "last dimension of projected must be contiguous"),
        ("window", lambda tensor: tensor.half(), "window must be float32"),
        ("window", lambda tensor: tensor[:2], "window must have a slot for each of the 3 rows"),
        ("window", lambda tensor: tensor[:, :-1], "window must have 48 channels"),
        ("window", lambda tensor: tensor.repeat(1, 1, 3), "window must have 1 to 8 columns"),
        ("window", lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2), "window must be contiguous"),
        ("conv_weight", lambda tensor: tensor[:, None], "conv_weight must have shape"),
        ("conv_bias", lambda tensor: tensor[1:], "conv_bias must have shape"),
        ("A_log", lambda tensor: tensor.int(), "A_log must be float32 or"),
        ("dt_bias", lambda tensor: tensor.repeat_interleave(2)[::2], "dt_bias must be contiguous"),
        ("state", lambda tensor: tensor.double(), "state must be float32 or bfloat16 or float16"),
        ("state", lambda tensor: tensor[0], "state must have 4 dimensions"),
        ("state", lambda tensor: tensor[:2], "state must have a slot for each of the 3 rows"),
        ("state", lambda tensor: tensor.transpose(2, 3).contiguous().transpose(2, 3), "state must be contiguous"),
        ("norm_weight", lambda tensor: tensor.to("meta"), "norm_weight is on meta, projected on cpu"),
        ("position", lambda tensor: tensor.int(), "position must be int64"),
        ("parked", lambda tensor: tensor[:-1], "parked must have shape"),
        ("key_heads", lambda _: 3, "key_heads must divide the 2 value heads of state, got 3"),
        ("key_heads", lambda _: 0, "key_heads must divide"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused(op, name, change, message):
    arguments = arguments_of(SMALL, 3)
    arguments[name] = change(arguments[name])
    before = copied(arguments)
    # A CPU op that gets a tensor on meta goes to the fake, which has no values to look at: ask the reference itself.
    op = gdn_decode_reference if op is gdn_decode else op
    with pytest.raises(RuntimeError, match=message):
        op(**arguments)
    del before["norm_weight"], arguments["norm_weight"]
    assert unchanged(arguments, before)
