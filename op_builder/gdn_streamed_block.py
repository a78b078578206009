# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Builder of the gdn_streamed_block op."""

from .builder import HybridOpBuilder


class GdnStreamedBlockBuilder(HybridOpBuilder):
    NAME = "ds_hybrid_gdn_streamed_block"
    BUILD_VAR = "DS_BUILD_HYBRID_GDN_STREAMED_BLOCK"

    def sources(self) -> list[str]:
        return [
            "csrc/gdn_streamed_block/pt_binding.cpp",
            "csrc/gdn_streamed_block/gdn_streamed_block.cu",
        ]
