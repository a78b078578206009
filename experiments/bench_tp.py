# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Does a second card pay? Decode speed of a model whose layers DeepSpeed's AutoTP shares among ranks.

Starts its own ranks, one a GPU over NCCL, or on a CPU over gloo. They share the model beneath a ZeRO-1 engine, as a
trainer has it; for one rank every process answers with a whole model. A row is written as soon as it is measured:

- whether 128 greedy tokens of a small fp32 model are the same for one rank and for several.
- whether as many of a small bf16 model are those of an fp32 oracle wherever that is sure, and how far their logprobs
  are from its own, next to transformers' bf16 forward over the same tokens.
- ``--cycles``: as many times generation, an optimizer step and a sync, after which all ranks must have had the same
  tokens, and no more memory or captures than after the first few.
- tokens/s end to end, ms a decode step, and what share of the time is the least that the memories of all cards need.
- collective operations of a step and the time in them, waits for the other rank included, by NCCL's kernels.

A batch is timed only where two equal calls, and all ranks, give the same tokens.

    python experiments/bench_tp.py --tp 2 1 --batches 1 32 256 --out tp.json --plot tp.png
"""

import argparse
import copy
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_hybrid import HybridEngineRollout, HybridEngineRolloutConfig, RolloutRequest, SamplingConfig
from deepspeed_hybrid.ops.collectives import everyones
from deepspeed_hybrid.tools import results
from deepspeed_hybrid.tools.bench import decode_row, random_request, read_bandwidth, repeats, seconds_of, step_bytes
from deepspeed_hybrid.tools.breakdown import as_rows, step_breakdown
from deepspeed_hybrid.tools.device import has_cuda
from deepspeed_hybrid.tools.models import PRESETS, build_model, decay_slowly, load_config, shrunk
from deepspeed_hybrid.tools.process import quiet, start_distributed
from deepspeed_hybrid.tools.torch_scans import torch_scans

# Multicast over NVLink is a state of the switch, which other programs of the host share.
NCCL_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
FP32_TOKENS = 128
BF16_ROWS = 32  # so that errors are means of 4,096 tokens
MOST_ERROR = 1.05  # times transformers'
WARM_CYCLES = 5
HEADINGS = {
    "tp": "ranks",
    "batch": "batch",
    "tok_s": "tokens/s",
    "ms_step": "ms a token",
    "spread_pct": "spread %",
    "first_token_ms": "first token ms",
    "ms_decode_step": "ms a decode step",
    "floor_share_pct": "% of floor",
    "sync_ms": "ms a sync",
}


class Report:
    """Rows as they come: a table on the first rank's screen, and the whole file anew after each."""

    def __init__(self, what: str, out: Path | None):
        self.what, self.out, self.rows = what, out, []
        self.first = torch.distributed.get_rank() == 0

    def add(self, row: dict) -> None:
        self.rows.append(row)
        if "check" in row:
            self.say(f"{row['check']}: {row['equal']} of {row['of']}" + (f", {row['more']}" if "more" in row else ""))
        else:
            self.say(" ".join(f"{row.get(name, '-')}".rjust(len(HEADINGS[name])) for name in HEADINGS))
        self.write()

    def say(self, line: str) -> None:
        if self.first:
            print(line, flush=True)

    def write(self) -> None:
        if self.first and self.out is not None:
            environment = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
            results.write_json(self.out, {**results.measurement(self.what, self.rows), "environment": environment})


def engine_over(model: nn.Module, ranks: int, learning_rate: float = 1e-6):
    """A ZeRO-1 engine over a model that so many ranks share, as a trainer has it; for one rank the model alone."""
    if ranks == 1:
        return SimpleNamespace(module=model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": next(model.parameters()).dtype == torch.bfloat16},
        "tensor_parallel": {"autotp_size": ranks},
        "steps_per_print": 10**9,
    }
    return deepspeed.initialize(model=model.train(), config=config)[0]


def rollout_over(engine) -> HybridEngineRollout:
    """Captured wherever there is a GPU, or not at all: no figure may be of eager steps in silence."""
    config = HybridEngineRolloutConfig(use_graph_capture=True if has_cuda() else None)
    return HybridEngineRollout(engine, SimpleNamespace(pad_token_id=0, eos_token_id=None), config)


def all_the_same(tokens: torch.Tensor) -> bool:
    """Whether every rank passes the same. A collective operation."""
    every = everyones(tokens, torch.distributed.group.WORLD)
    return bool((every == every[:1]).all())


def check_fp32(model_config: str, ranks: int, new: int, seed: int) -> dict:
    """Greedy tokens of a few layers in fp32, without TF32: a whole model's, and those of one that ranks share."""
    config = shrunk(load_config(model_config))
    model = build_model(config, seed, torch.float32)
    decay_slowly(model)
    request, sampling = random_request(4, 16, model, seed), SamplingConfig(max_new_tokens=new, temperature=0.0)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        with rollout_over(engine_over(model, 1)) as rollout:
            whole = rollout.generate(request, sampling).input_ids
        with rollout_over(engine_over(model, ranks)) as rollout:
            shared = [rollout.generate(request, sampling).input_ids for _ in range(2)]
    same = torch.stack([whole == tokens for tokens in shared]).all(dim=0)[:, -new:]
    return {
        "check": f"fp32 tokens that are the same, {config.num_hidden_layers} layers, {ranks} ranks",
        "of": same.numel(),
        "equal": int(same.sum()) if all_the_same(shared[1]) else 0,
    }


