# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton gdn_conv on a GPU against float64 on the CPU, at the sizes of a model."""

from functools import partial

import pytest
import torch
from decode_cases import same_bits
from gdn_conv_cases import REAL, SMALL, WIDTHS, arguments_of, conv_oracle, slots_of, windowed
from glue_cases import DTYPES, moved, poisoned_outputs
from tolerances import assert_close

from deepspeed_hybrid.ops import gdn_conv as module
from deepspeed_hybrid.ops.gdn_decode import window_from_ring

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

gdn_conv = partial(windowed, module.gdn_conv)
gdn_conv_reference = partial(windowed, module.gdn_conv_reference)


def run(arguments: dict) -> tuple[torch.Tensor, ...]:
    """On the GPU, over poison; q, k and v must agree with float64. ``arguments`` are on the CPU, and stay."""
    on_gpu = moved(arguments, "cuda")
    with poisoned_outputs():
        results = gdn_conv(**on_gpu)
    *exact, window = conv_oracle(**arguments)
    for result in results:
        assert result.dtype == arguments["qkv"].dtype and result.is_contiguous()
    for result, expected in zip(results, exact, strict=False):
        assert_close(result, expected)
    assert same_bits(results[-1].cpu(), window.contiguous())
    for name, value in on_gpu.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(value.cpu().contiguous(), arguments[name].contiguous())
    return results


@pytest.mark.parametrize("rows, tokens", [(1, 1), (1, 300), (3, 2), (5, 64), (2, 129)])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_models_sizes(dtype, bias, rows, tokens):
    run(arguments_of(REAL, rows, tokens, dtype=dtype, weights=dtype, bias=bias))


