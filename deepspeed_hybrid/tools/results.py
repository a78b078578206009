# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Measurements as files: one JSON form for all of them, and plots where matplotlib is installed."""

import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import deepspeed_hybrid
from deepspeed_hybrid.tools.device import gpu_name

DISTRIBUTIONS = ("triton", "transformers", "deepspeed", "flash-linear-attention")
BINS = 81  # of a histogram; odd, so that 0 lies within one
NO_MATPLOTLIB = "no plot was drawn: matplotlib is not installed; pip install matplotlib"


def measurement(what: str, rows: list[dict]) -> dict:
    """Rows with what is needed to take them again."""
    return {
        "what": what,
        "gpu": gpu_name(),
        "commit": commit(),
        "versions": versions(),
        "command": command(),
        "rows": rows,
    }


def write_json(path: Path, result: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def draw(
    path: Path, x: Sequence[float], lines: Mapping[str, Sequence[float]], xlabel: str, ylabel: str, log: bool = False
) -> bool:
    """A line plot as PNG. False, and a line that says why, where matplotlib is missing.

    Args:
        lines: label -> values, as many as ``x``.
        log: logarithmic axes, with ticks at ``x``.
    """
    axes = _new_axes()
    if axes is None:
        return False
    for label, values in lines.items():
        axes.plot(x, values, label=label, marker="o" if len(x) < 20 else None)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(x, [f"{value:g}" for value in x])
    _save(axes, path, xlabel, ylabel)
    return True


def draw_histograms(path: Path, values: Mapping[str, Sequence[float]], xlabel: str, ylabel: str) -> bool:
    """Outlines of histograms over common bins, counts on a logarithmic axis, as PNG. As :func:`draw` otherwise.

    Args:
        values: label -> what is counted.
    """
    axes = _new_axes()
    if axes is None:
        return False
    furthest = max(abs(value) for each in values.values() for value in each) or 1.0
    for label, each in values.items():
        axes.hist(each, bins=BINS, range=(-furthest, furthest), histtype="step", label=label)
    axes.set_yscale("log")
    _save(axes, path, xlabel, ylabel)
    return True


def _new_axes():
    """Of a figure that needs no display; None, and a line that says why, where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print(NO_MATPLOTLIB)
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def _save(axes, path: Path, xlabel: str, ylabel: str) -> None:
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    axes.figure.savefig(path, dpi=150)


def versions() -> dict[str, str | None]:
    """Of Python, this package and what it builds on; None where a distribution is missing."""
    return {
        "python": platform.python_version(),
        "deepspeed_hybrid": deepspeed_hybrid.__version__,
        "torch": torch.__version__,  # names the CUDA build, as the distribution's version may not
        **{name: distribution_version(name) for name in DISTRIBUTIONS},
        "cuda": torch.version.cuda,
    }


def distribution_version(name: str) -> str | None:
    """The installed version, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the checkout this package runs from, '-dirty' if changed; None for an installed copy."""
    try:
        if not _git("ls-files", "__init__.py"):  # a virtual environment may lie inside another project's checkout
            return None
        return _git("rev-parse", "HEAD") + ("-dirty" if _git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    folder = Path(deepspeed_hybrid.__file__).parent
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def command() -> str:
    """What was typed, without folders."""
    program = Path(sys.argv[0]).name
    return shlex.join(["deepspeed-hybrid" if program == "__main__.py" else program, *sys.argv[1:]])
