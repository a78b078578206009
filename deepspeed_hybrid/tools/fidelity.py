# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Does what samples agree with what trains? Logprobs of a rollout next to those of the training forward."""

import copy
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.generation.batch import RolloutRequest, SamplingConfig
from deepspeed_hybrid.rollout import HybridEngineRollout
from deepspeed_hybrid.tools import results
from deepspeed_hybrid.tools.bench import SEGKI_CHOICES, SEGMENTS
from deepspeed_hybrid.tools.device import has_cuda
from deepspeed_hybrid.tools.models import build_model, decay_slowly, is_checkpoint, load_config, with_layers
from deepspeed_hybrid.tools.process import quiet
from deepspeed_hybrid.tools.scoring import Said, decode_logprobs, decode_obstacle, forward_logprobs
from deepspeed_hybrid.tools.text_model import VOCAB, byte_ids, learn, split, standard_library, windows
from deepspeed_hybrid.tools.torch_scans import torch_scans

OURS, PLAIN = "deepspeed_hybrid", "deepspeed_hybrid, use_segki=False"
PATHS = {"on": OURS, "off": PLAIN, "consistent": "deepspeed_hybrid, train_consistent"}
DECODE, TRAINING = "transformers decode", "training forward"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RATIO_EDGES = (0.5, 0.8, 0.9, 0.95, 0.99, 1.01, 1.05, 1.1, 1.25, 2.0)
RANGES = (f"< {RATIO_EDGES[0]:g}", *(f">= {edge:g}" for edge in RATIO_EDGES))
CLIP = 0.2  # of PPO's importance ratio
HEADINGS = {
    "path": "path                              ",
    "tokens": "tokens",
    "mean_abs": "mean abs to training",
    "max_abs": "max abs",
    "kl": "      KL",
    "clipped_pct": "clipped %",
    "oracle_mean_abs": "mean abs to fp32",
    "oracle_max_abs": "max abs",
}


def fidelity(
    model_config: str,
    layers: int | None,
    train_seconds: float,
    rows: int,
    prompt: int,
    new: int,
    temperature: float,
    dtype: str | None,
    segki: str,
    seed: int,
    external: Path | None,
    save: Path | None,
    out: Path | None,
    plot: Path | None,
) -> int:
    """Roll out, score the same tokens by the training forward and by an fp32 oracle; print a table, write rows.

    Args:
        model_config: a preset, the path of a config.json (random weights), or the folder of a checkpoint.
        layers: how many of its layers, where it is no checkpoint; None: all.
        train_seconds: first learn real text for so long, byte by byte; 0: weights as they are.
        rows, prompt, new: rows to roll out, and tokens of their prompts and answers.
        temperature: to sample at, and of all logprobs.
        dtype: a key of DTYPES; None: bf16 on a CUDA device, fp32 elsewhere.
        segki: a key of SEGKI_CHOICES; 'both' is two rollouts and 'all' three, with a row each.
        seed: of weights, training and sampling.
        external: what another engine answered with these weights, as :meth:`Said.read` takes it.
        save: a folder for the model as a checkpoint, and for what was answered, as ``rows.json``.
        out, plot: files to write, or None.

    Returns:
        1 if in half precision our mean abs difference is above that of transformers' decode by more than two standard
        errors, else 0.

    Raises:
        ValueError: an argument that names no model or does not go with another, or a file of another form.
    """
    quiet()
    given = [] if external is None else [Said.read(external)]
    model, text = prepared(model_config, layers, train_seconds, seed)
    model = model.to(DTYPES[dtype or ("bf16" if has_cuda() else "fp32")])
    prompts = windows(text, rows, prompt)
    rollouts = [rolled_out(model, prompts, new, temperature, seed, one) for one in SEGKI_CHOICES[segki]]
    said = rollouts[-1]
    if save is not None:
        model.save_pretrained(save)
        said.write(save / "rows.json")

    answers = [(one, forward_logprobs(model, one, temperature)) for one in (*rollouts, *given)]
    by_decode = None if decode_obstacle(model) else decode_logprobs(model, said, temperature)
    logprobs = {
        one.engine: (one.logprobs, training, oracle_logprobs(model, one, temperature)) for one, training in answers
    }
    known = logprobs[said.engine][1:]
    error = 0.0
    if by_decode is not None:
        logprobs[DECODE] = (by_decode, *known)
        error = standard_error(said, by_decode, known[0])
    logprobs[TRAINING] = (known[0], *known)
    found = [path_row(path, *values) for path, values in logprobs.items()]
    found = [row | {"standard_error": error} if row["path"] == DECODE else row for row in found]

    print("  ".join(HEADINGS.values()))
    for row in found:
        print(_line(row))
    print(f"\n{'importance ratios'.ljust(len(HEADINGS['path']))}  {'  '.join(RANGES)}")
    for row in found:
        counts = (str(count).rjust(len(name)) for name, count in zip(RANGES, row["ratios"], strict=True))
        print(f"{row['path'].ljust(len(HEADINGS['path']))}  {'  '.join(counts)}")
    if by_decode is None:
        print(f"no row for {DECODE}: {decode_obstacle(model)}")
    if out is not None:
        what = f"logprobs of a rollout next to the training forward's, {model_config}, {model.dtype}"
        results.write_json(out, results.measurement(what, found))
    if plot is not None:
        ratios = {path: (training - own).tolist() for path, (own, training, _) in logprobs.items() if path != TRAINING}
        results.draw_histograms(plot, ratios, "log of the importance ratio: training - rollout", "tokens")
    return verdict(found, model.dtype)


