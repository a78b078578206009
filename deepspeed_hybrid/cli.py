# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command line: arguments in, an exit code out. What the commands do is in tools/."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from deepspeed_hybrid.config import BACKENDS, SPECULATIVE
from deepspeed_hybrid.tools.arguments import (
    duration,
    new_file,
    new_folder,
    positive,
    positives,
    shapes,
    some_of,
    temperature,
)
from deepspeed_hybrid.tools.bench import SAMPLING_CHOICES, SEGKI_CHOICES, bench_decode
from deepspeed_hybrid.tools.bench_prefill import bench_prefill
from deepspeed_hybrid.tools.bench_rollouts import PARTS, SCHEDULES, bench_rollouts
from deepspeed_hybrid.tools.demo import demo
from deepspeed_hybrid.tools.doctor import doctor
from deepspeed_hybrid.tools.fidelity import DTYPES, fidelity
from deepspeed_hybrid.tools.models import DEMO_SIZES, PRESETS
from deepspeed_hybrid.tools.speculative_demo import speculative_demo
from deepspeed_hybrid.tools.train_draft import train_draft


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. ``arguments`` defaults to those of the process."""
    options = build_parser().parse_args(arguments)
    try:
        return options.run(options)
    except (RuntimeError, ValueError, OSError) as error:
        if options.traceback:
            raise
        print(f"error: {error}\n(--traceback before the command shows where it was raised)")
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed-hybrid",
        description="Fast RL rollouts inside a DeepSpeed engine: a demo, checks of machine and numbers, a benchmark.",
    )
    parser.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")
    # DeepSpeed's launcher adds it; LOCAL_RANK says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    names = "{demo,doctor,fidelity,bench,train-draft}"
    commands = parser.add_subparsers(title="commands", required=True, metavar=names)
    _add_demo(commands)
    _add_doctor(commands)
    _add_fidelity(commands)
    _add_bench(commands)
    _add_train_draft(commands)
    return parser


def _add_demo(commands) -> None:
    command = _command(commands, "demo", _demo, "train a tiny Qwen3.5 by GRPO on a task with a checkable answer")
    command.add_argument("--steps", type=positive, default=None, help="optimizer steps (default: enough to learn)")
    command.add_argument(
        "--out", type=new_folder, default=Path("deepspeed-hybrid-demo"), help="folder (default: %(default)s)"
    )
    command.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling (default: %(default)s)")
    command.add_argument("--model-size", choices=DEMO_SIZES, default="tiny", help="default: %(default)s")
    command.add_argument(
        "--zero-stage", type=int, choices=range(4), default=1, help="of the engine (default: %(default)s)"
    )
    command.add_argument(
        "--tensor-parallel", type=positive, default=1, metavar="N", help="processes that share a model (default: 1)"
    )
    command.add_argument(
        "--speculative",
        choices=("dflash",),
        help="instead: train a model and a draft model, and generate with both what the model generates alone",
    )


def _add_doctor(commands) -> None:
    command = _command(commands, "doctor", _doctor, "what is installed, and which path would run here and why")
    command.add_argument(
        "--model", type=Path, metavar="CONFIG_JSON", help="a model's config.json (default: a tiny Qwen3.5)"
    )
    command.add_argument("--use-graph-capture", action="store_true", help="fail unless decode steps can be captured")
    command.add_argument("--use-segki", action="store_true", help="fail unless segment kernels can run")
    command.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="fail unless it can run (default: %(default)s)"
    )


def _add_fidelity(commands) -> None:
    command = _command(commands, "fidelity", _fidelity, "how far logprobs of rollouts are from the training forward's")
    command.add_argument(
        "--model-config",
        default="tiny",
        metavar="PATH|PRESET",
        help=f"one of {', '.join(PRESETS)} or a config.json (random weights), or a checkpoint (default: %(default)s)",
    )
    command.add_argument("--layers", type=positive, metavar="N", help="only the first N layers")
    command.add_argument(
        "--train-seconds",
        type=duration,
        default=0.0,
        metavar="S",
        help="first learn the sources of Python's standard library for so long (default: 0)",
    )
    for name, default, what in (("rows", 32, "rows"), ("prompt", 64, "tokens a prompt"), ("new", 128, "tokens a row")):
        command.add_argument(f"--{name}", type=positive, default=default, help=f"{what} (default: %(default)s)")
    command.add_argument("--temperature", type=temperature, default=1.0, help="of sampling (default: %(default)s)")
    command.add_argument("--dtype", choices=DTYPES, help="of the weights (default: bf16 on a GPU, else fp32)")
    command.add_argument("--segki", choices=SEGKI_CHOICES, default="on", help="segment kernels (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="of weights and sampling (default: %(default)s)")
    command.add_argument(
        "--external",
        type=Path,
        metavar="FILE.json",
        help="what another engine answered, in the form of rows.json",
    )
    command.add_argument("--save", type=new_folder, metavar="FOLDER", help="the model as a checkpoint, and rows.json")
    command.add_argument("--out", type=new_file, metavar="FILE.json", help="write the rows there")
    command.add_argument("--plot", type=new_file, metavar="FILE.png", help="draw histograms of log importance ratios")


def _add_bench(commands) -> None:
    command = commands.add_parser("bench", help="measure generation", description="Measure generation.")
    kinds = command.add_subparsers(title="what to measure", required=True, metavar="{decode,prefill,rollouts}")
    decode = _command(kinds, "decode", _bench_decode, "end-to-end generate(): tokens/s and ms a step")
    _add_model_config(decode)
    decode.add_argument("--batch", type=positives, default=[1, 8, 64], metavar="1,8,64", help="rows (default: 1,8,64)")
    decode.add_argument("--prompt", type=positive, default=128, help="tokens a prompt (default: %(default)s)")
    decode.add_argument("--new", type=positive, default=512, help="new tokens a row (default: %(default)s)")
    decode.add_argument("--runs", type=positive, default=3, help="timed calls a batch size (default: %(default)s)")
    decode.add_argument("--seed", type=int, default=0, help="of weights and prompts (default: %(default)s)")
    decode.add_argument(
        "--segki",
        choices=SEGKI_CHOICES,
        default="on",
        help="segment kernels; consistent: with train_consistent; both: off and on; all: each in turn (default: on)",
    )
    decode.add_argument(
        "--sampling",
        choices=SAMPLING_CHOICES,
        default="greedy",
        help="sampled: temperature 1; truncated: also top_k 20 and top_p 0.95 (default: greedy)",
    )
    decode.add_argument("--kernels", action="store_true", help="also the kernels of a step by kind (on a GPU)")
    decode.add_argument("--out", type=new_file, metavar="FILE.json", help="write the rows there")
    decode.add_argument("--plot", type=new_file, metavar="FILE.png", help="draw tokens/s over the batch size")

    prefill = _command(kinds, "prefill", _bench_prefill, "generate() of one token: ms to the first token")
    _add_model_config(prefill)
    prefill.add_argument(
        "--shapes",
        type=shapes,
        default=[(1, 128), (64, 512), (1, 2048)],
        metavar="1x128,64x512",
        help="prompts x tokens (default: 1x128,64x512,1x2048)",
    )
    prefill.add_argument("--runs", type=positive, default=5, help="timed calls a shape (default: %(default)s)")
    prefill.add_argument("--seed", type=int, default=0, help="of weights and prompts (default: %(default)s)")
    prefill.add_argument("--out", type=new_file, metavar="FILE.json", help="write the rows there")

    _add_rollouts(kinds)


def _add_rollouts(kinds) -> None:
    command = _command(kinds, "rollouts", _bench_rollouts, "many rows of very different lengths, as RL has them")
    _add_model_config(command)
    command.add_argument(
        "--parts",
        type=some_of(PARTS),
        default=list(PARTS),
        metavar=",".join(PARTS),
        help="schedules: the rows on each schedule; shared: n samples share a prefill; chunks: peak memory of long "
        "prompts (default: all)",
    )
    command.add_argument(
        "--schedules",
        type=some_of(SCHEDULES),
        default=["continuous", "fixed"],
        metavar="continuous,fixed",
        help="; ".join(f"{name}: {what}" for name, what in SCHEDULES.items()) + " (default: continuous,fixed)",
    )
    for name, default, what in (
        ("prompts", 64, "prompts"),
        ("samples", 8, "samples a prompt"),
        ("prompt", 128, "tokens a prompt"),
        ("median", 300, "median of the answers' lengths"),
        ("longest", 2048, "tokens of the longest answers"),
        ("slots", 128, "rows at a time, a multiple of the samples"),
        ("runs", 1, "timed calls a measurement"),
    ):
        command.add_argument(f"--{name}", type=positive, default=default, help=f"{what} (default: %(default)s)")
    command.add_argument(
        "--shared", type=shapes, default=[(1, 2048)], metavar="1x2048", help="prompts x tokens (default: 1x2048)"
    )
    command.add_argument(
        "--chunks",
        type=positives,
        default=[8192, 16384, 32768],
        metavar="8192,16384,32768",
        help="tokens of a prompt (default: 8192,16384,32768)",
    )
    command.add_argument(
        "--sampling", choices=SAMPLING_CHOICES, default="sampled", help="of the schedules (default: sampled)"
    )
    command.add_argument("--seed", type=int, default=0, help="of weights, prompts and lengths (default: %(default)s)")
    command.add_argument("--out", type=new_file, metavar="FILE.json", help="write the rows there")


def _add_train_draft(commands) -> None:
    command = _command(
        commands, "train-draft", _train_draft, "train a draft model for speculative decoding, and save it"
    )
    command.add_argument(
        "--kind", choices=SPECULATIVE, default="dflash", help="a draft model, or an MTP head (default: %(default)s)"
    )
    command.add_argument("--model", required=True, metavar="PATH", help="a model and its tokenizer, as saved")
    data = command.add_mutually_exclusive_group(required=True)
    data.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt a line: train on the model's answers")
    data.add_argument("--text", type=Path, metavar="FILE", help="train on this text as it is")
    command.add_argument("--out", type=new_folder, required=True, metavar="FOLDER", help="of the draft checkpoint")
    for name, default, what in (
        ("steps", 1000, "optimizer steps"),
        ("rows", 8, "rows a step"),
        ("tokens", 512, "tokens of an answer, or of a row of text"),
        ("reuse", 4, "steps on one batch"),
        ("anchors", 64, "blocks a row"),
    ):
        command.add_argument(f"--{name}", type=positive, default=default, help=f"{what} (default: %(default)s)")
    command.add_argument("--layers", type=positive, metavar="N", help="layers of a DFlash draft model (default: 5)")
    command.add_argument("--block", type=positive, help="tokens of a block (default: 16, and 4 with --kind mtp)")
    command.add_argument(
        "--mask-token", type=int, metavar="ID", help="of DFlash's guesses (default: the first that is not used)"
    )
    command.add_argument(
        "--rate", type=float, help="learning rate (default: 6e-4, and 1e-5 for an MTP head that the model brings)"
    )
    command.add_argument("--temperature", type=float, default=1.0, help="of the answers (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="of weights, answers and blocks (default: %(default)s)")


def _add_model_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model-config",
        default="tiny",
        metavar="PATH|PRESET",
        help=f"a config.json or one of {', '.join(PRESETS)}; random weights (default: %(default)s)",
    )


def _command(commands, name: str, run, summary: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    command.set_defaults(run=run)
    return command


def _demo(options: argparse.Namespace) -> int:
    if options.speculative is not None:
        if options.tensor_parallel > 1 or options.zero_stage != 1:
            raise ValueError("--speculative goes without an engine: neither with --tensor-parallel nor --zero-stage")
        return speculative_demo(options.steps, options.out, options.seed, options.model_size)
    return demo(
        steps=options.steps,
        out=options.out,
        seed=options.seed,
        model_size=options.model_size,
        zero_stage=options.zero_stage,
        tensor_parallel=options.tensor_parallel,
    )


def _doctor(options: argparse.Namespace) -> int:
    return doctor(options.model, options.use_graph_capture, options.use_segki, options.backend)


def _fidelity(options: argparse.Namespace) -> int:
    return fidelity(
        options.model_config,
        options.layers,
        options.train_seconds,
        options.rows,
        options.prompt,
        options.new,
        options.temperature,
        options.dtype,
        options.segki,
        options.seed,
        options.external,
        options.save,
        options.out,
        options.plot,
    )


def _bench_decode(options: argparse.Namespace) -> int:
    return bench_decode(
        options.model_config,
        options.batch,
        options.prompt,
        options.new,
        options.runs,
        options.seed,
        options.segki,
        options.kernels,
        options.sampling,
        options.out,
        options.plot,
    )


def _bench_prefill(options: argparse.Namespace) -> int:
    return bench_prefill(options.model_config, options.shapes, options.runs, options.seed, options.out)


def _bench_rollouts(options: argparse.Namespace) -> int:
    return bench_rollouts(
        options.model_config,
        options.parts,
        options.schedules,
        options.prompts,
        options.samples,
        options.prompt,
        options.median,
        options.longest,
        options.slots,
        options.shared,
        options.chunks,
        options.runs,
        options.seed,
        options.sampling,
        options.out,
    )


def _train_draft(options: argparse.Namespace) -> int:
    return train_draft(
        options.kind,
        options.model,
        options.prompts,
        options.text,
        options.out,
        options.steps,
        options.rows,
        options.tokens,
        options.reuse,
        options.layers,
        options.block,
        options.mask_token,
        options.anchors,
        options.rate,
        options.temperature,
        options.seed,
    )
