# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What is installed, and which path would run on this machine and why."""

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_hybrid import compat
from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.ops import loader
from deepspeed_hybrid.paths import resolve_paths
from deepspeed_hybrid.tools import checks, results
from deepspeed_hybrid.tools.device import capability, gpu_name, has_cuda
from deepspeed_hybrid.tools.models import build_model, load_config, shrunk
from deepspeed_hybrid.tools.process import quiet


def doctor(model_config: Path | None, use_graph_capture: bool, use_segki: bool, backend: str) -> int:
    """Print a report; returns 1 if a path that was asked for, or the model, cannot run here, else 0.

    Args:
        model_config: a config.json; None takes a tiny Qwen3.5. Its layers are tried with random weights, as many as
            hold every kind of layer.
        use_graph_capture, use_segki: ask for that path.
        backend: one of ``BACKENDS``; others than 'auto' and 'torch' ask for that path.
    """
    quiet()
    _section("versions", results.versions())
    _section("device", _devices())
    _section("compilers", _compilers())
    cuda_ops = {status.name: _op_line(status) for status in loader.op_status()}
    obstacle = loader.triton_obstacle()
    triton_line = f"cannot run: {obstacle}" if obstacle else "Triton; compiled at first use"
    _section("ops", cuda_ops | dict.fromkeys(loader.TRITON_OPS, triton_line))

    _section("GatedDeltaNet training", {"here": _training(build_model(load_config("tiny"), seed=0))})

    print(f"paths of {model_config or 'a tiny Qwen3.5'}")
    cfg = HybridEngineRolloutConfig(
        use_graph_capture=use_graph_capture or None, use_segki=use_segki or None, segki_backend=backend
    )
    try:
        model = build_model(shrunk(load_config(model_config or "tiny")), seed=0)
        paths = resolve_paths(SimpleNamespace(module=model), cfg)
    except (RuntimeError, ValueError, OSError) as refusal:
        print(f"  FAILED: {refusal}")
        return 1
    if model_config is not None:
        print(f"  (its first {len(paths.layers)} layers, which hold every kind)")
    print("\n".join(f"  {line}" for line in paths.describe().splitlines()))
    return 0


def _section(title: str, facts: dict) -> None:
    width = max(map(len, facts))
    print(title)
    for name, fact in facts.items():
        print(f"  {name:{width}}  {'not installed' if fact is None else fact}")
    print()


def _devices() -> dict[str, str]:
    accelerator = get_accelerator()
    facts = {"accelerator": accelerator.device_name(), "count": str(accelerator.device_count())}
    if has_cuda():
        memory = f"{accelerator.total_memory() / 2**30:.0f} GiB"
        facts.update(name=str(gpu_name()), capability="{}.{}".format(*capability()), memory=memory)
    elif torch.version.cuda is not None:
        facts["note"] = f"PyTorch was built for CUDA {torch.version.cuda}, but sees no device: all runs on the CPU"
    return facts


def _compilers() -> dict[str, str | None]:
    from torch.utils.cpp_extension import CUDA_HOME

    loader.find_ninja()
    nvcc = shutil.which(str(Path(CUDA_HOME) / "bin" / "nvcc")) if CUDA_HOME else None
    return {
        "nvcc": _version_line(nvcc or "nvcc"),
        "ninja": _version_line("ninja"),
        "c++": _version_line(os.environ.get("CXX", "c++")),
    }


def _version_line(program: str) -> str | None:
    """'path: the line of --version that has the number', or None where it is not on PATH."""
    path = shutil.which(program)
    if path is None:
        return None
    try:
        lines = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}: does not run ({error})"
    numbered = [line for line in lines if any(character.isdigit() for character in line)]
    release = [line for line in numbered if "release" in line]
    return f"{path}: {(release or numbered or ['no version'])[0].strip()}"


def _op_line(status: loader.OpStatus) -> str:
    if not status.compatible:
        return f"cannot be built: {status.reason}"
    return "built" if status.built else "will be built at first use"


def _training(model: nn.Module) -> str:
    """Whether transformers' own forward and backward work here; on a GPU they would tune kernels, so only FLA is
    asked."""
    if has_cuda():
        return checks.training_obstacle() or "ok: flash-linear-attention has a backward for this card and Triton"
    rebound = compat.bind_torch_gdn_without_gpu()
    device = next(model.parameters()).device
    try:
        model(input_ids=torch.arange(8, device=device)[None], use_cache=False).logits.sum().backward()
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {error}"
    if not rebound:
        return "ok: a training step ran on transformers' torch functions"
    return (
        "ok: a training step ran on transformers' torch functions; flash-linear-attention is installed, and "
        "transformers would call its kernels, which need a GPU. `import deepspeed_hybrid` undoes that, before or "
        "after the model is made, but before its first forward"
    )
