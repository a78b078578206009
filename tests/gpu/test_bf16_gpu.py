# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""bf16 on the shapes of Qwen3.5-4B: no further from an fp32 oracle than Hugging Face's own bf16 forward."""

import pytest
import torch
from models import Tokenizer, engine_of, torch_scans
from transformers import Qwen3_5ForCausalLM

from deepspeed_hybrid import HybridEngineRollout, HybridEngineRolloutConfig, RolloutRequest, SamplingConfig
from deepspeed_hybrid.tools.models import load_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPT, ANSWER, ROWS = 96, 160, 4


@pytest.fixture(scope="module")
def models():
    """The same weights in fp32 and bf16; slow decay and larger weights, so that the context matters."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        oracle = Qwen3_5ForCausalLM(load_config("qwen3.5-4b")).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.01, 0.5).log())
            elif parameter.dim() == 2:
                parameter.mul_(1.5)
            parameter.copy_(parameter.bfloat16())  # both models hold the same numbers
    with torch.device("cuda"):
        model = Qwen3_5ForCausalLM(load_config("qwen3.5-4b")).to(torch.bfloat16).eval()
    model.load_state_dict(oracle.state_dict())
    return oracle, model


@pytest.fixture(scope="module")
def comparison(models):
    """Logits at every answer position of sampled sequences: oracle, plain bf16 forward, and our captured decode."""
    oracle, model = models
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(0, 248000, (ROWS, PROMPT), generator=generator).cuda()
    rollout = HybridEngineRollout(
        engine_of(model), Tokenizer(pad=0), HybridEngineRolloutConfig(use_graph_capture=False)
    )
    request = RolloutRequest(prompt, torch.ones_like(prompt))
    batch = rollout.generate(request, SamplingConfig(max_new_tokens=ANSWER, temperature=0.7, seed=1))
    ours, replayed = forced_logits(rollout, request, batch.input_ids)
    with torch.no_grad():
        plain = model(batch.input_ids, logits_to_keep=ANSWER + 1).logits[:, :-1].float()
        exact = oracle_logits(oracle, batch.input_ids)
    rollout.shutdown()
    graphed = HybridEngineRollout(
        engine_of(model), Tokenizer(pad=0), HybridEngineRolloutConfig(use_graph_capture=True)
    )
    again = graphed.generate(request, SamplingConfig(max_new_tokens=ANSWER, temperature=0.7, seed=1))
    graphed.shutdown()
    return dict(
        ids=batch.input_ids[:, PROMPT:],
        ours=ours,
        plain=plain,
        exact=exact,
        graphed=again.input_ids[:, PROMPT:],
        replayed=replayed,
    )


@torch.no_grad()
def forced_logits(rollout, request, sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Our path's logits [B, ANSWER, V] fp32 while it is made to say ``sequence``; also what it then recorded."""
    call, captured, answer = rollout._paths.call, [], sequence[:, PROMPT:]
    original = call.logits

    def force(*arguments):
        logits = original(*arguments)
        captured.append(logits[:ROWS].float())
        forced = torch.full_like(logits, -1e4)
        column = answer[:, len(captured) - 1]
        return forced.scatter_(1, column[:, None], 1e4) if logits.shape[0] == ROWS else logits

    call.logits = force
    try:
        batch = rollout.generate(request, SamplingConfig(max_new_tokens=ANSWER, temperature=0.0))
    finally:
        call.logits = original
    return torch.stack(captured, dim=1), batch.input_ids[:, PROMPT:]


def oracle_logits(oracle, ids) -> torch.Tensor:
    """fp32 logits with transformers' torch scans and no TF32."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch_scans(oracle):
            return oracle(ids, logits_to_keep=ANSWER + 1).logits[:, :-1]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def logprobs(logits, ids) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def test_forced_decode_said_the_sequence(comparison):
    assert torch.equal(comparison["replayed"], comparison["ids"])


def test_logprob_error_is_within_plain_bf16s(comparison):
    exact = logprobs(comparison["exact"], comparison["ids"])
    ours = (logprobs(comparison["ours"], comparison["ids"]) - exact).abs()
    plain = (logprobs(comparison["plain"], comparison["ids"]) - exact).abs()
    print(
        f"mean abs logprob error: ours {ours.mean():.5f} (max {ours.max():.4f}), "
        f"plain bf16 {plain.mean():.5f} (max {plain.max():.4f}), ratio {ours.mean() / plain.mean():.4f}"
    )
    assert ours.mean() <= 1.05 * plain.mean()


def test_greedy_agrees_wherever_the_margin_is_clear(comparison):
    exact, plain, ours = comparison["exact"], comparison["plain"], comparison["ours"]
    top = exact.topk(2, dim=-1).values
    clear = top[..., 0] - top[..., 1] > 2 * (plain - exact).abs().amax(-1)
    same = ours.argmax(-1) == plain.argmax(-1)
    print(
        f"clear margins at {int(clear.sum())} of {clear.numel()} positions; agreement there "
        f"{same[clear].float().mean():.4f}, everywhere {same.float().mean():.4f}"
    )
    assert clear.sum() > 0
    assert same[clear].all()


def test_graph_replays_say_what_eager_steps_say(comparison):
    assert torch.equal(comparison["graphed"], comparison["ids"])
