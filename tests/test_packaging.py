# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The wheel holds everything that runs, under the one package name, and works away from the checkout."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deepspeed_hybrid.ops import loader

ROOT = Path(__file__).resolve().parents[1]
CSRC_SUFFIXES = {".cu", ".cuh", ".cpp", ".h"}

# One worker builds the wheel once.
needs_wheel = pytest.mark.xdist_group("wheel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing of an earlier build can slip in and the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ["setup.py", "pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, source)
    for name in ["deepspeed_hybrid", "op_builder", "csrc"]:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--target", folder, wheel)
    return folder


def pip(*arguments: object) -> None:
    run = [sys.executable, "-m", "pip", *map(str, arguments), "--disable-pip-version-check"]
    result = subprocess.run(run, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def said_away_from_the_checkout(installed) -> list[str]:
    """What the installed package says of itself, in lines: where it lies, its ops' sources, its version twice."""
    code = (
        "import deepspeed_hybrid, importlib.metadata\n"
        "from deepspeed_hybrid.ops import loader\n"
        "print(deepspeed_hybrid.__file__)\n"
        "for name in loader.BUILDERS:\n"
        "    builder = loader.builder(name)\n"
        "    for source in builder.sources():\n"
        "        print(builder.deepspeed_src_path(source))\n"
        "print(deepspeed_hybrid.__version__, importlib.metadata.version('deepspeed-hybrid'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def files_below(*folders: str, suffixes: set[str]) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes
    }


@needs_wheel
def test_wheel_holds_the_package_and_nothing_else(wheel):
    modules = files_below("deepspeed_hybrid", suffixes={".py", ".typed", ".md"})
    beside = files_below("op_builder", suffixes={".py"}) | files_below("csrc", suffixes=CSRC_SUFFIXES)
    expected = modules | {f"deepspeed_hybrid/{name}" for name in beside}

    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    assert names == expected


@needs_wheel
def test_wheel_imports_and_finds_its_sources_away_from_the_checkout(installed, said_away_from_the_checkout):
    lines = [Path(line) for line in said_away_from_the_checkout if line.startswith("/")]
    assert len(lines) > 1
    assert all(path.is_file() and path.is_relative_to(installed) for path in lines)


@needs_wheel
def test_versions_agree(said_away_from_the_checkout):
    module, distribution = said_away_from_the_checkout[-1].split()
    assert module == distribution


@needs_wheel
def test_console_script_is_there(installed):
    (entry_points,) = installed.glob("deepspeed_hybrid-*.dist-info/entry_points.txt")
    assert "deepspeed-hybrid = deepspeed_hybrid.cli:main" in entry_points.read_text()


@pytest.mark.parametrize("name", loader.BUILDERS)
def test_builder_finds_its_sources(name):
    builder = loader.builder(name)
    sources = [Path(builder.deepspeed_src_path(source)) for source in builder.sources()]
    includes = [Path(builder.deepspeed_src_path(folder)) for folder in builder.include_paths()]
    assert sources and all(source.is_file() for source in sources)
    assert all(folder.is_dir() for folder in includes)


def test_every_compiled_source_belongs_to_a_builder():
    listed = {source for name in loader.BUILDERS for source in loader.builder(name).sources()}
    assert listed == files_below("csrc", suffixes={".cu", ".cpp"})


def test_op_builder_package_defines_nothing():
    """DeepSpeed imports a top-level `op_builder` where the repository is on sys.path, and must find nothing there."""
    assert ast.parse((ROOT / "op_builder" / "__init__.py").read_text()).body == []


@needs_wheel
def test_groups_of_tests_stay_together(request):
    """pytest-xdist goes by this suffix alone; without it, each worker would build what they share."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("not run by pytest-xdist with --dist loadgroup")
    assert request.node.nodeid.endswith("@wheel")