@torch.no_grad()
def check_bf16(model_config: str, ranks: int, new: int, seed: int) -> dict:
    """Greedy tokens and their logprobs of a few layers in bf16 that ranks share, next to an fp32 oracle, which is sure
    where its two best tokens are further apart than twice the largest error of transformers' bf16 forward there.

    ``fine``: tokens are the oracle's wherever it is sure, at one place at least, and the mean error of logprobs is at
    most ``MOST_ERROR`` times that of transformers' bf16 forward over the same tokens.
    """
    model = build_model(shrunk(load_config(model_config)), seed, torch.bfloat16)
    decay_slowly(model)
    oracle, plain = copy.deepcopy(model).float(), copy.deepcopy(model)
    request = random_request(BF16_ROWS, 16, model, seed)
    sampling = SamplingConfig(max_new_tokens=new, temperature=0.0, logprobs_mode="raw")
    with torch.enable_grad(), rollout_over(engine_over(model, ranks)) as rollout:
        batch = rollout.generate(request, sampling)
    tokens = batch.input_ids[:, -new:]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), torch_scans(oracle):
        exact = oracle(batch.input_ids).logits[:, -new - 1 : -1]
    rough = plain(batch.input_ids).logits[:, -new - 1 : -1].float()

    def error(logprobs: torch.Tensor) -> float:
        return float((logprobs - of_tokens(exact, tokens)).abs().mean())

    ours, theirs = error(batch.logprobs), error(of_tokens(rough, tokens))
    best = exact.topk(2, dim=-1).values
    sure = best[..., 0] - best[..., 1] > 2 * (rough - exact).abs().amax(-1)
    same = (tokens == exact.argmax(-1)) & sure
    return {
        "check": f"bf16 tokens that are an fp32 oracle's where it is sure, {ranks} ranks",
        "of": int(sure.sum()),
        "equal": int(same.sum()) if all_the_same(batch.input_ids) else 0,
        "more": f"mean error of logprobs {ours:.5f}, transformers' {theirs:.5f}",
        "error": ours,
        "transformers_error": theirs,
        "fine": bool(sure.any() and same.sum() == sure.sum() and ours <= MOST_ERROR * theirs),
    }


