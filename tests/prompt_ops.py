# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The ops of prompts on a CPU, where a rollout otherwise leaves them to the model's own code."""

from collections import Counter
from dataclasses import fields, replace
from functools import partial

from deepspeed_hybrid import HybridEngineRollout
from deepspeed_hybrid.ops.fused_linear import normed_linear_reference, normed_rows_reference, residual_linear_reference
from deepspeed_hybrid.ops.gated_heads import gated_heads_reference
from deepspeed_hybrid.ops.gated_norm import gated_norm_reference
from deepspeed_hybrid.ops.gdn_chunks import gdn_chunks_reference
from deepspeed_hybrid.ops.gdn_conv import gdn_conv_reference
from deepspeed_hybrid.ops.keep_tokens import keep_tokens_reference
from deepspeed_hybrid.ops.prompt_heads import prompt_heads_reference
from deepspeed_hybrid.ops.rotary_tables import rotary_tables_reference
from deepspeed_hybrid.ops.shared_sum import SharedSum
from deepspeed_hybrid.segments.prompts import PromptOps


def reference_ops() -> PromptOps:
    """All of them."""
    return PromptOps(
        gdn_conv_reference,
        gdn_chunks_reference,
        normed_rows_reference,
        gated_norm_reference,
        rotary_tables_reference,
        prompt_heads_reference,
        gated_heads_reference,
        keep_tokens_reference,
        normed_linear_reference,
        residual_linear_reference,
        SharedSum(normed_linear_reference, normed_rows_reference),
    )


def with_ops(rollout: HybridEngineRollout) -> list[Counter]:
    """Have a rollout run the ops from now on; for every forward, how often it ran each, decode chains apart."""
    model, injection, forwards = rollout._paths.call.model, rollout._injection, []

    def counted(name: str, op, *args, **kwargs):
        forwards[-1][name] += 1
        return op(*args, **kwargs)

    ops = reference_ops()
    names = [field.name for field in fields(ops) if field.name != "shared_sum"]
    injection.prompt = replace(ops, **{name: partial(counted, name, getattr(ops, name)) for name in names})
    injection.replan()
    injection.follow()
    model.register_forward_pre_hook(lambda *_: forwards.append(Counter()))
    return forwards