def prepared(model_config: str, layers: int | None, train_seconds: float, seed: int) -> tuple[nn.Module, torch.Tensor]:
    """The model, and ids [N] of text to prompt it with that it did not learn from."""
    known, unknown = split(byte_ids(standard_library()))
    if is_checkpoint(model_config):
        if layers is not None or train_seconds:
            raise ValueError("--layers and --train-seconds go with a preset or a config.json, not with a checkpoint")
        model = AutoModelForCausalLM.from_pretrained(model_config, dtype="auto").eval()
        device = "cuda" if has_cuda() else "cpu"
        return model.to(device), own_ids(Path(model_config), unknown)
    config = load_config(model_config) if layers is None else with_layers(load_config(model_config), layers)
    if not has_cuda():
        torch.set_num_threads(1)  # the tensors are small: more threads would only wait for each other
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    if train_seconds:
        config.vocab_size = VOCAB
    model = build_model(config, seed, dtype=torch.float32)
    decay_slowly(model)
    if train_seconds:
        loss = learn(model, known, train_seconds, seed)
        print(f"the model has learned text for {train_seconds:g} s; its loss is {loss:.2f} nats a byte")
    return model, unknown


def own_ids(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """The text of byte ids in the ids of a checkpoint's tokenizer, where it has one."""
    if not (folder / "tokenizer_config.json").exists():
        return ids
    text = bytes((ids - byte_ids(b"\0")).tolist()).decode(errors="replace")
    return torch.tensor(AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"])


def rolled_out(model: nn.Module, prompts: torch.Tensor, new: int, temperature: float, seed: int, segki: str) -> Said:
    """Our answers to prompts [R, T], ``new`` tokens each: stop ids are left out, so that all rows are as long.

    Args:
        segki: a key of SEGMENTS.
    """
    stops, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    cfg = HybridEngineRolloutConfig(**SEGMENTS[segki])
    try:
        with HybridEngineRollout(SimpleNamespace(module=model), tokenizer, cfg) as rollout:
            batch = rollout.generate(
                RolloutRequest(prompts, torch.ones_like(prompts)),
                SamplingConfig(max_new_tokens=new, temperature=temperature, seed=seed),
            )
    finally:
        model.generation_config.eos_token_id = stops
    tokens = batch.input_ids[:, prompts.shape[1] :]
    return Said(
        PATHS[segki],
        prompts.tolist(),
        tokens.tolist(),
        batch.logprobs.double().cpu().flatten(),
    )


def oracle_logprobs(model: nn.Module, said: Said, temperature: float) -> torch.Tensor:
    """[N] float64 by a copy of the weights in fp32, with torch scans and without TF32."""
    oracle, precision = copy.deepcopy(model).float(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch_scans(oracle), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return forward_logprobs(oracle, said, temperature)
    finally:
        torch.set_float32_matmul_precision(precision)


def path_row(path: str, own: torch.Tensor, training: torch.Tensor, oracle: torch.Tensor) -> dict:
    """One row of the result, from logprobs [N] float64 of the same tokens.

    ``kl`` estimates KL(path || training) from the path's own samples by the mean of r - 1 - log r, r the importance
    ratio, which is never negative; ``ratios`` counts r from below ``RATIO_EDGES[0]`` to above the last edge, and
    ``clipped_pct`` is the share of tokens that PPO would clip for nothing but rounding.
    """
    log_ratio = training - own
    ratio = log_ratio.exp()
    bins = torch.bucketize(ratio, torch.tensor(RATIO_EDGES, dtype=torch.float64), right=True)
    away = (own - oracle).abs()
    return {
        "path": path,
        "tokens": len(own),
        "mean_abs": float(log_ratio.abs().mean()),
        "max_abs": float(log_ratio.abs().max()),
        "kl": float((log_ratio.expm1() - log_ratio).mean()),
        "clipped_pct": float(100 * ((ratio < 1 - CLIP) | (ratio > 1 + CLIP)).double().mean()),
        "ratio_edges": list(RATIO_EDGES),
        "ratios": torch.bincount(bins, minlength=len(RATIO_EDGES) + 1).tolist(),
        "oracle_mean_abs": float(away.mean()),
        "oracle_max_abs": float(away.max()),
    }


def standard_error(said: Said, by_decode: torch.Tensor, training: torch.Tensor) -> float:
    """Of the difference between the mean abs differences of what was said, and of transformers' decode of the same
    tokens, to the training forward. Rows count as one observation each, for their tokens share a state; of a single
    row nothing is known, and the result is 0."""
    lengths = [len(tokens) for tokens in said.tokens]
    if len(lengths) < 2:
        return 0.0
    further = (said.logprobs - training).abs() - (by_decode - training).abs()
    sums = torch.stack([row.sum() for row in (further - further.mean()).split(lengths)])
    return float((sums.square().sum() * len(lengths) / (len(lengths) - 1)).sqrt() / len(further))


def verdict(rows: list[dict], dtype: torch.dtype) -> int:
    """The exit code. In fp32 both differences are a few roundings, of which neither has to be the smaller."""
    by_path = {row["path"]: row for row in rows}
    if DECODE not in by_path:
        return 0
    ours = next(by_path[path]["mean_abs"] for path in PATHS.values() if path in by_path)
    other, error = by_path[DECODE]["mean_abs"], by_path[DECODE]["standard_error"]
    # What is no number is above.
    compared = "at most" if ours <= other else "level with" if ours <= other + 2 * error else "above"
    print(f"mean abs difference to the training forward: {ours:.3g}, {compared} that of {DECODE}, {other:.3g}")
    print(f"the standard error of how much one is above the other: {error:.2g}")
    return int(dtype != torch.float32 and compared == "above")


def _line(row: dict) -> str:
    cells = {name: f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in HEADINGS}
    return "  ".join(
        cells[name].ljust(len(heading)) if name == "path" else cells[name].rjust(len(heading))
        for name, heading in HEADINGS.items()
    )
