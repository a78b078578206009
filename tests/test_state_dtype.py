# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A recurrent state in half precision: half the bytes, a small error, and the same on every schedule."""

from types import SimpleNamespace

import pytest
import torch
from harness import force_tokens, greedy, rollout_of
from models import VOCAB, ragged_prompts, tiny_model
from recorded_graph import capture_prompts, capture_steps, recording_accelerator

from deepspeed_hybrid.generation import tail

HALVES = [torch.bfloat16, torch.float16]
LENGTHS, NEW_TOKENS = [3, 40, 7, 11, 1], 120
# Mean abs logprob error over those tokens, which a state of that many bits may make; fp32's own noise is 1e-6.
BOUNDS = {torch.bfloat16: (5e-4, 1e-2), torch.float16: (5e-5, 2e-3)}


@pytest.fixture(scope="module")
def bench():
    """Answers that every rollout is made to say, so that errors are of logprobs alone."""
    script = torch.randint(1, VOCAB, (len(LENGTHS), NEW_TOKENS), generator=torch.Generator().manual_seed(4))
    model = tiny_model()
    bench = SimpleNamespace(model=model, script=script, prompts=ragged_prompts(LENGTHS))
    bench.exact = forced(rollout_of(model), bench)
    return bench


def forced(rollout, bench, new_tokens: int = NEW_TOKENS, **options) -> torch.Tensor:
    """Logprobs [rows, tokens] of the script."""
    force_tokens(rollout, bench.script)
    batch = greedy(rollout, bench.prompts, new_tokens, logprobs_mode="raw", **options)
    assert torch.equal(batch.input_ids[:, max(LENGTHS) :], bench.script[:, :new_tokens])
    return batch.logprobs


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_the_bytes(bench, dtype):
    whole, half = rollout_of(bench.model), rollout_of(bench.model, state_dtype=dtype)
    for rollout in (whole, half):
        greedy(rollout, bench.prompts, 3)
    states = [layer.tensors().get("gdn_state") for layer in half._arena.cache.layers]
    assert {state.dtype for state in states if state is not None} == {dtype}
    report, wanted = half.memory_report(), whole.memory_report()
    assert 2 * report["gdn_state"] == wanted["gdn_state"] > 0 and report["state_dtype"] == dtype
    assert all(report[kind] == wanted[kind] for kind in ("kv_keys", "kv_values", "gdn_conv", "decode_state"))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_error_is_that_of_its_bits(bench, dtype):
    error = (forced(rollout_of(bench.model, state_dtype=dtype), bench) - bench.exact).abs()
    quarter = NEW_TOKENS // 4
    print(f"{dtype}: mean {error.mean():.2e}, max {error.max():.2e}, last quarter {error[:, -quarter:].mean():.2e}")
    least, most = BOUNDS[dtype]
    assert least < error.mean() < most
    assert error[:, -quarter:].mean() < 3 * error[:, quarter : 2 * quarter].mean(), "it adds up"


@pytest.mark.parametrize("slots", [1, 3, None])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_every_schedule(bench, slots, captured, monkeypatch):
    """A last bit that a batch of another size rounds otherwise is a large one here: bounds are wider than in fp32."""
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)
    new_tokens = 24
    wanted = forced(rollout_of(bench.model, state_dtype="bfloat16", shrink_tail=False), bench, new_tokens)
    with recording_accelerator():
        rollout = rollout_of(bench.model, state_dtype="bfloat16")
        if captured:
            capture_steps(rollout)
            capture_prompts(rollout)
        for _ in range(2):
            got = forced(rollout, bench, new_tokens, continuous_batch_size=slots)
            torch.testing.assert_close(got, wanted, atol=2e-2, rtol=0)
            assert (got - wanted).abs().mean() < 2e-3
