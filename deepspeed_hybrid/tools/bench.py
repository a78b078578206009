# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""End-to-end decode speed, in tokens per second, and as a share of what the card's memory allows."""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from tqdm import tqdm

from deepspeed_hybrid.compat import layer_kinds, text_config
from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.generation.batch import RolloutBatch, RolloutRequest, SamplingConfig
from deepspeed_hybrid.rollout import HybridEngineRollout
from deepspeed_hybrid.tools import results
from deepspeed_hybrid.tools.breakdown import as_rows, step_breakdown
from deepspeed_hybrid.tools.device import has_cuda
from deepspeed_hybrid.tools.models import build_model, load_config
from deepspeed_hybrid.tools.process import quiet

READ_BYTES, READS = 4 * 2**30, 10
SEGMENTS: dict[str, dict[str, Any]] = {
    "off": {"use_segki": False},
    "consistent": {"train_consistent": True},
    "on": {},
}
SEGKI_CHOICES: dict[str, list[str]] = {
    **{name: [name] for name in SEGMENTS},
    "both": ["off", "on"],
    "all": ["off", "consistent", "on"],
}
SAMPLING_CHOICES: dict[str, dict] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "truncated": {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
}
HEADINGS = {
    "segki": "segki",
    "sampling": "sampling",
    "batch": "batch",
    "prompt": "prompt",
    "new": "new",
    "tok_s": "tok/s",
    "ms_step": "ms a step",
    "spread_pct": "spread %",
    "first_token_ms": "first token ms",
    "ms_decode_step": "ms a decode step",
    "floor_share_pct": "% of bandwidth floor",
}


@dataclass(frozen=True)
class StepBytes:
    """What one decode step has to move at least: weights once, and for every row its state and its KV."""

    weights: int
    state_per_row: int  # recurrent state and conv window, read and written
    kv_per_token: int

    def total(self, batch: int, tokens: float) -> float:
        """Bytes of a step with ``batch`` rows of ``tokens`` tokens each."""
        return self.weights + batch * (self.state_per_row + self.kv_per_token * tokens)


def bench_decode(
    model_config: str,
    batches: list[int],
    prompt: int,
    new: int,
    runs: int,
    seed: int,
    segki: str,
    kernels: bool,
    sampling: str,
    out: Path | None,
    plot: Path | None,
) -> int:
    """Time ``generate()`` on random weights and prompts, prefill included; print a table, write rows.

    Args:
        model_config: a preset or the path of a config.json.
        batches: rows, one measurement each.
        prompt, new: tokens a row.
        runs: timed calls a measurement; the median counts, and the spread is (max - min) / median.
        seed: of weights and prompts.
        segki: a key of SEGKI_CHOICES; 'both' times a batch without and with segments, one after the other, and 'all'
            also with ``train_consistent``.
        kernels: also count and time the kernels of a step by kind (on a GPU).
        sampling: a key of SAMPLING_CHOICES.
        out, plot: files to write, or None.

    Returns:
        1 if two equal calls disagreed, in which case nothing is timed, else 0.
    """
    quiet()
    config = load_config(model_config)
    config.eos_token_id = None  # every row runs to its full length
    model = build_model(config, seed)
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    rollouts = {
        name: HybridEngineRollout(
            SimpleNamespace(module=model), tokenizer, HybridEngineRolloutConfig(**SEGMENTS[name])
        )
        for name in SEGKI_CHOICES[segki]
    }
    print(list(rollouts.values())[-1].describe())
    bandwidth = read_bandwidth() if has_cuda() else None
    if bandwidth:
        print(f"read bandwidth: {bandwidth / 1e12:.2f} TB/s")

    sizes = step_bytes(model)
    rows: list[dict] = []
    options = {"seed": seed, **SAMPLING_CHOICES[sampling]}
    whole, one = (SamplingConfig(max_new_tokens=tokens, **options) for tokens in (new, 1))
    # Between the timed calls; not in a pipe, where lines are for programs.
    progress = tqdm(total=len(batches) * len(rollouts) * runs, unit="call", leave=False, disable=None)
    for batch in batches:
        request = random_request(batch, prompt, model, seed)
        floor = sizes.total(batch, prompt + new / 2) / bandwidth if bandwidth else None
        for name, rollout in rollouts.items():
            if not repeats(rollout, request, whole):
                progress.close()
                print(f"batch {batch}: two {sampling} calls gave different tokens, so nothing is timed")
                return 1
            seconds = []
            for _ in range(runs):
                seconds.append(seconds_of(rollout, request, whole))
                progress.update()
            first = [seconds_of(rollout, request, one) for _ in range(runs + 1)][1:]  # the one before is to warm up
            row = {
                "segki": name,
                "sampling": sampling,
                **decode_row(batch, prompt, new, seconds, first, floor),
            }
            if not rows:
                tqdm.write(_line({key: heading for key, heading in HEADINGS.items() if key in row}))
            tqdm.write(_line(row))
            sys.stdout.flush()
            if kernels and has_cuda():
                row["kernels"] = _kernels(rollout, request, options)
            rows.append(row)
            if out is not None:  # at once: a run that is cut short leaves what it has
                results.write_json(out, results.measurement(f"{sampling} decode, {model_config}", rows))
            rollout.release_memory()
    progress.close()
    for rollout in rollouts.values():
        rollout.shutdown()

    if plot is not None:
        lines = {
            f"{model_config}, {sampling}, segki {mode}": [row["tok_s"] for row in rows if row["segki"] == mode]
            for mode in dict.fromkeys(row["segki"] for row in rows)
        }
        results.draw(plot, batches, lines, "rows", "tokens/s", log=True)
    return 0


