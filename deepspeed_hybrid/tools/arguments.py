# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments of the commands, from text; what makes no sense is refused before anything runs."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from pathlib import Path


def positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be an integer of at least 1; got {text!r}")
    return int(text)


def positives(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def shapes(text: str) -> list[tuple[int, int]]:
    pairs = [part.split("x") for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise ArgumentTypeError(f"must be like 1x128,64x512; got {text!r}")
    return [(positive(rows), positive(tokens)) for rows, tokens in pairs]


def duration(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"must be seconds, 0 or more; got {text!r}")
    return value


def temperature(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"must be a number above 0; got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")  # which lies in no range


def some_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    def chosen(text: str) -> list[str]:
        parts = text.split(",")
        if not set(parts) <= set(names):
            raise ArgumentTypeError(f"must be some of {','.join(names)}; got {text!r}")
        return parts

    return chosen


def new_file(text: str) -> Path:
    """That a command will write; it may be there already."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"must be a file; {text!r} is a folder")
    _check_parents(path)
    return path


def new_folder(text: str) -> Path:
    """That a command will write into; it may be there already."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise ArgumentTypeError(f"must be a folder; {text!r} is a file")
    _check_parents(path)
    return path


def _check_parents(path: Path) -> None:
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise ArgumentTypeError(f"cannot be written: {str(parent)!r} is no folder")
