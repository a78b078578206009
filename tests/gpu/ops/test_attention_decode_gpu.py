# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The CUDA attention_decode against float64: real head shapes, ragged lengths, graphs, and no host sync."""

import pytest
import torch
from attention_cases import attention_arguments, attention_oracle, only_row, run_attention
from decode_cases import same_bits
from glue_cases import DTYPES, moved
from tolerances import assert_close, assert_close_but_for_roundings

from deepspeed_hybrid.ops import attention_streamed
from deepspeed_hybrid.ops.attention_decode import attention_decode, attention_decode_op, attention_decode_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CAPACITY = 2112
SHAPES = {
    "qwen3_5": {"query_heads": 16, "kv_heads": 4, "head_dim": 256, "rotary": 64},
    "128": {"query_heads": 32, "kv_heads": 8, "head_dim": 128, "rotary": 128, "gated": False, "norm_offset": 0.0},
    "64": {"query_heads": 32, "kv_heads": 32, "head_dim": 64, "rotary": 64, "gated": False, "normed": False},
    "80": {"query_heads": 8, "kv_heads": 8, "head_dim": 80, "rotary": 32, "gated": False, "normed": False},
}
LENGTHS = [1, 31, 32, 33, 64, 65, 500, 1024, 2047, 2100]


@pytest.fixture(autouse=True, params=["chosen", "triton"])
def kernel(request, monkeypatch):
    """The op that a layer has by its sizes, and Triton's kernels for every one."""
    if request.param == "triton":
        monkeypatch.setattr(attention_streamed, "takes", lambda *arguments: False)


def arguments_on_gpu(batch: int, shape: str = "qwen3_5", capacity: int = CAPACITY, **options) -> dict:
    """Rows of ragged lengths, the longest first."""
    lengths = [LENGTHS[-1 - row % len(LENGTHS)] for row in range(batch)]
    return attention_arguments(lengths, capacity=capacity, device="cuda", **SHAPES[shape], **options)


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(batch, shape, dtype):
    run_attention(attention_decode, arguments_on_gpu(batch, shape, dtype=dtype, parked=True))


@pytest.mark.parametrize("splits", [1, 2, 7, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_splits(splits, dtype):
    run_attention(attention_decode, arguments_on_gpu(11, dtype=dtype, parked=True) | {"splits": splits})


@pytest.mark.parametrize("block, num_warps, num_stages", [(16, 4, 2), (32, 8, 3), (64, 4, 2), (64, 8, 2), (32, 2, 4)])
@pytest.mark.parametrize("splits", [1, 5])
def test_tuning_does_not_change_the_result(block, num_warps, num_stages, splits):
    from deepspeed_hybrid.ops.triton.attention_decode import launch

    def run(**arguments) -> torch.Tensor:
        return launch(**arguments, splits=splits, block=block, num_warps=num_warps, num_stages=num_stages)

    run_attention(run, arguments_on_gpu(11, dtype=torch.bfloat16, parked=True))


@pytest.mark.parametrize("options", [{"cos_dtype": torch.bfloat16}, {"norm_dtype": torch.float32}], ids=str)
def test_dtypes_mix(options):
    run_attention(attention_decode, arguments_on_gpu(11, dtype=torch.bfloat16, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned_columns(dtype):
    arguments = arguments_on_gpu(11, dtype=dtype)
    packed = arguments["projected"].contiguous()
    storage = packed.new_full((11, packed.shape[1] + 4), float("nan"))
    storage[:, 3:-1] = packed
    run_attention(attention_decode, arguments | {"projected": storage[:, 3:-1]})


def test_more_programs_than_a_short_capacity_has_blocks():
    lengths = [1, 2, 19]
    run_attention(attention_decode, attention_arguments(lengths, capacity=20, device="cuda", **SHAPES["qwen3_5"]))


@pytest.mark.parametrize("splits", [1, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(splits, dtype):
    arguments = arguments_on_gpu(64, dtype=dtype, parked=True) | {"splits": splits}
    alone = {row: only_row(arguments, row) for row in (0, 5, 63)}
    together = attention_decode(**arguments)
    for row, arguments in alone.items():
        assert same_bits(attention_decode(**arguments)[0], together[row])


@pytest.mark.parametrize("splits", [0, 1])
def test_inside_a_graph(splits):
    """Positions, projections and parked rows change between replays; the cache goes on."""
    arguments = arguments_on_gpu(11, dtype=torch.bfloat16, poison=False) | {"splits": splits}
    attention_decode(**arguments)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_decode(**arguments)
    for seed in range(1, 6):
        arguments["projected"].copy_(arguments_on_gpu(11, dtype=torch.bfloat16, seed=seed)["projected"])
        arguments["position"].copy_((arguments["position"] * seed + 17 * seed) % CAPACITY)
        arguments["parked"].copy_(torch.arange(11) % 4 == seed)
        out.fill_(float("nan"))
        before = moved(arguments, "cuda")
        graph.replay()
        exact, keys, values = attention_oracle(**before)
        assert_close_but_for_roundings(out, exact)
        assert_close_but_for_roundings(arguments["keys"], keys)
        assert_close(arguments["values"], values)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("splits", [0, 1])
def test_no_sync_is_needed(splits):
    arguments = arguments_on_gpu(3, dtype=torch.bfloat16, parked=True) | {"splits": splits}
    attention_decode(**arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention_decode(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_reference_agrees_on_the_gpu():
    arguments = arguments_on_gpu(3, parked=True)
    copy = moved(arguments, "cuda")
    assert_close_but_for_roundings(attention_decode(**arguments), attention_decode_reference(**copy))
    for name in ("keys", "values"):
        assert_close_but_for_roundings(arguments[name], copy[name])


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("projected", torch.Tensor.double, "projected must be float32, bfloat16 or float16"),
        ("cos", torch.Tensor.cpu, "cos is on cpu, and projected on cuda:0"),
        ("values", lambda tensor: tensor[:, :, :-1], "values must be"),
        ("position", torch.Tensor.int, "position must be torch.int64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused(name, change, message):
    arguments = attention_arguments([3, 4], device="cuda")
    with pytest.raises(RuntimeError, match=f"attention_decode: {message}"):
        attention_decode(**arguments | {name: change(arguments[name])})


def test_a_gradient_is_refused():
    arguments = attention_arguments([3, 4], device="cuda")
    arguments["q_norm"].requires_grad_()
    with pytest.raises(RuntimeError, match="attention_decode is for inference and has no gradient"):
        attention_decode(**arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    arguments = attention_arguments([3, 40], dtype=dtype, poison=False, device="cuda")
    torch.library.opcheck(attention_decode_op, (), arguments)
    torch.library.opcheck(attention_decode_op, (), arguments | {"splits": 2})
