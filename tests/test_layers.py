# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What holds for every source file: which way imports go, headers, length, and where version numbers may stand."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "deepspeed_hybrid"

# A module imports from its own row and from rows above it.
LAYERS = [
    ["ops", "config"],
    ["autotp", "compat", "hooks"],
    ["segments"],
    ["cache"],
    ["generation"],
    ["speculative"],
    ["agreement", "job", "paths", "profile", "rollout", "speculation"],
    ["__init__", "__main__", "bench", "cli", "demo", "doctor", "factory", "integrations", "tools"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

MAX_LINES = 400
SOURCE_FOLDERS = ["deepspeed_hybrid", "op_builder", "csrc", "tests", "experiments"]
SOURCE_SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h"}
SOURCES = [ROOT / "setup.py"] + [
    path for folder in SOURCE_FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SOURCE_SUFFIXES
]
MODULES = sorted(PACKAGE.rglob("*.py"))

TRANSFORMERS_VERSION = re.compile(r"\b5\.(1[4-9]|2\d)(\.\d+)?\b")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def part_of(module: str) -> str:
    """'deepspeed_hybrid.cache.layers' -> 'cache'; the package itself is '__init__'."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def dotted_name(path: Path) -> str:
    names = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names of this package's modules that a file imports, wherever in the file."""
    package = dotted_name(path).split(".") if path.name == "__init__.py" else dotted_name(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parent, *([node.module] if node.module else [])])
            # `from deepspeed_hybrid import ops` names a part; `from deepspeed_hybrid.ops.x import y` has it already.
            names = [f"{module}.{alias.name}" if module == "deepspeed_hybrid" else module for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "deepspeed_hybrid")


def imported_parts(path: Path) -> set[str]:
    parts = {part_of(module) for module in imported_modules(path)}
    known = {child.stem for child in PACKAGE.iterdir()}
    return {part if part in known else "__init__" for part in parts}


def test_every_part_of_the_package_has_a_layer():
    parts = {part_of(dotted_name(path)) for path in MODULES}
    assert parts <= set(RANK), f"add to LAYERS: {sorted(parts - set(RANK))}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_one_way(path):
    own = RANK[part_of(dotted_name(path))]
    upward = {part for part in imported_parts(path) if RANK[part] > own}
    assert not upward, f"{relative(path)} imports from {sorted(upward)}, which build on it"


def test_the_import_reader_sees_every_spelling(tmp_path, monkeypatch):
    """Else the test above could pass without looking."""
    monkeypatch.setattr("test_layers.ROOT", tmp_path)
    path = tmp_path / "deepspeed_hybrid" / "ops" / "example.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import deepspeed_hybrid.cache.layers\n"
        "from deepspeed_hybrid import rollout\n"
        "from deepspeed_hybrid.segments import plan\n"
        "def late():\n"
        "    from ..generation.step import decode_step\n"
        "    from . import loader\n"
        "import torch\n"
    )
    assert {part_of(module) for module in imported_modules(path)} == {
        "cache",
        "rollout",
        "segments",
        "generation",
        "ops",
    }


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_header_and_length(path):
    comment = "#" if path.suffix == ".py" else "//"
    lines = path.read_text().splitlines()
    assert lines[0] == f"{comment} SPDX-License-Identifier: Apache-2.0"
    assert f"{comment} DeepSpeed Team" in lines[1:3]
    assert len(lines) <= MAX_LINES, f"{len(lines)} lines; split it by concept"


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "compat.py"], ids=relative)
def test_versions_of_transformers_are_compats_business(path):
    found = TRANSFORMERS_VERSION.search(path.read_text())
    assert found is None, f"{relative(path)} mentions transformers {found and found.group()}"
