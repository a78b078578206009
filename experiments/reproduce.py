# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Takes the figures of README.md again, in one run of under ten minutes on a machine with one or two H200.

Every row of the README's results table is one of the commands below; each has its own gate, and a figure whose gate
fails is not written. What is timed has a device to itself. What is not (training, accuracy, and all that runs on the
CPU) goes side by side, and while ops are built.

    python experiments/reproduce.py --out reproduced
    python experiments/reproduce.py --list

writes a JSON or PNG a figure and a log a command, and ends with a table. A command that passes its own limit, or that
of the whole run, is cut off, and the table says so.
"""

import argparse
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
LIMIT = 590  # seconds of the whole run
NOT_HERE = "wants 2 GPUs"
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
BENCH = "deepspeed-hybrid bench decode --model-config qwen3.5-4b"


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        words: what is run.
        out: the JSON that it writes through ``--out``; None: it writes none, and its log has the figure.
        limit: seconds after which it is cut off.
        stands_for: the README's command where that is another; None: the same words.
        plot: a PNG beside the JSON.
    """

    words: str
    out: str | None
    limit: int
    stands_for: str | None = None
    plot: str | None = None

    @property
    def of_readme(self) -> str:
        return self.stands_for or self.words

    def arguments(self, folder: Path) -> list[str]:
        words = shlex.split(self.words)
        if self.out and words[1:2] == ["demo"]:  # it names its files itself
            return [*words, "--out", str(folder / Path(self.out).stem)]
        files = [("--out", self.out), ("--plot", self.plot)]
        return words + [word for option, name in files if name for word in (option, str(folder / name))]


# Together with the builds; where there are two GPUs, on the second.
BUILD = Command("python -m deepspeed_hybrid.ops.compile --jobs 5", None, 200)
UNTIMED = [
    Command("deepspeed-hybrid demo", "demo_h200.json", 240),
    Command("python -m pytest -s -p no:cacheprovider tests/gpu/test_bf16_gpu.py", None, 200,
            "python -m pytest -s tests/gpu/test_bf16_gpu.py"),
    Command("deepspeed-hybrid fidelity --model-config qwen3.5-small --train-seconds 60 --segki all --rows 256",
            "training_h200.json", 240, plot="training_h200.png"),
]  # fmt: skip
ON_CPU = [
    Command("deepspeed-hybrid demo --speculative dflash", "speculative_cpu.json", 550),
    Command("deepspeed-hybrid demo", "demo_cpu.json", 550),
]
# In one process, so that torch is imported, and kernels are compiled, once.
TIMED = [
    Command(f"{BENCH} --batch 1,8,32,64,128,256 --runs 1", "decode_h200.json", 120, plot="decode_h200.png"),
    Command(f"{BENCH} --batch 64 --new 256 --runs 1 --sampling sampled", "decode_sampled_h200.json", 30),
    Command(f"{BENCH} --batch 64 --new 256 --runs 1 --sampling truncated", "decode_truncated_h200.json", 30),
    Command(f"{BENCH} --batch 1,64 --new 128 --runs 1 --segki off", "decode_off_h200.json", 40),
    Command("deepspeed-hybrid bench prefill --model-config qwen3.5-4b --shapes 1x128,1x2048,64x512 --runs 3",
            "prefill_h200.json", 45),
    Command("deepspeed-hybrid bench rollouts --model-config qwen3.5-4b --prompts 32", "continuous_h200.json", 90),
]  # fmt: skip
# In processes of their own: on the second GPU, and on both.
SPECULATIVE = Command("python experiments/bench_speculative.py", "dflash_h200.json", 150, plot="dflash_h200.png")
SHARED = Command("python experiments/bench_tp.py --tp 2 1 --batches 1 32 256 --runs 1 --cycles 200 --timeout 220",
                 "tp_h200.json", 150, plot="tp_h200.png")  # fmt: skip
COMMANDS = [BUILD, *UNTIMED, *ON_CPU, *TIMED, SPECULATIVE, SHARED]


def readme_commands() -> list[str]:
    """Of the results table, each once; 'the same' is the one above."""
    found: list[str] = []
    for _, _, files, cell in ROW.findall(README.read_text()):
        if re.search(r"\.json", files) and cell.startswith("`"):
            found.append(cell.strip("`"))
    return list(dict.fromkeys(found))


Started = tuple[Command, subprocess.Popen, float]


@dataclass
class Outcome:
    command: Command
    state: str = "not run"
    seconds: float = 0.0


