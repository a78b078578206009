# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Builder of the few_rows_linear op."""

from .builder import HybridOpBuilder


class FewRowsLinearBuilder(HybridOpBuilder):
    NAME = "ds_hybrid_few_rows_linear"
    BUILD_VAR = "DS_BUILD_HYBRID_FEW_ROWS_LINEAR"

    def sources(self) -> list[str]:
        return ["csrc/few_rows_linear/pt_binding.cpp", "csrc/few_rows_linear/few_rows_linear.cu"]
