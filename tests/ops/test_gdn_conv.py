# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gdn_conv on a CPU, and its Triton kernel in the interpreter, against float64 and transformers."""

from functools import partial
from unittest import mock

import pytest
import torch
from decode_cases import same_bits
from gdn_conv_cases import SMALL, WIDTHS, Widths, arguments_of, conv_oracle, slots_of, windowed
from gdn_decode_cases import interpreted
from glue_cases import DTYPES, poisoned_outputs, slice_of_poison
from models import tiny_model
from tolerances import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_hybrid.ops import gdn_conv as module

gdn_conv = partial(windowed, module.gdn_conv)
gdn_conv_reference = partial(windowed, module.gdn_conv_reference)
TOKENS = [1, 2, 3, 4, 63, 64, 65, 130]  # fewer than the window has, and around the edges of tiles


def raw_kernel(**arguments) -> tuple[torch.Tensor, ...]:
    """As many tokens a program as on a GPU, but in short runs side by side: the interpreter takes them at once."""
    from deepspeed_hybrid.ops.triton import gdn_conv as kernels  # under the interpreter only

    with mock.patch.multiple(kernels, RUN=2, RUNS=32):
        return kernels.launch(**arguments)


kernel = partial(windowed, raw_kernel)


both = pytest.mark.parametrize(
    "op", [gdn_conv, pytest.param(kernel, marks=[pytest.mark.interpreter, interpreted])], ids=["op", "kernel"]
)


def tensors(arguments: dict) -> dict:
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def run(op, arguments: dict) -> tuple[torch.Tensor, ...]:
    """Over poison: q, k and v must agree with float64, and the window must have its tokens' bits."""
    before = {name: value.clone() for name, value in tensors(arguments).items()}
    with poisoned_outputs():
        results = op(**arguments)
    *exact, window = conv_oracle(**arguments)
    for result, expected in zip(results, [*exact, window], strict=True):
        assert result.dtype == arguments["qkv"].dtype and result.is_contiguous()
        assert result.shape == expected.shape
    for result, expected in zip(results, exact, strict=False):
        assert_close(result, expected)
    assert same_bits(results[-1], window.contiguous())
    assert all(same_bits(arguments[name].clone(), value) for name, value in before.items())
    return results


def named(value) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


LONGEST = Widths(3, 9, 8)  # of windows
SIZES = [(widths, tokens) for widths in WIDTHS for tokens in (TOKENS if widths in (SMALL, LONGEST) else [1, 4, 65])]


@both
@pytest.mark.parametrize("widths, tokens", SIZES, ids=named)
def test_sizes(op, widths, tokens):
    run(op, arguments_of(widths, 2, tokens, bias=tokens % 2 == 0))


@pytest.mark.interpreter
@interpreted
@pytest.mark.parametrize("kernel_size", [1, 4, 8])
@pytest.mark.parametrize("tokens", [3, 67])
def test_runs_as_on_a_gpu(tokens, kernel_size):
    from deepspeed_hybrid.ops.triton.gdn_conv import launch

    run(partial(windowed, launch), {**arguments_of(Widths(8, 16, kernel_size), 1, tokens), "head_dim": 8})


@both
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(op, dtype, weights, bias):
    run(op, arguments_of(SMALL, 3, 7, dtype=dtype, weights=weights, bias=bias))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_with_a_weight_of_fp32_the_output_is_rounded_once(op, dtype):
    arguments = arguments_of(Widths(70, 33), 2, 40, dtype=dtype)
    # The interpreter cuts bf16 off where a GPU rounds to nearest.
    unit = torch.finfo(dtype).eps / (1 if op is kernel and dtype == torch.bfloat16 else 2)
    for result, exact in zip(op(**arguments)[:3], conv_oracle(**arguments)[:3], strict=True):
        assert ((result.double() - exact).abs() <= exact.abs() * unit + 1e-6).all()


@both
@pytest.mark.parametrize("extreme", [-80.0, -20.0, 20.0, 80.0, 1e4])
def test_extremes(op, extreme):
    arguments = arguments_of(SMALL, 1, 5)
    arguments["qkv"].fill_(0.0)
    arguments["window"].zero_()
    arguments["conv_bias"].fill_(extreme)
    run(op, arguments)


@both
def test_a_nan_stays_with_its_channel_and_the_tokens_that_reach_it(op):
    arguments = arguments_of(SMALL, 2, 9)
    arguments["window"][0, 3, 2] = float("nan")  # the last but one before these: reaches the first two
    arguments["qkv"][1, 4, 20] = float("nan")
    query, key, value, window = run(op, arguments)
    assert query.isnan().nonzero().tolist() == [[0, 0, 3], [0, 1, 3]]
    assert not key.isnan().any() and not window[0].isnan().any()
    assert value.isnan().nonzero().tolist() == [[1, token, 4] for token in (4, 5, 6, 7)]