def _kernels(rollout: HybridEngineRollout, request: RolloutRequest, options: dict) -> list[dict]:
    shares = step_breakdown(lambda new: rollout.generate(request, SamplingConfig(max_new_tokens=new, **options)))
    total = sum(share.us for share in shares)
    tqdm.write(
        f"    {sum(share.count for share in shares):.0f} kernels a step, {total / 1000:.3f} ms in them; they overlap "
        "(programmatic dependent launch), so that the sum may exceed a step"
    )
    for share in shares:
        tqdm.write(f"    {share.kind:12} {share.count:7.1f} {share.us:9.1f} us")
    return as_rows(shares)


def decode_row(
    batch: int, prompt: int, new: int, seconds: list[float], first: list[float], floor: float | None
) -> dict:
    """One row of the result.

    Args:
        seconds: of calls for ``new`` tokens.
        first: of calls for one token.
        floor: the least time of a step in seconds, where it is known.
    """
    median, first_token = statistics.median(seconds), statistics.median(first)
    row = {
        "batch": batch,
        "prompt": prompt,
        "new": new,
        "tok_s": round(batch * new / median, 1),
        "ms_step": round(median / new * 1000, 4),
        "spread_pct": round((max(seconds) - min(seconds)) / median * 100, 2),
        "first_token_ms": round(first_token * 1000, 2),
        "ms_decode_step": round((median - first_token) / max(1, new - 1) * 1000, 4),
    }
    if floor is not None:
        row["floor_share_pct"] = round(floor / (median / new) * 100, 1)
    return row


def _line(row: dict) -> str:
    return "  ".join(str(row[name]).rjust(len(heading)) for name, heading in HEADINGS.items() if name in row)


def random_request(batch: int, prompt: int, model: nn.Module, seed: int) -> RolloutRequest:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, text_config(model).vocab_size, (batch, prompt), generator=generator)
    ids = ids.to(next(model.parameters()).device)
    return RolloutRequest(ids, torch.ones_like(ids))


def repeats(rollout: HybridEngineRollout, request: RolloutRequest, sampling: SamplingConfig) -> bool:
    """The gate, and the warm-up: kernels are tuned and graphs captured here."""
    first, second = (rollout.generate(request, sampling) for _ in range(2))
    return _same(first, second)


def _same(first: RolloutBatch, second: RolloutBatch) -> bool:
    return torch.equal(first.input_ids, second.input_ids)


def seconds_of(rollout: HybridEngineRollout, request: RolloutRequest, sampling: SamplingConfig) -> float:
    accelerator = get_accelerator()
    accelerator.synchronize()
    start = time.perf_counter()
    rollout.generate(request, sampling)
    accelerator.synchronize()
    return time.perf_counter() - start


def step_bytes(model: nn.Module, state_dtype: torch.dtype = torch.float32) -> StepBytes:
    """From the model's shapes. An embedding that is not also the head is only gathered from, and not counted."""
    config, kinds = text_config(model), layer_kinds(model)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if embedding is not head:
        weights -= embedding.numel() * embedding.element_size()

    state = 0
    if "linear_attention" in kinds:
        heads, key_dim, value_dim = (
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        channels = 2 * config.linear_num_key_heads * key_dim + heads * value_dim
        recurrent = heads * key_dim * value_dim * state_dtype.itemsize
        window = channels * config.linear_conv_kernel_dim * head.element_size()
        state = 2 * kinds.count("linear_attention") * (recurrent + window)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv = 2 * kinds.count("full_attention") * config.num_key_value_heads * head_dim * head.element_size()
    return StepBytes(weights=weights, state_per_row=state, kv_per_token=kv)


def read_bandwidth() -> float:
    """Bytes per second of a reduction over a buffer much larger than the card's caches."""
    accelerator = get_accelerator()
    size = min(READ_BYTES, accelerator.available_memory() // 4)
    buffer = torch.zeros(size // 4, dtype=torch.float32, device=accelerator.current_device_name())
    for _ in range(2):
        buffer.sum()
    accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(READS):
        buffer.sum()
    accelerator.synchronize()
    return READS * buffer.numel() * buffer.element_size() / (time.perf_counter() - start)
