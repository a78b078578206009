# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Builder of the gdn_streamed op."""

from .builder import HybridOpBuilder


class GdnStreamedBuilder(HybridOpBuilder):
    NAME = "ds_hybrid_gdn_streamed"
    BUILD_VAR = "DS_BUILD_HYBRID_GDN_STREAMED"
    oldest_toolkit = (12, 4)  # that takes a number of registers for a kernel

    def sources(self) -> list[str]:
        return ["csrc/gdn_streamed/pt_binding.cpp", "csrc/gdn_streamed/gdn_streamed.cu"]