@both
@pytest.mark.parametrize(
    "widths, cuts",
    [(SMALL, cuts) for cuts in ([1], [2, 3], [64], [5, 65, 66])]
    + [(widths, cuts) for widths in (Widths(70, 33), LONGEST) for cuts in ([1], [5, 65, 66])],
    ids=named,
)
def test_chunks_are_the_whole(op, widths, cuts):
    """To the last bit: the window hands on what the next chunk reaches."""
    arguments = arguments_of(widths, 2, 70)
    whole = op(**arguments)
    parts, window = [], arguments["window"]
    for start, end in zip([0, *cuts], [*cuts, 70], strict=True):
        *part, window = op(**{**arguments, "qkv": arguments["qkv"][:, start:end], "window": window})
        parts.append(part)
    joined = [torch.cat(chunks, dim=1) for chunks in zip(*parts, strict=True)]
    if op is kernel:
        assert all(same_bits(one, other) for one, other in zip([*joined, window], whole, strict=True))
    else:  # torch may choose another algorithm by the length
        assert same_bits(window, whole[-1])
        for one, other in zip(joined, whole, strict=False):
            assert_close(one, other)


@both
def test_strides_do_not_matter(op):
    slices = arguments_of(SMALL, 3, 6, dtype=torch.bfloat16)
    qkv = slices["qkv"].clone(memory_format=torch.contiguous_format)
    turned = slice_of_poison(qkv.transpose(0, 1).contiguous(), SMALL.channels + 1).transpose(0, 1)
    wider = slice_of_poison(qkv, 7 * SMALL.channels, 16)
    expected = run(op, slices)
    for other in (qkv, turned, wider, wider[:, ::1]):
        for one, two in zip(run(op, {**slices, "qkv": other}), expected, strict=True):
            assert same_bits(one, two)
    skipping = op(**{**slices, "qkv": slices["qkv"][:, ::2]})
    packed = op(**{**slices, "qkv": qkv[:, ::2].contiguous()})
    assert all(same_bits(one, two) for one, two in zip(skipping, packed, strict=True))


@both
def test_a_row_has_the_same_bits_in_any_batch(op):
    together = arguments_of(Widths(70, 33), 4, 66, dtype=torch.bfloat16)
    results = op(**together)
    for row in range(4):
        alone = {name: together[name][row : row + 1] for name in ("qkv", "window")}
        for one, other in zip(op(**{**together, **alone}), results, strict=True):
            assert same_bits(one[0], other[row])


@both
def test_no_rows(op):
    results = op(**arguments_of(SMALL, 0, 3))
    assert [tuple(result.shape) for result in results] == [(0, 3, 8), (0, 3, 8), (0, 3, 16), (0, 32, 4)]


@both
@pytest.mark.parametrize("tokens", [1, 2, 63, 65])
def test_no_window_is_a_window_of_zeros(op, tokens):
    arguments = arguments_of(SMALL, 2, tokens)
    arguments["window"].zero_()
    for one, other in zip(op(**{**arguments, "window": None}), op(**arguments), strict=True):
        assert same_bits(one, other)


@both
@pytest.mark.parametrize("widths, head_dim", [(SMALL, 8), (Widths(256, 160), 128)])
def test_heads_of_queries_and_keys_are_normalised(op, widths, head_dim):
    arguments = {**arguments_of(widths, 2, 34), "head_dim": head_dim}
    run(op, arguments)
    zeros = {**arguments, "qkv": torch.zeros_like(arguments["qkv"]), "window": None, "conv_bias": None}
    assert not any(result.any() for result in op(**zeros))


@both
def test_like_transformers(op):
    """A sequence from its beginning through the module that a layer has."""
    arguments = arguments_of(SMALL, 2, 11, bias=False)
    arguments["window"].zero_()
    conv = tiny_model("gdn_only").model.layers[0].linear_attn.conv1d
    conv.groups, conv.weight.data = SMALL.channels, arguments["conv_weight"][:, None]
    with torch.no_grad():
        expected = torch.nn.functional.silu(conv(arguments["qkv"].transpose(1, 2))[..., :11]).transpose(1, 2)
    for result, part in zip(op(**arguments), expected.split([8, 8, 16], dim=-1), strict=False):
        assert_close(result, part)


# -------------------------------------------------------------------------------------------------------------- as op


