# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Builder of the truncate_scores op."""

from .builder import HybridOpBuilder


class TruncateScoresBuilder(HybridOpBuilder):
    NAME = "ds_hybrid_truncate_scores"
    BUILD_VAR = "DS_BUILD_HYBRID_TRUNCATE_SCORES"

    def sources(self) -> list[str]:
        return ["csrc/truncate_scores/pt_binding.cpp", "csrc/truncate_scores/truncate_scores.cu"]
