# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton ops of speculative steps on a GPU against their references, at the geometry of published drafts."""

import pytest
import torch
from decode_cases import same_bits
from draft_cases import FP8, accept_arguments, draft_attention_arguments, draft_context_arguments, lanes_of
from glue_cases import DTYPES, moved, poisoned_outputs
from tolerances import assert_close, assert_close_but_for_roundings

from deepspeed_hybrid.ops import block_step
from deepspeed_hybrid.ops.block_step import REAL, WHOLE
from deepspeed_hybrid.ops.draft_attention import draft_attention, draft_attention_reference
from deepspeed_hybrid.ops.draft_context import draft_context, draft_context_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_fp32"),
]

PUBLISHED = dict(query_heads=32, kv_heads=8, head_dim=128, rotary=128, places=2112, device="cuda")
LANES = {"1": [200], "8": [2000, 31, 32, 63, 0, 64, 1, 2112], "64": list(range(64))}


def attend(arguments: dict) -> None:
    expected = draft_attention_reference(**arguments)
    with poisoned_outputs():
        out = draft_attention(**arguments)
    assert_close_but_for_roundings(out, expected)


@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("tokens", [4, 16])
@pytest.mark.parametrize("starts", LANES.values(), ids=LANES)
def test_attention(starts, tokens, cache_dtype):
    idle = (1,) if len(starts) > 1 else ()
    options = dict(dtype=torch.bfloat16, cache_dtype=cache_dtype, parked=idle, **PUBLISHED)
    attend(draft_attention_arguments(starts, tokens, **options))


@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal, window", [(False, 0), (True, 100)], ids=["full", "sliding"])
def test_attention_in_all_dtypes(dtype, cache_dtype, causal, window):
    options = dict(dtype=dtype, cache_dtype=cache_dtype, causal=causal, window=window, **PUBLISHED)
    attend(draft_attention_arguments([700, 5, 64], 8, **options))


@pytest.mark.parametrize(
    "options",
    [
        dict(query_heads=4, kv_heads=2, head_dim=16, rotary=16),
        dict(query_heads=3, kv_heads=1, head_dim=24, rotary=10, window=9),
        dict(query_heads=16, kv_heads=2, head_dim=256, rotary=64, causal=True),
        dict(query_heads=40, kv_heads=1, head_dim=64, rotary=64),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_of_other_heads(options, dtype):
    attend(draft_attention_arguments([300, 0, 17], 7, places=320, dtype=dtype, device="cuda", **options))


def test_attention_takes_no_time_of_what_is_not_there():
    """200 tokens of a context, in room for 2000 and for 32000."""
    times = []
    for places in (2000, 32000):
        options = {**PUBLISHED, "places": places}
        arguments = draft_attention_arguments([200], 16, dtype=torch.bfloat16, **options)
        graph, start, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        draft_attention(**arguments)
        with torch.cuda.graph(graph):
            for _ in range(50):
                draft_attention(**arguments)
        best = float("inf")
        for _ in range(10):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
        times.append(best)
    assert times[1] < 1.5 * times[0], times


@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [dict(), dict(lanes=2), dict(lanes=3, idle=(1, 4))], ids=str)
def test_context(dtype, cache_dtype, options):
    geometry = dict(layers=5, heads=8, head_dim=128, rotary=128, dtype=dtype, cache_dtype=cache_dtype, device="cuda")
    arguments = draft_context_arguments([7, 0, 8, 2, 9, 19], **geometry, **options)
    twin = moved(arguments, "cuda")
    draft_context_reference(**twin)
    draft_context(**arguments)
    used = slice(None) if arguments["idle"] is None else slice(-1)  # the last slot is scratch
    for name in ("keys", "values"):
        mine, theirs = arguments[name][used], twin[name][used]
        if mine.dtype == FP8:  # a last bit of fp32 may tip a rounding
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=2**-3, atol=2**-9, equal_nan=True)
            same = (mine.float() == theirs.float()) | mine.float().isnan()
            assert same.float().mean() > 0.99
        else:
            assert_close(mine, theirs)


@pytest.mark.parametrize("count", [1, 8, 300])
@pytest.mark.parametrize("tokens", [2, 5, 16])
def test_bookkeeping(count, tokens):
    lanes = lanes_of(count, tokens, device="cuda")
    state = [lanes[name] for name in ("token", "position", "length", "limit", "parked")]
    drafts = torch.arange(count * (tokens - 1), device="cuda").view(tokens - 1, count).t()
    for given in (drafts, drafts.contiguous(), None):
        mine = block_step.block_inputs(*state, given, 7, tokens)
        theirs = block_step.block_inputs_reference(*state, given, 7, tokens)
        assert all(same_bits(one, other) for one, other in zip(mine, theirs, strict=True))
    rows = [lanes[name] for name in WHOLE], [lanes[name] for name in REAL], lanes["parked"], lanes["finish"], tokens
    for mine, theirs in zip(block_step.block_rows(*rows), block_step.block_rows_reference(*rows), strict=True):
        assert same_bits(mine, theirs)
    mine, theirs = (accept_arguments(count, tokens, device="cuda") for _ in range(2))
    counts = block_step.block_accept(**mine)
    assert torch.equal(counts, block_step.block_accept_reference(**theirs))
    assert all(same_bits(mine[name], theirs[name]) for name in set(mine) - {"drafts"})
    reached, others = (torch.arange(tokens, device="cuda") for _ in range(2))
    block_step.count_reached(counts, reached)
    block_step.count_reached_reference(counts, others)
    assert torch.equal(reached, others)
