# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Time to the first token: whole calls of ``generate()`` for one token, through graphs and without."""

import statistics
from pathlib import Path
from types import SimpleNamespace

from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.generation.batch import SamplingConfig
from deepspeed_hybrid.rollout import HybridEngineRollout
from deepspeed_hybrid.tools import results
from deepspeed_hybrid.tools.bench import random_request, repeats, seconds_of
from deepspeed_hybrid.tools.device import has_cuda
from deepspeed_hybrid.tools.models import build_model, load_config
from deepspeed_hybrid.tools.process import quiet

HEADINGS = {"graphs": "graphs", "n": "prompts", "length": "tokens", "ms": "first token ms", "tok_s": "tokens/s"}


def bench_prefill(model_config: str, shapes: list[tuple[int, int]], runs: int, seed: int, out: Path | None) -> int:
    """Time one-token calls on random weights and prompts; print a table, write rows.

    Args:
        model_config: a preset or the path of a config.json.
        shapes: prompts and tokens of each, one measurement a pair.
        runs: timed calls a measurement; the median counts.
        seed: of weights and prompts.
        out: a file to write, or None.

    Returns:
        1 if two calls disagreed, in which case nothing more is timed, else 0.
    """
    quiet()
    config = load_config(model_config)
    config.eos_token_id = None
    model = build_model(config, seed)
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    one = SamplingConfig(max_new_tokens=1, temperature=0.0)
    rows: list[dict] = []
    print("  ".join(HEADINGS.values()))
    for graphs in (True, False) if has_cuda() else (False,):
        rollout = HybridEngineRollout(
            SimpleNamespace(module=model), tokenizer, HybridEngineRolloutConfig(use_graph_capture=graphs)
        )
        for prompts, tokens in shapes:
            request = random_request(prompts, tokens, model, seed)
            if not repeats(rollout, request, one):  # the first is eager, and the second captures
                print(f"{prompts} x {tokens}: two calls gave different tokens, so nothing more is timed")
                return 1
            seconds = statistics.median(seconds_of(rollout, request, one) for _ in range(runs))
            rows.append(
                {
                    "graphs": "on" if graphs else "off",
                    "n": prompts,
                    "length": tokens,
                    "ms": round(seconds * 1000, 2),
                    "tok_s": round(prompts * tokens / seconds),
                }
            )
            print("  ".join(str(rows[-1][name]).rjust(len(heading)) for name, heading in HEADINGS.items()), flush=True)
            rollout.release_memory()
        rollout.shutdown()
    if out is not None:
        results.write_json(out, results.measurement(f"time to the first token, {model_config}", rows))
    return 0
