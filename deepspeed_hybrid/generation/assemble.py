# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""From the rows' answers to the batch a trainer puts into its loss."""

import torch
from deepspeed.runtime.rollout.base import RolloutRequest

from deepspeed_hybrid.generation.batch import FinishedRow, RolloutBatch
from deepspeed_hybrid.generation.loop import Answers
from deepspeed_hybrid.ops.decode_step import STOPPED


def assemble(request: RolloutRequest, samples: int, answers: Answers, pad: int) -> RolloutBatch:
    """Prompts as they came, answers cut to the longest and padded, on the request's device. Reads lengths: a sync."""
    device, width = request.prompt_ids.device, request.prompt_ids.shape[1]
    longest = int(answers.lengths.max())
    lengths = answers.lengths.to(device)
    valid = torch.arange(longest, device=device)[None, :] < lengths[:, None]
    response = answers.tokens[:, :longest].to(device).masked_fill(~valid, pad)
    logprobs = answers.logprobs[:, :longest].to(device).masked_fill(~valid, 0.0)
    prompt = request.prompt_ids.long().repeat_interleave(samples, dim=0)
    prompt_mask = request.prompt_attention_mask.long().repeat_interleave(samples, dim=0)
    return RolloutBatch(
        input_ids=torch.cat([prompt, response], dim=1),
        attention_mask=torch.cat([prompt_mask, valid.long()], dim=1),
        response_start_idx=torch.full((prompt.shape[0],), width, dtype=torch.long, device=device),
        logprobs=logprobs,
        response_lengths=lengths,
        finish_reasons=[finish_reason(code) for code in answers.finish.tolist()],
    )


def finished_row(answers: Answers, index: int, device: torch.device) -> FinishedRow:
    """One row of ``answers`` on ``device``."""
    length = int(answers.lengths[index])
    return FinishedRow(
        index=index,
        tokens=answers.tokens[index, :length].to(device, copy=True),
        logprobs=answers.logprobs[index, :length].to(device, copy=True),
        finish_reason=finish_reason(int(answers.finish[index])),
    )


def finish_reason(code: int) -> str:
    return "stop" if code == STOPPED else "length"
