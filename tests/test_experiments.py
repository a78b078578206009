# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""experiments/README.md has every script and every result, and what it says of them is so."""

import json
import re
import shlex
from pathlib import Path

import pytest

from deepspeed_hybrid.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments"
RESULTS = {path.name for path in (EXPERIMENTS / "results").iterdir()}
NONE_YET = "none yet"
FILE_OPTIONS = re.compile(r" --(out|plot) \S+")

# question, command, names of results
ROWS = [
    (question, command, [name for name in results.split(", ") if name != NONE_YET])
    for question, command, results in re.findall(
        r"^\| ([^|]+) \| `([^`|]+)` \| ([^|]+) \|$", (EXPERIMENTS / "README.md").read_text(), re.MULTILINE
    )
]
OF_JSON = [(command, name) for _, command, names in ROWS for name in names if name.endswith(".json")]


def test_every_row_of_the_tables_was_read():
    lines = [line for line in (EXPERIMENTS / "README.md").read_text().splitlines() if line.startswith("|")]
    heads = [line for line in lines if line.startswith(("| question", "|---"))]
    assert len(ROWS) == len(lines) - len(heads) > 0


def test_every_result_is_listed_once():
    listed = [name for _, _, names in ROWS for name in names]
    assert sorted(listed) == sorted(RESULTS)


def test_every_script_is_listed():
    scripts = {path.name for path in EXPERIMENTS.glob("*.py")}
    listed = {Path(word).name for _, command, _ in ROWS for word in command.split() if word.startswith("experiments/")}
    assert listed == scripts


@pytest.mark.parametrize("command", dict.fromkeys(command for _, command, _ in ROWS))
def test_commands_can_be_typed(command):
    words = shlex.split(command)
    if words[0] == "deepspeed-hybrid":
        build_parser().parse_args(words[1:])
    else:
        assert words[0] == "python" and any((ROOT / word).is_file() for word in words)


@pytest.mark.parametrize(("command", "name"), OF_JSON, ids=[name for _, name in OF_JSON])
def test_a_result_was_taken_by_its_command(command, name):
    taken = json.loads((EXPERIMENTS / "results" / name).read_text())["command"]
    assert FILE_OPTIONS.sub("", taken) == command
