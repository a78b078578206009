# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Long prompts in chunks on a GPU: attention without a mask, and a peak of memory that does not go by the length."""

from functools import partial

import pytest
import torch
from harness import greedy, rollout_of
from models import ragged_prompts, tiny_model

from deepspeed_hybrid.generation import loop
from deepspeed_hybrid.generation.prefill import prefill
from deepspeed_hybrid.segments.continued_attention import can_continue, last_queries
from deepspeed_hybrid.tools.bench_prompts import Peak
from deepspeed_hybrid.tools.models import build_model, load_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("queries, keys", [(1, 65), (64, 64), (40, 43), (100, 333), (512, 4096)])
@pytest.mark.parametrize("heads, kv_heads, dim", [(16, 4, 256), (4, 2, 64)])
def test_last_queries_against_float64(dtype, queries, keys, heads, kv_heads, dim):
    """Keys and values as a slot of the cache has them: of a longer buffer."""
    torch.manual_seed(0)
    query = torch.randn(1, heads, queries, dim, device="cuda", dtype=dtype)
    buffers = [torch.randn(3, kv_heads, keys + 50, dim, device="cuda", dtype=dtype) for _ in range(2)]
    key, value = (buffer[:, :, :keys][1:2] for buffer in buffers)
    got = last_queries(query, key, value, dim**-0.5)
    wide = [states.double().repeat_interleave(heads // kv_heads, dim=1) for states in (key, value)]
    scores = dim**-0.5 * query.double() @ wide[0].transpose(2, 3)
    late = torch.arange(keys, device="cuda")[None, :] > torch.arange(keys - queries, keys, device="cuda")[:, None]
    wanted = scores.masked_fill(late, float("-inf")).softmax(-1) @ wide[1]
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 2e-3}[dtype]
    torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("exact_fp32")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_chunks_are_one_prefill(family, monkeypatch):
    model, prompts = tiny_model(family).cuda(), ragged_prompts([300, 40, 129])
    wanted = greedy(rollout_of(model), prompts, 24, continuous_batch_size=2)
    monkeypatch.setattr(loop, "prefill", partial(prefill, token_budget=64))
    batch = greedy(rollout_of(model), prompts, 24, continuous_batch_size=2)
    assert torch.equal(batch.input_ids, wanted.input_ids)
    torch.testing.assert_close(batch.logprobs, wanted.logprobs, atol=1e-3, rtol=0)


def test_the_peak_does_not_go_by_the_length(monkeypatch):
    """Four layers of a 4B model, chunks of 2,048 tokens; a dense mask at 16,384 would take 64 MB, the keys and values
    of every query head 270 MB."""
    monkeypatch.setattr(loop, "prefill", partial(prefill, token_budget=2048))
    config = load_config("qwen3.5-4b")
    config.num_hidden_layers, config.vocab_size, config.eos_token_id = 4, 8192, None
    model = build_model(config, seed=0)
    assert can_continue([model.config])
    extra = {}
    for length in (4096, 16384):
        rollout, prompts = rollout_of(model), ragged_prompts([length])
        greedy(rollout, prompts, 1)  # kernels are tuned
        rollout.release_memory()
        peak = Peak()
        greedy(rollout, prompts, 1)
        extra[length] = peak.bytes() - sum(rollout._arena.bytes_by_kind().values())
        rollout.release_memory()
    print({length: f"{size / 1e6:.1f} MB" for length, size in extra.items()})
    assert extra[16384] <= 1.05 * extra[4096] + 4 * 2**20
