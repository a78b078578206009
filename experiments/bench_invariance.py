# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Does a row's answer depend on the rows beside it, and what does it cost to make sure that it does not?

``--rows`` prompts are answered together three times with one seed, and some of them alone, with the default and with
``batch_invariant=True``. "repeats" is whether the three agree in every token and logprob; "rows_alike" of "rows_alone"
answers are the same alone and together, and "tokens_alike" is the share of tokens before the first difference. A row
alone takes other kernels (products of 1 to 16 rows, parts of an attention's sum), which add in another order: in bf16
some argmax or sample falls another way, and what follows is another text. "ms_decode_step" is of a step over all rows.

    python experiments/bench_invariance.py --out invariance.json
"""

import argparse
from pathlib import Path
from types import SimpleNamespace

import torch

from deepspeed_hybrid import HybridEngineRollout, HybridEngineRolloutConfig, RolloutRequest, SamplingConfig
from deepspeed_hybrid.tools import results
from deepspeed_hybrid.tools.bench import random_request, seconds_of
from deepspeed_hybrid.tools.models import PRESETS, build_model, load_config
from deepspeed_hybrid.tools.process import quiet

PROMPT, REPEATS = 128, 3


def one_of(request: RolloutRequest, row: int) -> RolloutRequest:
    return RolloutRequest(request.prompt_ids[row : row + 1], request.prompt_attention_mask[row : row + 1])


def row_of(model, request: RolloutRequest, invariant: bool, temperature: float, new: int, alone: int) -> dict:
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    rows = len(request.prompt_ids)
    config = HybridEngineRolloutConfig(batch_invariant=invariant)
    with HybridEngineRollout(SimpleNamespace(module=model), tokenizer, config) as rollout:
        whole = SamplingConfig(max_new_tokens=new, temperature=temperature, seed=7)
        batches = [rollout.generate(request, whole) for _ in range(REPEATS)]
        first = batches[0]
        same = all(
            torch.equal(batch.input_ids, first.input_ids) and torch.equal(batch.logprobs, first.logprobs)
            for batch in batches
        )
        alike, shares = 0, []
        if temperature == 0:  # a sample's noise goes by its row's number in the call
            for row in range(alone):
                tokens = rollout.generate(one_of(request, row), whole).input_ids[0, PROMPT:]
                equal = (tokens == first.input_ids[row, PROMPT:]).long().cumprod(0)
                alike += int(equal[-1])
                shares.append(float(equal.sum()) / new)
        one = SamplingConfig(max_new_tokens=1, temperature=temperature, seed=7)
        seconds_of(rollout, request, one)
        ms = 1000 * (seconds_of(rollout, request, whole) - seconds_of(rollout, request, one)) / (new - 1)
    return {
        "batch_invariant": invariant,
        "temperature": temperature,
        "rows": rows,
        "repeats": same,
        "rows_alone": len(shares),
        "rows_alike": alike,
        "tokens_alike": round(sum(shares) / len(shares), 4) if shares else None,
        "ms_decode_step": round(ms, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen3.5-4b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--alone", type=int, default=8, help="rows that are also answered alone")
    parser.add_argument("--new", type=int, default=128, help="tokens")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    quiet()
    config = load_config(options.preset)
    config.eos_token_id = None
    model = build_model(config, 0)
    rows: list[dict] = []
    for count in options.rows:
        request = random_request(count, PROMPT, model, seed=3)
        for invariant in (False, True):
            for temperature in (0.0, 1.0) if count == max(options.rows) else (0.0,):
                alone = min(options.alone, count)
                rows.append(row_of(model, request, invariant, temperature, options.new, alone))
                print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
                if options.out:
                    results.write_json(options.out, results.measurement(f"batch invariance, {options.preset}", rows))


if __name__ == "__main__":
    main()
