# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The base of this package's op builders."""

import os
import re
import shutil
from pathlib import Path

import torch
from deepspeed.ops.op_builder.builder import CUDAOpBuilder, MissingCUDAException, installed_cuda_version


class HybridOpBuilder(CUDAOpBuilder):
    """Builds one folder of this package's csrc/ just in time.

    A subclass sets NAME (prefixed "ds_hybrid_", because DeepSpeed and torch key loaded ops and build folders by the
    name alone) and BUILD_VAR, and lists its sources() relative to the folder that holds csrc/.
    """

    NAME: str
    BUILD_VAR: str

    # False lets a machine without a GPU compile the op for the architectures in TORCH_CUDA_ARCH_LIST.
    needs_device = True

    # Of CUDA, where the op is built with what an older one does not know.
    oldest_toolkit: tuple[int, int] | None = None

    def __init__(self):
        super().__init__(name=self.NAME)

    @property
    def build_for_cpu(self) -> bool:
        """Always False: these ops are CUDA only, and DeepSpeed would otherwise drop nvcc's flags without a GPU."""
        return False

    @build_for_cpu.setter
    def build_for_cpu(self, value: bool) -> None:
        """DeepSpeed assigns this; there is no CPU build to choose."""

    def absolute_name(self) -> str:
        return f"deepspeed_hybrid.ops.{self.NAME}_op"

    def deepspeed_src_path(self, code_path: str) -> str:
        """csrc/ lies beside op_builder/, in a checkout and in the wheel."""
        return str(Path(__file__).resolve().parent.parent / code_path)

    def include_paths(self) -> list[str]:
        return ["csrc/includes"]

    def cxx_args(self) -> list[str]:
        # Debug information takes as long to write as the bindings take to compile.
        return [arg for arg in super().cxx_args() if arg != "-g"]

    def nvcc_args(self) -> list[str]:
        # Fast math changes exp, log and division, and so a rollout's tokens and logprobs.
        return [arg for arg in super().nvcc_args() if arg != "--use_fast_math"]

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        # DeepSpeed parses a minor version as an integer and fails on the feature suffixes of 9.0a or 12.0f.
        requested = getattr(self, "_jit_arch_list", None)
        if requested:
            self._jit_arch_list = re.sub(r"(\.\d+)[af]\b", r"\1", requested)
        return super().compute_capability_args(cross_compile_archs)

    def obstacle(self) -> str | None:
        """Why the op cannot be built and used on this machine, or None where it can."""
        from torch.utils.cpp_extension import CUDA_HOME, is_ninja_available

        if torch.version.cuda is None:
            return f"PyTorch {torch.__version__} is not a CUDA build"
        if self.needs_device and not torch.cuda.is_available():
            return "no CUDA device is visible"
        if CUDA_HOME is None:
            return "no CUDA toolkit was found: set CUDA_HOME, or put nvcc on PATH"
        try:
            toolkit = installed_cuda_version()
        except MissingCUDAException as error:
            return f"CUDA_HOME={CUDA_HOME} has no working nvcc: {error}"
        if toolkit[0] != int(torch.version.cuda.split(".")[0]):
            return f"nvcc is of CUDA {toolkit[0]}.{toolkit[1]}, but PyTorch was built for CUDA {torch.version.cuda}"
        if self.oldest_toolkit and tuple(toolkit) < self.oldest_toolkit:
            oldest = ".".join(map(str, self.oldest_toolkit))
            return f"nvcc is of CUDA {toolkit[0]}.{toolkit[1]}, and {oldest} is the first that will do"
        compiler = os.environ.get("CXX", "c++")
        if shutil.which(compiler) is None:
            return f"the C++ compiler {compiler!r} is not on PATH"
        if not is_ninja_available():
            return "ninja is not on PATH"
        return None

    def is_compatible(self, verbose: bool = False) -> bool:
        self.error_log = self.obstacle()
        if verbose and self.error_log:
            self.warning(f"{self.name}: {self.error_log}")
        return self.error_log is None
