# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Builder of the warpgroup_linear op."""

from deepspeed.ops.op_builder.builder import installed_cuda_version

from .builder import HybridOpBuilder

OLDEST_TOOLKIT = (12, 5)  # that can ask the driver for a function by its version


class WarpgroupLinearBuilder(HybridOpBuilder):
    NAME = "ds_hybrid_warpgroup_linear"
    BUILD_VAR = "DS_BUILD_HYBRID_WARPGROUP_LINEAR"

    def sources(self) -> list[str]:
        return ["csrc/warpgroup_linear/pt_binding.cpp", "csrc/warpgroup_linear/warpgroup_linear.cu"]

    def obstacle(self) -> str | None:
        found = super().obstacle()
        if found is None and tuple(installed_cuda_version()) < OLDEST_TOOLKIT:
            return (
                f"nvcc is of CUDA {'.'.join(map(str, installed_cuda_version()))}, and 12.5 is the first that will do"
            )
        return found

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        # Warpgroup products are Hopper's alone, and a feature that has to be named.
        super().compute_capability_args(cross_compile_archs)
        return ["-gencode=arch=compute_90a,code=sm_90a"]
