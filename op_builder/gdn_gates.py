# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Builder of the gdn_gates op."""

from .builder import HybridOpBuilder


class GdnGatesBuilder(HybridOpBuilder):
    NAME = "ds_hybrid_gdn_gates"
    BUILD_VAR = "DS_BUILD_HYBRID_GDN_GATES"

    def sources(self) -> list[str]:
        return ["csrc/gdn_gates/pt_binding.cpp", "csrc/gdn_gates/gdn_gates.cu"]