def test_the_cpu_runs_the_reference():
    arguments = arguments_of(SMALL, 3, 5)
    for one, other in zip(gdn_conv(**arguments), gdn_conv_reference(**arguments), strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name", ["qkv", "window", "conv_weight", "conv_bias"])
def test_a_gradient_is_refused(name):
    arguments = arguments_of(SMALL, 2, 3)
    arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="gdn_conv is for inference and has no gradient"):
        gdn_conv(**arguments)
    with torch.no_grad():
        assert not any(result.requires_grad for result in gdn_conv(**arguments))


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype, rows, tokens):
    arguments = arguments_of(SMALL, rows, tokens, dtype=dtype, bias=rows == 1)
    arguments.update(head_dim=8 if rows == 1 else None)
    torch.library.opcheck(torch.ops.deepspeed_hybrid.gdn_conv.default, (), {**arguments, **slots_of(**arguments)})


def test_fake_tensors_need_no_kernel():
    with FakeTensorMode():
        arguments = {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta")
            if isinstance(value, torch.Tensor)
            else value
            for name, value in arguments_of(SMALL, 3, 5, dtype=torch.bfloat16).items()
        }
        results = module.gdn_conv(**arguments, **slots_of(**arguments))
    assert [tuple(result.shape) for result in results] == [(3, 5, 8), (3, 5, 8), (3, 5, 16)]
    assert all(result.dtype == torch.bfloat16 and result.is_contiguous() for result in results)


@pytest.mark.parametrize(
    "op",
    [module.gdn_conv_reference, pytest.param(raw_kernel, marks=[pytest.mark.interpreter, interpreted])],
    ids=["reference", "kernel"],
)
@pytest.mark.parametrize(
    "name, change, message",
    [
        ("qkv", lambda tensor: tensor.double(), "qkv must be float32 or bfloat16 or float16"),
        ("qkv", lambda tensor: tensor[0], "qkv must have 3 dimensions"),
        ("qkv", lambda tensor: tensor[:, :0], "qkv must have at least one token"),
        ("qkv", lambda tensor: tensor[..., :-1], "must be the 31 channels of qkv, got 8 and 16"),
        ("qkv", lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2), "last dimension of qkv must be"),
        ("window", lambda tensor: tensor.half(), "window must be float32"),
        ("window", lambda tensor: tensor[0], "window must have 3 dimensions"),
        ("window", lambda tensor: tensor[:2], "window must have shape"),
        ("window", lambda tensor: tensor[..., 1:], "window must have shape"),
        ("window", lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2), "window must be contiguous"),
        ("conv_weight", lambda tensor: tensor[:, None], "conv_weight must have shape"),
        ("conv_weight", lambda tensor: tensor.int(), "conv_weight must be float32 or"),
        ("conv_weight", lambda tensor: tensor.to("meta"), "conv_weight is on meta, qkv on cpu"),
        ("conv_bias", lambda tensor: tensor[1:], "conv_bias must have shape"),
        ("conv_bias", lambda tensor: tensor.repeat_interleave(2)[::2], "conv_bias must be contiguous"),
        ("key_dim", lambda _: 0, "must be the 32 channels of qkv, got 0 and 16"),
        ("head_dim", lambda _: 3, "head_dim must be a power of two up to 256 that divides key_dim=8, got 3"),
        ("head_dim", lambda _: 16, "that divides key_dim=8, got 16"),
        ("value_dim", lambda _: 17, "must be the 32 channels of qkv, got 8 and 17"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused(op, name, change, message):
    arguments = arguments_of(SMALL, 3, 5)
    slots = slots_of(**arguments)
    arguments[name] = change(arguments[name])
    # A CPU op that gets a tensor on meta goes to the fake, which has no values to look at: ask the reference itself.
    with pytest.raises(RuntimeError, match=message):
        op(**arguments, **slots)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("ring", lambda tensor: tensor[:, 1:], "ring must have shape"),
        ("ring", lambda tensor: tensor.double(), "ring must be float32"),
        ("ring", lambda tensor: tensor.repeat(1, 1, 3), "ring must have 1 to 8 columns, got 12"),
        ("slots", lambda tensor: tensor.int(), "slots must be int64"),
        ("lengths", lambda tensor: tensor[1:], "lengths must have shape"),
    ],
    ids=["other channels", "another dtype", "too many columns", "slots", "lengths"],
)
def test_bad_slots_are_refused(name, change, message):
    arguments = arguments_of(SMALL, 3, 5)
    slots = slots_of(**arguments)
    slots[name] = change(slots[name])
    with pytest.raises(RuntimeError, match=message):
        module.gdn_conv_reference(**arguments, **slots)
