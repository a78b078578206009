# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""attention_decode by the op attention_streamed against float64: the edges of tiles and splits, all sizes that it
takes, and steps in a row of which none waits for the host."""

import pytest
import torch
from attention_cases import attention_arguments, only_row, run_attention
from decode_cases import same_bits
from glue_cases import moved

from deepspeed_hybrid.ops import attention_streamed
from deepspeed_hybrid.ops.attention_decode import attention_decode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

QWEN = {"query_heads": 16, "kv_heads": 4, "head_dim": 256, "rotary": 64}
SHAPES = {
    "qwen3_5": QWEN,
    "llama": {"query_heads": 32, "kv_heads": 8, "head_dim": 128, "rotary": 128, "gated": False, "norm_offset": 0.0},
    "1": {"query_heads": 2, "kv_heads": 2, "head_dim": 256, "rotary": 64, "gated": False, "normed": False},
    "2": {"query_heads": 4, "kv_heads": 2, "head_dim": 256, "rotary": 256},
    "7": {"query_heads": 7, "kv_heads": 1, "head_dim": 128, "rotary": 0},
    "8": {"query_heads": 16, "kv_heads": 2, "head_dim": 128, "rotary": 34, "normed": False},
}
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 96, 128, 129, 500, 1024, 1025, 2100]
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def streamed(monkeypatch):
    """Every call is the op's."""
    if attention_streamed.obstacle(0) is not None:
        pytest.skip(attention_streamed.obstacle(0))
    calls, launch = [], attention_streamed.launch
    monkeypatch.setattr(attention_streamed, "launch", lambda *arguments: calls.append(1) or launch(*arguments))
    yield
    assert calls


def arguments_on_gpu(lengths: list[int], shape: str = "qwen3_5", dtype: torch.dtype = torch.bfloat16, **options):
    options = {"capacity": max(lengths) + 12} | SHAPES[shape] | options
    return attention_arguments(lengths, dtype=dtype, device="cuda", **options)


@pytest.mark.parametrize("splits", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_against_float64(dtype, shape, splits):
    run_attention(attention_decode, arguments_on_gpu(LENGTHS, shape, dtype, parked=True) | {"splits": splits})


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("options", [{"cos_dtype": torch.bfloat16}, {"norm_dtype": torch.float32}], ids=str)
def test_dtypes_mix(options, seed):
    run_attention(attention_decode, arguments_on_gpu(LENGTHS, seed=seed, **options))


@pytest.mark.parametrize("capacity", [1, 4, 16, 20])
def test_a_capacity_of_few_tokens(capacity):
    """Shorter than a tile, whose tokens may lie in the next head, or behind the cache."""
    for splits in (0, 1, 64):
        run_attention(attention_decode, arguments_on_gpu([capacity, 1], capacity=capacity) | {"splits": splits})


@pytest.mark.parametrize("splits", [0, 33, 64])
def test_long_rows(splits):
    run_attention(attention_decode, arguments_on_gpu([16384, 9001, 20000]) | {"splits": splits})


def test_all_rows_parked():
    for splits in (1, 5):
        arguments = arguments_on_gpu([40, 3], parked=False) | {"splits": splits}
        arguments["parked"].fill_(True)
        arguments["position"].fill_(-7)
        run_attention(attention_decode, arguments)


@pytest.mark.parametrize("splits", [1, 6, 16])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(splits, dtype):
    arguments = arguments_on_gpu(LENGTHS * 3, dtype=dtype, parked=True) | {"splits": splits}
    alone = {row: only_row(arguments, row) for row in range(0, len(LENGTHS), 3)}
    together = attention_decode(**arguments)
    for row, arguments in alone.items():
        assert same_bits(attention_decode(**arguments)[0], together[row])


@pytest.mark.parametrize("splits", [0, 1, 8])
def test_steps_in_a_row_read_what_those_before_wrote(splits):
    """Each starts before the one ahead of it has ended."""
    arguments = arguments_on_gpu([200, 63, 1, 400], capacity=640, poison=False) | {"splits": splits}
    twin, tokens = moved(arguments, "cuda"), 48
    steps = [arguments_on_gpu([1] * 4, seed=seed)["projected"] for seed in range(tokens)]
    places = [arguments["position"] + step for step in range(tokens)]
    torch.cuda.synchronize()
    rushed = [
        attention_decode(**arguments | {"projected": projected, "position": position})
        for projected, position in zip(steps, places, strict=True)
    ]
    for out, projected, position in zip(rushed, steps, places, strict=True):
        torch.cuda.synchronize()
        assert same_bits(out, attention_decode(**twin | {"projected": projected, "position": position}))
    for name in ("keys", "values"):
        assert same_bits(arguments[name], twin[name])
