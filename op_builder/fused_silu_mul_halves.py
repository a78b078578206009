# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Builder of the fused_silu_mul_halves op."""

from .builder import HybridOpBuilder


class FusedSiluMulHalvesBuilder(HybridOpBuilder):
    NAME = "ds_hybrid_fused_silu_mul_halves"
    BUILD_VAR = "DS_BUILD_HYBRID_FUSED_SILU_MUL_HALVES"

    def sources(self) -> list[str]:
        return ["csrc/fused_silu_mul_halves/pt_binding.cpp", "csrc/fused_silu_mul_halves/fused_silu_mul_halves.cu"]
