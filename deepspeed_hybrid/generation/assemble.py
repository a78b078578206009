# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""From the rows' answers to the batch a trainer puts into its loss."""

import torch
from deepspeed.runtime.rollout.base import RolloutRequest

from deepspeed_hybrid.generation.batch import FinishedRow, RolloutBatch
from deepspeed_hybrid.generation.loop import Answers
from deepspeed_hybrid.ops.decode_step import STOPPED


def assemble(request: RolloutRequest, samples: int, answers: Answers, pad: int) -> RolloutBatch:
    """Prompts as they came, answers cut to the longest and padded, on the request's device.

    Where that is the rows' own device, all is queued at full width before the host waits for the lengths: a call's
    last wait is then the end of it, unless an answer as long as may be is not among them.
    """
    device, width = request.prompt_ids.device, request.prompt_ids.shape[1]
    rows, columns = answers.tokens.shape
    longest = columns if answers.tokens.device == device else max(answers.ends()[0])
    lengths = answers.lengths.to(device)
    valid = torch.arange(longest, device=device)[None, :] < lengths[:, None]
    padding = ~valid
    response = answers.tokens[:, :longest].to(device).masked_fill(padding, pad)
    logprobs = answers.logprobs[:, :longest].to(device).masked_fill(padding, 0.0)
    prompt, prompt_mask = request.prompt_ids.long(), request.prompt_attention_mask.long()
    if samples > 1:
        prompt, prompt_mask = (part.repeat_interleave(samples, dim=0) for part in (prompt, prompt_mask))
    input_ids = torch.cat([prompt, response], dim=1)
    attention_mask = torch.cat([prompt_mask, valid.long()], dim=1)
    starts = torch.full((rows,), width, dtype=torch.long, device=device)
    known, codes = answers.ends()
    surplus = longest - max(known)
    if surplus:
        input_ids, attention_mask, logprobs = (
            part[:, :-surplus].contiguous() for part in (input_ids, attention_mask, logprobs)
        )
    return RolloutBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_start_idx=starts,
        logprobs=logprobs,
        response_lengths=lengths,
        finish_reasons=[finish_reason(code) for code in codes],
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
