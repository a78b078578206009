# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Builder of the warpgroup_linear op."""

from .builder import HybridOpBuilder


class WarpgroupLinearBuilder(HybridOpBuilder):
    NAME = "ds_hybrid_warpgroup_linear"
    BUILD_VAR = "DS_BUILD_HYBRID_WARPGROUP_LINEAR"
    oldest_toolkit = (12, 5)  # that can ask the driver for a function by its version

    def sources(self) -> list[str]:
        return ["csrc/warpgroup_linear/pt_binding.cpp", "csrc/warpgroup_linear/warpgroup_linear.cu"]

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        # Warpgroup products are Hopper's alone, and a feature that has to be named.
        super().compute_capability_args(cross_compile_archs)
        return ["-gencode=arch=compute_90a,code=sm_90a"]