def of_tokens(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def noise_like(weight: torch.Tensor, drawn: torch.Generator) -> torch.Tensor:
    return torch.randn(weight.shape, generator=drawn, device=weight.device)


def check_cycles(model_config: str, ranks: int, count: int, seed: int) -> dict:
    """Generation, a step along drawn gradients and a sync, so many times, with a few layers.

    A cycle is good where all ranks have the same tokens and nothing has grown since the first ``WARM_CYCLES``.
    """
    model = build_model(shrunk(load_config(model_config)), seed)
    request, sampling = random_request(4, 16, model, seed), SamplingConfig(max_new_tokens=16, temperature=0.0)
    engine = engine_over(model, ranks, learning_rate=1e-2)
    drawn = torch.Generator(request.prompt_ids.device).manual_seed(seed)  # replicated weights have the same everywhere
    weights = list(engine.module.parameters())
    good, different, before, begun = 0, set(), None, time.perf_counter()
    with rollout_over(engine) as rollout:
        for cycle in range(count):
            tokens = rollout.generate(request, sampling).input_ids
            engine.backward(sum((weight.float() * noise_like(weight, drawn)).sum() for weight in weights))
            engine.step()
            rollout.sync_segki_weights()
            left = (get_accelerator().memory_allocated(), rollout._graphs.captures if rollout._graphs else 0)
            before = left if cycle <= WARM_CYCLES else before
            good += all_the_same(tokens) and left <= before
            different.add(str(tokens.tolist()))
    return {
        "check": f"cycles of generation, step and sync, {ranks} ranks",
        "of": count,
        "equal": good,
        "more": f"{len(different)} different answers, {left[1]} captures",
        "seconds": round(time.perf_counter() - begun, 1),
    }


def collectives_of_a_step(rollout: HybridEngineRollout, request: RolloutRequest, options: dict) -> dict:
    """Of NCCL's kernels in one decode step: how many, and microseconds in them."""
    shares = step_breakdown(lambda new: rollout.generate(request, SamplingConfig(max_new_tokens=new, **options)))
    found = [share for share in shares if share.kind == "collective"]
    return {
        "collectives": round(sum(share.count for share in found), 1),
        "collectives_us": round(sum(share.us for share in found), 1),
        "kernels": as_rows(shares),
    }


def bench_batch(
    rollout: HybridEngineRollout, request: RolloutRequest, new: int, runs: int, options: dict, floor: float | None
) -> dict | None:
    """One row, or None where two equal calls, or two ranks, disagree. All ranks call it together."""
    (batch, prompt), sampling = request.prompt_ids.shape, SamplingConfig(max_new_tokens=new, **options)
    alike = repeats(rollout, request, sampling)
    if not all_the_same(rollout.generate(request, sampling).input_ids) or not alike:
        return None
    seconds = [seconds_of(rollout, request, sampling) for _ in range(runs)]
    one = SamplingConfig(max_new_tokens=1, **options)
    first = [seconds_of(rollout, request, one) for _ in range(runs + 1)][1:]  # the one before is to warm up
    row = decode_row(batch, prompt, new, seconds, first, floor)
    syncs = [rollout.sync_segki_weights() for _ in range(3)]
    row["sync_ms"] = round(statistics.median(report.seconds for report in syncs) * 1000, 2)
    row["bytes_copied"] = syncs[-1].bytes_copied
    return row


def measure(options: argparse.Namespace) -> int:
    """What every rank runs, all together.

    Returns:
        1 if tokens differed anywhere, else 0.
    """
    quiet()
    ranks, count = options.tp, torch.distributed.get_world_size()
    report, failed = Report(f"decode on shared layers, {options.preset}", options.out), 0
    for shared in (tp for tp in ranks if tp > 1):
        checks = [
            check(options.preset, shared, options.fp32_tokens, options.seed) for check in (check_fp32, check_bf16)
        ]
        if options.cycles:
            checks.append(check_cycles(options.preset, shared, options.cycles, options.seed))
        for row in checks:
            failed |= row["equal"] < row["of"] or not row.get("fine", True)
            report.add(row)
    bandwidth = read_bandwidth() if has_cuda() else None
    config = load_config(options.preset)
    config.eos_token_id = None  # every row runs to its full length
    for tp in ranks:
        if tp not in (1, count):
            raise ValueError(f"--tp {tp} must be 1 or the number of ranks, {count}")
        model = build_model(config, options.seed)
        sizes = step_bytes(model)
        requests = [random_request(batch, options.prompt, model, options.seed) for batch in options.batches]
        rollout = rollout_over(engine_over(model, tp))
        report.say(rollout.describe())
        report.say(" ".join(HEADINGS.values()))
        for request in requests:
            batch = len(request.prompt_ids)
            floor = sizes.total(batch, options.prompt + options.new / 2) / (tp * bandwidth) if bandwidth else None
            sampling = {"temperature": 0.0, "seed": options.seed}
            row = bench_batch(rollout, request, options.new, options.runs, sampling, floor)
            if row is None:
                report.say(f"{tp} ranks, batch {batch}: tokens differ between calls or ranks, so nothing is timed")
                failed = 1
                continue
            row = {"tp": tp, **row}
            report.add(row)
            if has_cuda() and options.kernels:
                row.update(collectives_of_a_step(rollout, request, sampling))
                report.say(f"    {row['collectives']} collectives a step, {row['collectives_us']} us in them")
                report.write()
        rollout.shutdown()
    if report.first and options.plot is not None:
        draw(options.plot, report.rows)
    return failed


def draw(path: Path, rows: list[dict]) -> None:
    timed = [row for row in rows if "tp" in row]
    batches = sorted({row["batch"] for row in timed})
    lines = {}
    for tp in sorted({row["tp"] for row in timed}):
        speeds = {row["batch"]: row["tok_s"] for row in timed if row["tp"] == tp}
        lines[f"{tp} rank{'s' if tp > 1 else ''}"] = [speeds.get(batch, float("nan")) for batch in batches]
    results.draw(path, batches, lines, "rows", "tokens/s", log=True)


def start_ranks(count: int, timeout: float) -> int:
    """This program again, ``count`` times with a rank each; whatever is left of them after an end is killed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {**os.environ, **NCCL_ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["WORLD_SIZE"] = str(count)
    processes = [
        subprocess.Popen([sys.executable, *sys.argv], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]
    deadline, codes = time.monotonic() + timeout, [None]
    try:
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.2)
            codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if None in codes:
        print(f"ranks ended with {codes} after {timeout - deadline + time.monotonic():.0f} s; the others were killed")
    return 0 if codes == [0] * count else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen3.5-4b")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default: 1 2)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=128, help="tokens")
    parser.add_argument("--runs", type=int, default=2, help="timed calls a row; the median counts")
    parser.add_argument("--fp32-tokens", type=int, default=FP32_TOKENS)
    parser.add_argument("--cycles", type=int, default=0, help="of generation, step and sync (default: none)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-kernels", dest="kernels", action="store_false", help="count no collectives")
    parser.add_argument("--timeout", type=float, default=400, help="seconds until ranks are killed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return start_ranks(max(options.tp), options.timeout)
    start_distributed()
    code = measure(options)
    sys.stdout.flush()
    os._exit(code)  # not through destructors, which may wait for the other rank


if __name__ == "__main__":
    sys.exit(main())
