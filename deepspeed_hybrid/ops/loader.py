# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""CUDA ops by name: built on first use, once a process."""

import functools
import importlib
import importlib.util
import logging
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from deepspeed.accelerator import get_accelerator

logger = logging.getLogger(__name__)

BUILDER_PACKAGE = "deepspeed_hybrid.op_builder"
BUILDERS = {
    "attention_streamed": f"{BUILDER_PACKAGE}.attention_streamed:AttentionStreamedBuilder",
    "decode_step": f"{BUILDER_PACKAGE}.decode_step:DecodeStepBuilder",
    "few_rows_linear": f"{BUILDER_PACKAGE}.few_rows_linear:FewRowsLinearBuilder",
    "fused_silu_mul_halves": f"{BUILDER_PACKAGE}.fused_silu_mul_halves:FusedSiluMulHalvesBuilder",
    "gdn_gates": f"{BUILDER_PACKAGE}.gdn_gates:GdnGatesBuilder",
    "gdn_streamed": f"{BUILDER_PACKAGE}.gdn_streamed:GdnStreamedBuilder",
    "gdn_streamed_block": f"{BUILDER_PACKAGE}.gdn_streamed_block:GdnStreamedBlockBuilder",
    "truncate_scores": f"{BUILDER_PACKAGE}.truncate_scores:TruncateScoresBuilder",
    "warpgroup_linear": f"{BUILDER_PACKAGE}.warpgroup_linear:WarpgroupLinearBuilder",
}
# Ops whose kernels Triton compiles at their first use.
TRITON_OPS = (
    "normed_rows",
    "normed_linear",
    "residual_linear",
    "gdn_conv",
    "gated_norm",
    "gdn_decode",
    "gdn_deferred",
    "gdn_block",
    "gdn_commit",
    "gdn_windows",
    "attention_decode",
    "attention_block",
    "draft_attention",
    "draft_context",
    "block_inputs",
    "block_rows",
    "block_accept",
    "count_reached",
)


class OpStatus(NamedTuple):
    """One op on this machine; `reason` says why it is not compatible, `built` whether its library lies on disk."""

    name: str
    builder: str
    compatible: bool
    reason: str | None
    built: bool


@functools.cache
def builder(name: str):
    """The builder of an op.

    Raises:
        ValueError: there is no such op.
    """
    if name not in BUILDERS:
        raise ValueError(f"unknown op {name!r}; the ops are {', '.join(BUILDERS)}")
    _import_builder_package()
    module, _, class_name = BUILDERS[name].partition(":")
    return getattr(importlib.import_module(module), class_name)()


def op_obstacle(name: str) -> str | None:
    """Why an op cannot be built and used here, or None where it can."""
    find_ninja()
    return builder(name).obstacle()


def triton_obstacle() -> str | None:
    """Why the Triton ops cannot run here, or None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    accelerator = get_accelerator()
    visible = accelerator.device_name() == "cuda" and accelerator.is_available()
    return None if visible else "no CUDA device is visible"


@functools.cache
def load(name: str) -> ModuleType:
    """An op's extension module; the first call builds it, or finds the library of an earlier build.

    Raises:
        ValueError: there is no such op.
        RuntimeError: it cannot be built here; the message names the cause.
    """
    obstacle = op_obstacle(name)
    if obstacle:
        raise RuntimeError(f"CUDA op {name!r} cannot be built: {obstacle}")
    _mention_lock(name)
    try:
        return builder(name).load(verbose=False)
    except Exception as error:
        raise RuntimeError(f"building CUDA op {name!r} in {build_directory(name)} failed: {error}") from error


def op_status() -> list[OpStatus]:
    """A row for every op; builds nothing."""
    rows = []
    for name, target in BUILDERS.items():
        reason = op_obstacle(name)
        rows.append(OpStatus(name, target, reason is None, reason, library_path(name).is_file()))
    return rows


def register_with_deepspeed() -> None:
    """List the ops in DeepSpeed's own op report (`deepspeed.env_report`), for this process."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    for name in BUILDERS:
        ALL_OPS[builder(name).name] = builder(name)


def build_directory(name: str) -> Path:
    """Where torch builds an op: below TORCH_EXTENSIONS_DIR, or below its folder in the user's cache."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(builder(name).name, verbose=False))


def library_path(name: str) -> Path:
    return build_directory(name) / f"{builder(name).name}.so"


def _import_builder_package() -> None:
    """Make deepspeed_hybrid.op_builder importable in a checkout that is not installed."""
    if BUILDER_PACKAGE in sys.modules or importlib.util.find_spec(BUILDER_PACKAGE):
        return
    folder = Path(__file__).resolve().parents[2] / "op_builder"
    spec = importlib.util.spec_from_file_location(
        BUILDER_PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not folder.is_dir():
        raise RuntimeError(f"the op builders are neither installed as {BUILDER_PACKAGE} nor in {folder}")
    package = importlib.util.module_from_spec(spec)
    sys.modules[BUILDER_PACKAGE] = package
    spec.loader.exec_module(package)


def find_ninja() -> None:
    """Put the ninja that pip installed on PATH, where torch looks: an interpreter may run without its venv active."""
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja"):
        folder = importlib.import_module("ninja").BIN_DIR
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), folder])


def _mention_lock(name: str) -> None:
    """Older versions of torch wait without end for the lock file of a killed build; newer ones lock by the OS."""
    from torch.utils import cpp_extension

    lock = build_directory(name) / "lock"
    if hasattr(cpp_extension, "FileBaton") and lock.exists():
        logger.warning(
            "waiting for another build of CUDA op %r; if none is running, delete %s, which a killed build left behind",
            name,
            lock,
        )