class Run:
    """Commands that run, and what came of them."""

    def __init__(self, folder: Path, limit: float):
        self.folder, self.end = folder, time.monotonic() + limit
        self.outcomes = {command: Outcome(command) for command in COMMANDS}
        self.ended: dict[Command, float] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def log(self, command: Command) -> Path:
        return self.folder / f"{COMMANDS.index(command):02d}.log"

    def one_by_one(self, started: list[Started], command: Command | None = None, changed: dict | None = None) -> None:
        """Wait for what runs, and then for a command that it would disturb."""
        for one in started:
            self.wait(one)
        if command is not None:
            self.wait(self.start(command, changed))

    def start(self, command: Command, changed: dict[str, str] | None = None) -> Started:
        words = command.arguments(self.folder)
        program = [sys.executable, "-m", "deepspeed_hybrid"] if words[0] == "deepspeed-hybrid" else [sys.executable]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
        environment = {**os.environ, **own, **(changed or {})}
        with self.log(command).open("w") as log:
            # A session of its own, so that what it starts ends with it.
            process = subprocess.Popen(
                [*program, *words[1:]],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        threading.Thread(target=self.note_end, args=(command, process), daemon=True).start()
        return command, process, time.monotonic()

    def note_end(self, command: Command, process: subprocess.Popen) -> None:
        """Others may have to be waited for first."""
        process.wait()
        self.ended.setdefault(command, time.monotonic())

    def wait(self, started: Started) -> None:
        """For its end, or for its limit."""
        command, process, start = started
        left = min(start + command.limit, self.end) - time.monotonic()
        try:
            code = process.wait(max(0.0, left))
            state = "ok" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            state = "cut off"
        self.settle(command, state, self.ended.get(command, time.monotonic()) - start)

    def settle(self, command: Command, state: str, seconds: float) -> None:
        if command.out:
            own = self.folder / Path(command.out).stem  # of a demo
            for path in [*own.glob("*.json"), *own.glob("*.png")]:
                path.rename(own.with_suffix(path.suffix))
        missing = [name for name in (command.out, command.plot) if name and not (self.folder / name).exists()]
        if state == "ok" and missing:
            state = f"wrote no {missing[0]}"
        self.outcomes[command] = Outcome(command, state, seconds)
        print(f"{state:>12}  {seconds:6.1f} s  {command.words}", flush=True)

    def here(self, command: Command) -> None:
        """In this process, as if it had been typed."""
        allowed = min(command.limit, self.end - time.monotonic())
        if allowed < 1:
            return
        words, start, state = command.arguments(self.folder), time.monotonic(), "ok"
        with self.log(command).open("w") as log, redirected(log):
            signal.setitimer(signal.ITIMER_REAL, allowed)
            try:
                code = typed(words)
                state = "ok" if not code else f"failed ({code})"
            except CutOff:
                state = "cut off"
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
                state = "failed"
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        free_memory()
        self.settle(command, state, time.monotonic() - start)


class CutOff(BaseException):
    """Past a limit: no handler of the command's own may keep it."""


def cut(*_) -> None:
    raise CutOff


def typed(words: list[str]) -> int:
    """The exit code of words that a shell would start Python with."""
    sys.argv = words[1:] if words[0] == "python" else words
    try:
        if words[0] == "python":
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
            return 0
        from deepspeed_hybrid.cli import main

        return main(words[1:])
    except SystemExit as end:
        return 0 if end.code is None else int(end.code) if isinstance(end.code, int) else 1


class redirected:
    """Standard output and errors, of Python and of what it calls, into a file."""

    def __init__(self, log):
        self.log = log

    def __enter__(self) -> None:
        sys.stdout.flush(), sys.stderr.flush()
        self.kept = os.dup(1), os.dup(2)
        os.dup2(self.log.fileno(), 1), os.dup2(self.log.fileno(), 2)

    def __exit__(self, *_) -> None:
        sys.stdout.flush(), sys.stderr.flush()
        for kept, number in zip(self.kept, (1, 2), strict=True):
            os.dup2(kept, number), os.close(kept)


def free_memory() -> None:
    import gc

    from deepspeed.accelerator import get_accelerator

    gc.collect()
    get_accelerator().empty_cache()


def reproduce(folder: Path, limit: float) -> int:
    """All commands; the exit code is 1 if one has not come to a good end."""
    start, run = time.monotonic(), Run(folder, limit)
    signal.signal(signal.SIGALRM, cut)
    sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]  # where a script finds its neighbours, and the package
    gpus = torch.cuda.device_count()  # which makes no context yet
    second = {"CUDA_VISIBLE_DEVICES": str(min(1, gpus - 1))}
    background = [run.start(command, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}) for command in ON_CPU]
    building, untimed = run.start(BUILD), [run.start(command, second) for command in UNTIMED]
    run.wait(building)
    if gpus > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        aside = threading.Thread(target=run.one_by_one, args=(untimed, SPECULATIVE, second))
        aside.start()
    else:
        run.one_by_one(untimed)
    for command in TIMED:
        run.here(command)
    if gpus > 1:
        aside.join()
        run.wait(run.start(SHARED, {"CUDA_VISIBLE_DEVICES": "0,1"}))
    else:
        run.wait(run.start(SPECULATIVE))
        run.outcomes[SHARED].state = NOT_HERE
    for one in background:
        run.wait(one)
    print(f"\n{'state':>12}  {'seconds':>8}  {'result':26}  command of the README")
    for outcome in run.outcomes.values():
        command = outcome.command
        result = command.out or run.log(command).name
        print(f"{outcome.state:>12}  {outcome.seconds:8.1f}  {result:26}  {command.of_readme}")
    print(f"{time.monotonic() - start:.0f} s in all; logs and results are in {folder}")
    return int(any(outcome.state not in ("ok", NOT_HERE) for outcome in run.outcomes.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of the whole run (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="only say what would be run, and for what")
    options = parser.parse_args()
    if not options.list:
        return reproduce(options.out.resolve(), options.limit)
    for command in COMMANDS:
        print(f"{command.out or '-':26}  at most {command.limit:3d} s  {command.words}")
        if command.stands_for:
            print(f"{'':44}for {command.stands_for}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
