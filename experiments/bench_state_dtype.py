# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What does a recurrent state in half precision cost in accuracy, and what does it save?

Accuracy: sampled answers are said again, token by token, by a model in fp32 with an fp32 state, and by the model in
its own dtype with each state dtype; the row has the mean and the largest difference of a token's logprob from the
first, and the mean over the first and the last quarter of the answers, since errors of a state may add up. Weights are
those of a random model, rounded to bf16 in both, with heads that remember many tokens.

Speed: ms of a decode step over ``--rows`` rows, and bytes of the cache.
"""

import argparse
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.generation.batch import RolloutRequest, SamplingConfig
from deepspeed_hybrid.rollout import HybridEngineRollout
from deepspeed_hybrid.tools import results
from deepspeed_hybrid.tools.bench import random_request, repeats, seconds_of
from deepspeed_hybrid.tools.models import PRESETS, build_model, decay_slowly, load_config
from deepspeed_hybrid.tools.process import quiet

ROWS, PROMPT = 4, 96  # of the answers that are compared: as many lanes as rows
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGER = 1.5  # weights: more peaked distributions than a random model's
FORCED = 1e4  # a logit beside which nothing else counts


def models(preset: str) -> tuple[nn.Module, nn.Module]:
    """The same weights in fp32, and in the dtype that rollouts have here."""
    config = load_config(preset)
    config.eos_token_id = None
    exact, model = build_model(config, 0, torch.float32), build_model(config, 0)
    with torch.no_grad():
        decay_slowly(exact)
        for name, parameter in exact.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(LARGER)
            parameter.copy_(parameter.bfloat16())
            model.get_parameter(name).copy_(parameter)
    return exact, model


def rollout_of(
    model: nn.Module, state_dtype: torch.dtype, graphs: bool | None, segments: bool | None = None
) -> HybridEngineRollout:
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    cfg = HybridEngineRolloutConfig(state_dtype=state_dtype, use_graph_capture=graphs, use_segki=segments)
    return HybridEngineRollout(SimpleNamespace(module=model), tokenizer, cfg)


def said_again(
    model: nn.Module,
    state_dtype: torch.dtype,
    request: RolloutRequest,
    answers: torch.Tensor,
    segments: bool | None = None,
) -> torch.Tensor:
    """Logprobs [ROWS, T] fp32 of ``answers`` [ROWS, T], as a rollout gives them that is made to say them."""
    rollout, logprobs = rollout_of(model, state_dtype, False, segments), []
    call = rollout._paths.call
    original = call.logits

    def force(*arguments) -> torch.Tensor:
        logits = original(*arguments)
        column = answers[:, len(logprobs), None]
        logprobs.append(logits.float().log_softmax(-1).gather(1, column)[:, 0])
        return torch.full_like(logits, -FORCED).scatter_(1, column, FORCED)

    call.logits = force
    batch = rollout.generate(request, SamplingConfig(max_new_tokens=answers.shape[1], temperature=0.0))
    assert torch.equal(batch.input_ids[:, PROMPT:], answers), "a rollout has said something else"
    rollout.shutdown()
    return torch.stack(logprobs, dim=1)


def accuracy(exact: nn.Module, model: nn.Module, new: int) -> dict[torch.dtype, dict]:
    request = random_request(ROWS, PROMPT, model, seed=5)
    first = rollout_of(model, torch.float32, False)
    answers = first.generate(request, SamplingConfig(max_new_tokens=new, temperature=0.7, seed=1)).input_ids[
        :, PROMPT:
    ]
    first.shutdown()
    wanted = said_again(exact, torch.float32, request, answers, segments=False)  # by transformers' own layers
    quarter = max(1, new // 4)
    rows = {}
    for dtype in STATE_DTYPES:
        error = (said_again(model, dtype, request, answers) - wanted).abs()
        figures = {
            "mean_abs": error.mean(),
            "max_abs": error.max(),
            "first_quarter": error[:, :quarter].mean(),
            "last_quarter": error[:, -quarter:].mean(),
        }
        rows[dtype] = {name: round(float(value), 6) for name, value in figures.items()}
    return rows


def speed(model: nn.Module, state_dtype: torch.dtype, rows: int, new: int) -> dict:
    """Of calls of ``new`` tokens and of one, the difference of which has no prefill in it."""
    rollout, request = rollout_of(model, state_dtype, None), random_request(rows, PROMPT, model, seed=6)
    whole, one = (SamplingConfig(max_new_tokens=tokens, temperature=0.0) for tokens in (new, 1))
    assert repeats(rollout, request, whole), "two calls gave different tokens"
    seconds_of(rollout, request, one)
    ms = 1000 * (seconds_of(rollout, request, whole) - seconds_of(rollout, request, one)) / (new - 1)
    report = rollout.memory_report()
    rollout.shutdown()
    kinds = ("kv_keys", "kv_values", "gdn_conv", "gdn_state")
    return {
        "rows": rows,
        "ms_decode_step": round(ms, 4),
        "state_bytes": report["gdn_state"],
        "cache_bytes": sum(report[kind] for kind in kinds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen3.5-4b")
    parser.add_argument("--new", type=int, default=512, help="tokens of the answers (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="of the steps that are timed (default: %(default)s)")
    parser.add_argument("--timed", type=int, default=128, help="tokens of the timed calls (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if min(options.new, options.rows, options.timed - 1) < 1:
        parser.error("--new and --rows must be at least 1, and --timed at least 2")
    quiet()
    torch.set_float32_matmul_precision("highest")  # the model in fp32 is what the others are compared with
    exact, model = models(options.preset)
    errors = accuracy(exact, model, options.new)
    del exact
    rows = [
        {"state_dtype": str(dtype).removeprefix("torch."), **errors[dtype]}
        | speed(model, dtype, options.rows, options.timed)
        for dtype in STATE_DTYPES
    ]
    names = list(rows[0])
    for line in (names, *([str(row[name]) for name in names] for row in rows)):
        print("  ".join(cell.rjust(max(len(name), 12)) for cell, name in zip(line, names, strict=True)))
    if options.out:
        what = f"logprobs and decode steps by the dtype of the recurrent state, {options.preset}"
        results.write_json(options.out, results.measurement(what, rows))


if __name__ == "__main__":
    main()
