# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton attention_block on a GPU: attention_decode, token by token, each of which the host waits for."""

import pytest
import torch
from attention_cases import attention_arguments
from glue_cases import DTYPES, moved, poisoned_outputs
from tolerances import assert_close

from deepspeed_hybrid.ops.attention_block import attention_block, token_by_token
from deepspeed_hybrid.ops.attention_decode import attention_decode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

QWEN = dict(query_heads=16, kv_heads=4, head_dim=256, rotary=64)
LLAMA = dict(query_heads=32, kv_heads=8, head_dim=128, rotary=128, gated=False, normed=False)


def block_of(lengths: list[int], tokens: int, **options) -> dict:
    """Row r has its first (3 r + tokens) % (tokens + 1) tokens."""
    lanes, options = len(lengths), dict(capacity=640, device="cuda", poison=False, **options)
    arguments = attention_arguments([length + 1 for length in lengths], **options)
    more = attention_arguments([1] * (tokens * lanes), seed=1, **options)
    steps = torch.arange(tokens, device="cuda")[:, None]
    parked = steps >= (3 * torch.arange(lanes, device="cuda") + tokens) % (tokens + 1)
    position = (arguments["position"] + steps).masked_fill(parked, -7)
    flat = dict(position=position.flatten(), parked=parked.flatten(), lanes=lanes)
    return arguments | {name: more[name] for name in ("projected", "cos", "sin")} | flat


def waiting(*arguments) -> torch.Tensor:
    torch.cuda.synchronize()
    return attention_decode(*arguments)


def run(arguments: dict) -> None:
    twin = moved(arguments, "cuda")
    expected = token_by_token(waiting, **twin)
    with poisoned_outputs():
        out = attention_block(**arguments)
    assert_close(out, expected)
    for name in ("keys", "values"):
        assert_close(arguments[name], twin[name])


@pytest.mark.parametrize("tokens", [4, 16])
@pytest.mark.parametrize("lengths", [[0], [500, 31, 32, 63, 5, 0, 1, 200], list(range(64))], ids=["1", "8", "64"])
def test_a_block_is_token_by_token(lengths, tokens):
    run(block_of(lengths, tokens, dtype=torch.bfloat16, **QWEN))


def test_other_heads():
    run(block_of([500, 31, 5], 8, dtype=torch.bfloat16, **LLAMA))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    run(block_of([17, 300, 64], 8, dtype=dtype, **QWEN))


def test_replays_of_a_graph():
    arguments = block_of([17, 300, 64], 4, dtype=torch.bfloat16, **QWEN)
    twin = moved(arguments, "cuda")
    attention_block(**twin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_block(**twin)
    for _ in range(3):
        expected = attention_block(**arguments)
        graph.replay()
        assert torch.equal(out, expected) and torch.equal(twin["keys"], arguments["keys"])
        for one in (arguments, twin):
            one["position"] += 1
            one["projected"].copy_(one["projected"].roll(1, dims=0))
