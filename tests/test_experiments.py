# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""experiments/README.md has every script and every result, and what it says of them is so."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from deepspeed_hybrid.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments"
REPRODUCE = EXPERIMENTS / "reproduce.py"
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


# -------------------------------------------------------------------------------------------------------------- README

FIGURES = re.findall(
    r"^\| [^|]+ \| ([^|]+) \| (\w+\.json)[^|]* \| [^|]+ \|$", (ROOT / "README.md").read_text(), re.MULTILINE
)
SCALES = (1, 1e-3, 1e-9, 100)  # as it is, us in ms, bytes in GB, shares in per cent
LAST = 5  # steps of a demo whose mean is its result


def numbers_in(rows: list[dict]) -> list[float]:
    """All numbers of a result, and means of its last rows."""
    found = [value for row in rows for value in row.values() if isinstance(value, int | float)]
    for name, value in rows[-1].items():
        last = [row.get(name) for row in rows[-LAST:]]
        if isinstance(value, float) and all(isinstance(one, float) for one in last):
            found.append(sum(last) / len(last))
    return found


@pytest.mark.parametrize(("figure", "name"), FIGURES, ids=lambda value: value if value.endswith(".json") else "")
def test_a_figure_of_the_readme_is_in_its_file(figure, name):
    known = numbers_in(json.loads((EXPERIMENTS / "results" / name).read_text())["rows"])
    for text in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-\d+)?", figure):
        value, _, exponent = text.replace(",", "").partition("e")
        unit = 10.0 ** -(len(value.partition(".")[2]) - int(exponent or 0))
        wanted = float(value + (f"e{exponent}" if exponent else ""))
        assert any(abs(one * scale - wanted) <= 0.5001 * unit for one in known for scale in SCALES), text


def test_figures_of_the_readme_were_read():
    assert len(FIGURES) > 12


# ----------------------------------------------------------------------------------------------------------- reproduce


@pytest.fixture(scope="module")
def reproduce():
    spec = importlib.util.spec_from_file_location("reproduce", REPRODUCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["reproduce"] = module  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    yield module
    del sys.modules["reproduce"]


def test_every_figure_of_the_readme_is_taken_again(reproduce):
    wanted = reproduce.readme_commands()
    assert len(wanted) > 8
    assert set(wanted) <= {command.of_readme for command in reproduce.COMMANDS}
    figures = {name for row in reproduce.ROW.findall(reproduce.README.read_text()) for name in row[2].split(", ")}
    named = {name for name in figures if name.endswith(".json")} - {"fidelity_h200.json"}  # a test's log has it
    assert named <= {command.out for command in reproduce.COMMANDS}


def test_commands_that_take_figures_again_can_be_typed(reproduce, tmp_path):
    for command in reproduce.COMMANDS:
        words = command.arguments(tmp_path)
        assert words[0] in ("python", "deepspeed-hybrid")
        if words[0] == "deepspeed-hybrid":
            build_parser().parse_args(words[1:])
        elif words[1] != "-m":
            script = (ROOT / words[1]).read_text()
            options = {word for word in words if word.startswith("--")}
            assert all(f'"{option}"' in script for option in options), f"{command.words}: not all are options"


def test_list_says_all(reproduce, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--list"])
    assert reproduce.main() == 0
    printed = capsys.readouterr().out
    assert all(command.words in printed for command in reproduce.COMMANDS)


def test_what_comes_of_commands_is_told_apart(reproduce, tmp_path, monkeypatch, capsys):
    """One that ends well, one that fails, one that is too slow, one without its file; in processes and in this one."""
    good, bad, slow, without = (
        reproduce.Command(f"python -c {shlex.quote(code)}", out, limit)
        for code, out, limit in (
            ("print(1)", None, 600), ("raise SystemExit(3)", None, 600), ("import time; time.sleep(9999)", None, 1),
            ("print(2)", "none.json", 600),
        )
    )  # fmt: skip
    script = tmp_path / "endless.py"
    script.write_text("while True: pass")
    endless = reproduce.Command(f"python {script}", None, 1)
    monkeypatch.setattr(reproduce, "COMMANDS", [good, bad, slow, without, endless])
    monkeypatch.setattr(reproduce, "free_memory", lambda: None)
    run = reproduce.Run(tmp_path / "out", 9999)
    for command in (good, bad, slow, without):
        run.wait(run.start(command))
    states = [run.outcomes[command].state for command in (good, bad, slow, without)]
    assert states == ["ok", "failed (3)", "cut off", "wrote no none.json"]
    assert run.log(good).read_text() == "1\n"

    before, argv = reproduce.signal.getsignal(reproduce.signal.SIGALRM), sys.argv
    reproduce.signal.signal(reproduce.signal.SIGALRM, reproduce.cut)
    try:
        run.here(endless)
    finally:
        reproduce.signal.signal(reproduce.signal.SIGALRM, before)
        sys.argv = argv
    assert run.outcomes[endless].state == "cut off"
    assert "cut off" in capsys.readouterr().out
