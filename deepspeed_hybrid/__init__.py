# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Rollouts for RL inside a DeepSpeed engine, at the speed of a dedicated server, on the weights that train."""

from deepspeed.runtime.rollout.base import RolloutConfig, RolloutEngine

from deepspeed_hybrid.compat import bind_torch_gdn_without_gpu
from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.factory import build_rollout
from deepspeed_hybrid.generation.batch import FinishedRow, RolloutBatch, RolloutRequest, SamplingConfig
from deepspeed_hybrid.rollout import HybridEngineRollout
from deepspeed_hybrid.segments.weights import WeightSyncReport

__version__ = "0.1.0"

__all__ = [
    "FinishedRow",
    "HybridEngineRollout",
    "HybridEngineRolloutConfig",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutBatch",
    "RolloutRequest",
    "SamplingConfig",
    "WeightSyncReport",
    "build_rollout",
]

bind_torch_gdn_without_gpu()
