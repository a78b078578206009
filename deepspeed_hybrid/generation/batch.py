# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The dataclasses a trainer sees. They extend DeepSpeed's, whose own objects are accepted everywhere."""

from dataclasses import dataclass

import torch
from deepspeed.runtime.rollout import base

LOGPROB_MODES = ("processed", "raw")
AUTO = "auto"  # a continuous_batch_size


@dataclass
class SamplingConfig(base.SamplingConfig):
    """How to sample, for one call.

    Args (beyond DeepSpeed's max_new_tokens, temperature, top_p, top_k, n_samples_per_prompt, continuous_batch_size):
        seed: 64-bit key of the noise; the same request and seed give the same tokens. None: fresh noise, drawn from
            torch's default generator. Each data-parallel rank has noise of its own under one seed, the first one that
            of a single process; ranks that share a model have the same.
        min_p: drop tokens less likely than this fraction of the likeliest; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen; None takes the
            generation_config's.
        stop_token_ids: further ids that end a row.
        logprobs_mode: 'processed' (the distribution sampled from) or 'raw' (the model's own).
        max_new_tokens_per_row: most new tokens of each row, in the order of the batch, or of each prompt; at most
            ``max_new_tokens``, which None gives to all. For rows that go on with what is left of their budget.

    ``continuous_batch_size`` may also be 'auto': as many slots as there are rows, or as the device has memory for.
    """

    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    logprobs_mode: str = "processed"
    max_new_tokens_per_row: list[int] | None = None


@dataclass
class RolloutRequest(base.RolloutRequest):
    """Left-padded prompts: ``prompt_ids`` [B, T_p] integer, ``prompt_attention_mask`` [B, T_p] bool or 0/1."""


@dataclass
class RolloutBatch(base.RolloutBatch):
    """Prompts and responses, B' = B * n rows, all samples of prompt 0 first.

    ``input_ids`` and ``attention_mask`` are [B', T_p + T_r], T_r the longest response; the mask is a run of ones from
    the first prompt token to the last response token, and positions after a row's end hold the pad id.
    """

    logprobs: torch.Tensor | None = None  # [B', T_r] fp32, 0.0 after a row's end
    response_lengths: torch.Tensor | None = None  # [B'] int64, the stop id counted
    finish_reasons: list[str] | None = None  # [B'] of 'stop' or 'length'


@dataclass
class FinishedRow:
    """One row of ``generate_iter``."""

    index: int  # row of the batch: prompt * n_samples_per_prompt + sample
    tokens: torch.Tensor  # [length] int64, the stop id included
    logprobs: torch.Tensor  # [length] fp32
    finish_reason: str  # 'stop' or 'length'