@pytest.mark.parametrize("window", [True, False], ids=["later", "first"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_queries_and_keys_have_length_one(dtype, window):
    arguments = {**arguments_of(REAL, 3, 150, dtype=dtype), "head_dim": 128}
    run(arguments if window else {**arguments, "window": None})


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 63, 64, 65, 200])
@pytest.mark.parametrize("widths", WIDTHS, ids=lambda widths: "-".join(map(str, widths)))
def test_other_sizes(widths, tokens):
    run(arguments_of(widths, 3, tokens))
    run(arguments_of(widths, 1, tokens, dtype=torch.bfloat16, bias=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_with_a_weight_of_fp32_the_output_is_rounded_once(dtype):
    arguments = arguments_of(REAL, 1, 100, dtype=dtype)
    exact = conv_oracle(**arguments)[:3]
    for result, expected in zip(gdn_conv(**moved(arguments, "cuda")), exact, strict=False):
        error = (result.cpu().double() - expected).abs()
        assert (error <= expected.abs() * (torch.finfo(dtype).eps / 2) + 1e-5).all()


@pytest.mark.parametrize("extreme", [-1e4, -200.0, -90.0, -20.0, 20.0, 90.0, 200.0, 1e4])
def test_extremes(extreme):
    arguments = arguments_of(SMALL, 1, 5)
    arguments["qkv"].fill_(0.0)
    arguments["window"].zero_()
    arguments["conv_bias"].fill_(extreme)
    run(arguments)


@pytest.mark.parametrize("cuts", [[1], [2, 3], [64], [5, 65, 66]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_are_the_whole_to_the_last_bit(dtype, cuts):
    arguments = moved(arguments_of(REAL, 2, 150, dtype=dtype), "cuda")
    whole = gdn_conv(**arguments)
    parts, window = [], arguments["window"]
    for start, end in zip([0, *cuts], [*cuts, 150], strict=True):
        *part, window = gdn_conv(**{**arguments, "qkv": arguments["qkv"][:, start:end], "window": window})
        parts.append(part)
    joined = [torch.cat(chunks, dim=1) for chunks in zip(*parts, strict=True)]
    assert all(same_bits(one, other) for one, other in zip([*joined, window], whole, strict=True))


def test_strides_do_not_matter():
    """A packed qkv is read in vectors, and columns of a tensor of odd width one by one."""
    arguments = moved(arguments_of(REAL, 2, 70, dtype=torch.bfloat16), "cuda")
    packed = {**arguments, "qkv": arguments["qkv"].contiguous()}
    assert not arguments["qkv"].is_contiguous()
    for one, other in zip(gdn_conv(**arguments), gdn_conv(**packed), strict=True):
        assert same_bits(one, other)


def test_a_row_has_the_same_bits_in_any_batch():
    together = moved(arguments_of(REAL, 6, 66, dtype=torch.bfloat16), "cuda")
    results = gdn_conv(**together)
    for first, last in ((0, 1), (5, 6), (2, 5)):
        few = {name: together[name][first:last] for name in ("qkv", "window")}
        for one, other in zip(gdn_conv(**{**together, **few}), results, strict=True):
            assert same_bits(one, other[first:last])


def test_places_beyond_32_bits():
    """The last row's tokens lie more than 2^31 elements behind the first's."""
    arguments = arguments_of(SMALL, 2, 40, dtype=torch.bfloat16)
    far = moved(arguments, "cuda")
    storage = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    far["qkv"] = storage.as_strided((2, 40, SMALL.channels), (2**31, SMALL.channels, 1)).copy_(arguments["qkv"])
    for one, other in zip(gdn_conv(**far), gdn_conv(**moved(arguments, "cuda")), strict=True):
        assert same_bits(one, other)


def test_replays_of_a_graph():
    """Each carries the window on to the next, through the slots."""
    arguments = arguments_of(REAL, 2, 90, dtype=torch.bfloat16)
    on_gpu = moved(arguments, "cuda")
    whole = gdn_conv(**on_gpu)
    step = {**on_gpu, "qkv": on_gpu["qkv"][:, :30].contiguous(), "window": on_gpu["window"].clone()}
    slots = slots_of(**step)
    slots["lengths"].fill_(0)
    module.gdn_conv(**step, **slots)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = module.gdn_conv(**step, **slots)
        step["window"].copy_(window_from_ring(slots["ring"][slots["slots"]], slots["lengths"]))
    for start in (0, 30, 60):
        step["qkv"].copy_(on_gpu["qkv"][:, start : start + 30])
        slots["lengths"].add_(30)
        for part in parts:
            part.fill_(float("nan"))
        graph.replay()
        for part, expected in zip(parts, whole, strict=False):
            assert same_bits(part, expected[:, start : start + 30].contiguous())
    assert same_bits(step["window"], whole[-1])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_sync_is_needed():
    arguments = moved(arguments_of(SMALL, 3, 5), "cuda")
    arguments |= slots_of(**arguments)
    module.gdn_conv(**arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.gdn_conv(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_reference_agrees_on_the_gpu():
    arguments = moved(arguments_of(SMALL, 3, 70, dtype=torch.bfloat16), "cuda")  # torch's conv may run in TF32
    for one, other in zip(gdn_conv(**arguments), gdn_conv_reference(**arguments), strict=True):
        assert_close(one, other)


def test_a_gradient_is_refused():
    arguments = moved(arguments_of(SMALL, 2, 3), "cuda")
    arguments["conv_weight"].requires_grad_()
    with pytest.raises(RuntimeError, match="gdn_conv is for inference and has no gradient"):
        gdn_conv(**arguments)


def test_bad_arguments_are_refused():
    arguments = moved(arguments_of(SMALL, 2, 3), "cuda")
    with pytest.raises(RuntimeError, match="window is on cpu, qkv on cuda:0"):
        gdn_conv(**arguments | {"window": arguments["window"].cpu()})
    with pytest.raises(RuntimeError, match="window must be float32, got torch.float16"):
        gdn_conv(**arguments | {"window": arguments["window"].half()})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    arguments = moved(arguments_of(SMALL, 3, 5, dtype=dtype), "cuda")
    torch.library.opcheck(torch.ops.deepspeed_hybrid.gdn_conv.default, (), {**arguments, **slots_of(**arguments)})
