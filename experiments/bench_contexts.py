# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What does a long context cost in a decode step, and what does room for one cost where rows are short?

First the first call of the process, captures included, of 1 row of 128 + 64 tokens. Then a row for each number of
rows and each context: one prompt is shared by all rows, and "ms_decode_step" is the mean of the decode steps of a
call of ``--new`` tokens, by the device's clock. "limit_ms" is what weights, state and the valid keys and values take
at ``READ_RATE``.
Last, rows of ``--short`` tokens in buffers of their own size, and in those that the longest contexts have left.

    python experiments/bench_contexts.py --out contexts.json
"""

import argparse
import time
from pathlib import Path
from types import SimpleNamespace

from torch import nn

from deepspeed_hybrid import HybridEngineRollout, HybridEngineRolloutConfig, SamplingConfig
from deepspeed_hybrid.tools import results
from deepspeed_hybrid.tools.bench import random_request, repeats, step_bytes
from deepspeed_hybrid.tools.models import PRESETS, build_model, load_config
from deepspeed_hybrid.tools.process import quiet
from deepspeed_hybrid.tools.step_marks import StepMarks

SKIPPED = 2  # steps before the first that counts
READ_RATE = 4.5e12  # bytes a second: what an H200 reads at most


def rollout_over(model: nn.Module) -> HybridEngineRollout:
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    return HybridEngineRollout(SimpleNamespace(module=model), tokenizer, HybridEngineRolloutConfig())


def decode_ms(rollout: HybridEngineRollout, marks: StepMarks, rows: int, context: int, new: int, runs: int) -> float:
    """Of a step: the least mean over the steps of a call, of ``runs`` of them."""
    request = random_request(1, context, rollout.engine.module, seed=1)
    sampling = SamplingConfig(max_new_tokens=new, temperature=0.0, n_samples_per_prompt=rows)
    if not repeats(rollout, request, sampling):
        raise SystemExit(f"{rows} rows of {context} tokens: two calls gave different tokens")
    means = []
    for _ in range(runs):
        marks.clear()
        rollout.generate(request, sampling)
        means.append(marks.mean_ms(SKIPPED))
    return min(means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen3.5-4b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[16384, 32768], help="tokens, the longest last")
    parser.add_argument("--short", type=int, default=1024, help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    quiet()
    config = load_config(options.preset)
    config.eos_token_id = None
    model = build_model(config, 0)
    sizes, rows = step_bytes(model), []

    def add(**row) -> None:
        rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        if options.out:
            results.write_json(options.out, results.measurement(f"long contexts, {options.preset}", rows))

    request, begun = random_request(1, 128, model, seed=0), time.perf_counter()
    first = rollout_over(model)
    first.generate(request, SamplingConfig(max_new_tokens=64, temperature=0.0))
    add(what="first call of the process", seconds=round(time.perf_counter() - begun, 2))
    first.shutdown()

    short: dict[int, float] = {}
    for batch in options.batches:
        rollout = rollout_over(model)
        marks = StepMarks(rollout)
        short[batch] = decode_ms(rollout, marks, batch, options.short, options.new, options.runs)
        for context in options.contexts:
            ms = decode_ms(rollout, marks, batch, context, options.new, options.runs)
            limit = 1000 * sizes.total(batch, context + options.new / 2) / READ_RATE
            figures = dict(ms_decode_step=round(ms, 4), limit_ms=round(limit, 4), over_limit=round(ms / limit, 3))
            add(what="context", rows=batch, tokens=context, **figures)
        ms = decode_ms(rollout, marks, batch, options.short, options.new, options.runs)
        capacity = rollout._arena.cache.capacity
        figures = dict(ms_alone=round(short[batch], 4), ms=round(ms, 4), ratio=round(ms / short[batch], 3))
        add(what="short rows in long buffers", rows=batch, tokens=options.short, capacity=capacity, **figures)
        rollout.shutdown()


if __name__ == "__main__":
    main()
