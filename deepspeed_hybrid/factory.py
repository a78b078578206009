# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""DeepSpeed's factory, with one engine more."""

from deepspeed.runtime import rollout as deepspeed_rollout

from deepspeed_hybrid.rollout import HybridEngineRollout


def build_rollout(rollout_cfg, student_engine=None, tokenizer=None, **kwargs):
    """Build the engine named by ``rollout_cfg.engine``.

    Args:
        rollout_cfg: any object with ``engine``; for 'deepspeed_hybrid' its other fields are those of
            :class:`HybridEngineRolloutConfig`. Other names go to DeepSpeed's own factory.
        student_engine: the DeepSpeed engine.
        tokenizer: the tokenizer.

    Raises:
        ValueError: 'deepspeed_hybrid' without an engine or a tokenizer, or a name DeepSpeed does not know.
    """
    if rollout_cfg.engine != HybridEngineRollout.name:
        return deepspeed_rollout.build_rollout(rollout_cfg, student_engine, tokenizer, **kwargs)
    if student_engine is None or tokenizer is None:
        raise ValueError("deepspeed_hybrid rollout needs both student_engine and tokenizer")
    return HybridEngineRollout(student_engine, tokenizer, rollout_cfg)
