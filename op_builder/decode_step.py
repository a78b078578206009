# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Builder of the decode_step op."""

from .builder import HybridOpBuilder


class DecodeStepBuilder(HybridOpBuilder):
    NAME = "ds_hybrid_decode_step"
    BUILD_VAR = "DS_BUILD_HYBRID_DECODE_STEP"

    def sources(self) -> list[str]:
        return ["csrc/decode_step/pt_binding.cpp", "csrc/decode_step/decode_step.cu"]
