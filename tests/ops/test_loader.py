# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Builders, their flags, and what is said where an op cannot be built."""

import importlib
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepspeed_hybrid.ops import compile as compiling
from deepspeed_hybrid.ops import loader

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def builder_module():
    loader.builder("decode_step")
    return importlib.import_module("deepspeed_hybrid.op_builder.builder")


@pytest.fixture
def buildable(builder_module, monkeypatch):
    """A machine on which every check passes; tests break one thing each."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/toolkit")
    monkeypatch.setattr("torch.utils.cpp_extension.is_ninja_available", lambda: True)
    monkeypatch.setattr(builder_module, "installed_cuda_version", lambda: (13, 0))
    monkeypatch.setattr("deepspeed.ops.op_builder.builder.installed_cuda_version", lambda: (13, 0))
    monkeypatch.setenv("CXX", sys.executable)
    return type(loader.builder("decode_step"))()


def test_unknown_op_names_the_ops():
    with pytest.raises(ValueError, match=r"unknown op 'flash'; the ops are .*decode_step"):
        loader.load("flash")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the op loads where there is a GPU")
def test_load_without_a_gpu_names_the_cause():
    reason = loader.op_obstacle("decode_step")
    assert reason is not None
    with pytest.raises(RuntimeError, match="CUDA op 'decode_step' cannot be built: ") as raised:
        loader.load("decode_step")
    assert reason in str(raised.value)


def test_no_obstacle_on_a_complete_machine(buildable):
    assert buildable.obstacle() is None
    assert buildable.is_compatible()
    assert buildable.error_log is None


def test_cpu_build_of_torch_is_named(buildable, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "not a CUDA build" in buildable.obstacle()


def test_missing_gpu_is_named_unless_only_compiling(buildable, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert buildable.obstacle() == "no CUDA device is visible"
    buildable.needs_device = False
    assert buildable.obstacle() is None


def test_missing_toolkit_is_named(buildable, monkeypatch):
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    assert "CUDA_HOME" in buildable.obstacle()
    assert not buildable.is_compatible()
    assert "CUDA_HOME" in buildable.error_log


def test_toolkit_without_nvcc_is_named(builder_module, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    assert f"CUDA_HOME={tmp_path} has no working nvcc" in loader.builder("decode_step").obstacle()


def test_toolkit_of_another_cuda_is_named(buildable, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert buildable.obstacle() == "nvcc is of CUDA 13.0, but PyTorch was built for CUDA 12.8"


def test_missing_host_compiler_is_named(buildable, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "'no-such-compiler'" in buildable.obstacle()


def test_missing_ninja_is_named(buildable, monkeypatch):
    monkeypatch.setattr("torch.utils.cpp_extension.is_ninja_available", lambda: False)
    assert "ninja" in buildable.obstacle()


def test_pips_ninja_is_found_where_the_environment_is_not_active(monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(os.path.realpath("/bin/sh")))
    pytest.importorskip("ninja", reason="ninja was not installed by pip")
    loader.find_ninja()
    assert shutil.which("ninja")


@pytest.mark.parametrize("name", loader.BUILDERS)
def test_names_cannot_clash_and_math_is_exact(name, buildable, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    builder = loader.builder(name)
    assert builder.name.startswith("ds_hybrid_")
    assert builder.BUILD_VAR.startswith("DS_BUILD_HYBRID_")
    assert "--use_fast_math" not in builder.nvcc_args()
    assert "-O3" in builder.nvcc_args()
    assert "-O3" in builder.cxx_args() and "-g" not in builder.cxx_args()


@pytest.mark.parametrize("requested", ["9.0a", "9.0a+PTX", "8.0;9.0a", "9.0 10.0f"])
def test_feature_suffixes_of_architectures_are_accepted(buildable, requested, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", requested)
    monkeypatch.setattr(torch.utils.cpp_extension, "load", lambda **options: os.environ["TORCH_CUDA_ARCH_LIST"])
    monkeypatch.setattr(type(buildable), "_loaded_ops", {})
    built_for = buildable.jit_load(verbose=False)
    assert "9.0" in built_for and "a" not in built_for and "f" not in built_for
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == requested


def test_status_has_a_row_for_every_op(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    rows = loader.op_status()
    assert [row.name for row in rows] == list(loader.BUILDERS)
    for row in rows:
        assert row.compatible == (row.reason is None)
        assert not row.built


def test_status_sees_a_library_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    loader.library_path("decode_step").touch()
    assert [row.name for row in loader.op_status() if row.built] == ["decode_step"]


def test_ops_join_deepspeeds_report(monkeypatch):
    from deepspeed.ops.op_builder import all_ops

    monkeypatch.setattr(all_ops, "ALL_OPS", dict(all_ops.ALL_OPS))
    loader.register_with_deepspeed()
    for name in loader.BUILDERS:
        assert all_ops.ALL_OPS[loader.builder(name).name] is loader.builder(name)


def test_failed_build_names_the_op_and_its_folder(buildable, monkeypatch, tmp_path):
    def fail(verbose):
        raise RuntimeError("nvcc said no")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(buildable, "load", fail)
    monkeypatch.setattr(loader, "builder", lambda name: buildable)
    with pytest.raises(RuntimeError, match=f"'decode_step' in {tmp_path}.* failed: nvcc said no"):
        loader.load("decode_step")


@pytest.mark.parametrize("locks_by_file", [True, False])
def test_lock_of_a_killed_build_is_mentioned_where_torch_waits_for_it(
    locks_by_file, buildable, monkeypatch, tmp_path, caplog
):
    if locks_by_file:
        monkeypatch.setattr("torch.utils.cpp_extension.FileBaton", object, raising=False)
    else:
        monkeypatch.delattr("torch.utils.cpp_extension.FileBaton", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(buildable, "load", lambda verbose: "module")
    monkeypatch.setattr(loader, "builder", lambda name: buildable)
    lock = loader.build_directory("decode_step") / "lock"
    lock.touch()
    with caplog.at_level(logging.WARNING, logger=loader.logger.name):
        assert loader.load.__wrapped__("decode_step") == "module"
    assert (f"delete {lock}" in caplog.text) == locks_by_file


def test_compiling_leaves_the_environment_alone(buildable, monkeypatch):
    seen = []
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        type(buildable), "jit_load", lambda self, verbose: seen.append(os.environ["TORCH_CUDA_ARCH_LIST"])
    )
    compiling.compile_op("decode_step", "9.0")
    assert seen == ["9.0"]
    assert "TORCH_CUDA_ARCH_LIST" not in os.environ


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, where a process has threads
def test_compiling_side_by_side_fails_where_one_op_does(monkeypatch, tmp_path):
    def compile_one(name: str, arch_list: str) -> Path:
        if name == "bad":
            raise RuntimeError("nvcc said no")
        (tmp_path / name).write_text(arch_list)
        return tmp_path / name

    monkeypatch.setattr(compiling, "compile_op", compile_one)
    compiling.main(["one", "two", "--arch", "9.0", "--jobs", "2"])
    assert [(tmp_path / name).read_text() for name in ("one", "two")] == ["9.0", "9.0"]
    with pytest.raises(RuntimeError, match="nvcc said no"):
        compiling.main(["bad", "three", "--jobs", "2"])


def test_builders_are_found_in_a_checkout_that_is_not_installed(tmp_path):
    """-S hides site-packages' editable finder; torch and DeepSpeed stay importable through PYTHONPATH."""
    code = "from deepspeed_hybrid.ops import loader; print(loader.builder('decode_step').__class__.__module__)"
    site_packages = [path for path in sys.path if path.endswith("site-packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *site_packages])}
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "deepspeed_hybrid.op_builder.decode_step"


@pytest.mark.parametrize(
    "name, toolkit",
    [("attention_streamed", (12, 5)), ("warpgroup_linear", (12, 5)), ("gdn_streamed", (12, 4))],
)
def test_ops_that_want_a_newer_toolkit(name, toolkit, monkeypatch):
    base = sys.modules[type(loader.builder(name)).__mro__[1].__module__]
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/cuda")
    monkeypatch.setattr("torch.utils.cpp_extension.is_ninja_available", lambda: True)
    said = {}
    for minor in (toolkit[1] - 1, toolkit[1]):
        monkeypatch.setattr(base, "installed_cuda_version", lambda minor=minor: (12, minor))
        said[minor] = loader.builder(name).obstacle()
    wanted = f"nvcc is of CUDA 12.{toolkit[1] - 1}, and 12.{toolkit[1]} is the first that will do"
    assert list(said.values()) == [wanted, None]
    assert loader.builder("few_rows_linear").oldest_toolkit is None
