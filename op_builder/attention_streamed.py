# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Builder of the attention_streamed op."""

from .builder import HybridOpBuilder


class AttentionStreamedBuilder(HybridOpBuilder):
    NAME = "ds_hybrid_attention_streamed"
    BUILD_VAR = "DS_BUILD_HYBRID_ATTENTION_STREAMED"
    oldest_toolkit = (12, 5)  # that can ask the driver for a function by its version

    def sources(self) -> list[str]:
        return ["csrc/attention_streamed/pt_binding.cpp", "csrc/attention_streamed/attention_streamed.cu"]
