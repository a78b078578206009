# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Candidates from shares of a real vocabulary's size, against torch."""

import pytest
import torch
from glue_cases import poisoned_outputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("start", [0, 1, 124160])
@pytest.mark.parametrize("dtype, raw", [(torch.bfloat16, False), (torch.float32, True)], ids=str)
@pytest.mark.parametrize("rows, size", [(1, 124160), (5, 124161), (64, 4096)], ids=str)
def test_candidates(rows, size, dtype, raw, start):
    """In bf16 the largest score comes more than once."""
    from deepspeed_hybrid.ops.triton.sharded_choice import nominate

    generator = torch.Generator("cuda").manual_seed(size)
    scores, others = (3 * torch.randn(2, rows, size, generator=generator, device="cuda")).unbind(0)
    scores, raw_logits = scores.to(dtype), others.to(dtype) if raw else None
    source = (scores if raw_logits is None else raw_logits).float()
    with poisoned_outputs():
        merit, entry, score, total = nominate(scores, raw_logits, start).unbind(-1)
    wide = scores.float()
    best = (wide == wide.amax(-1, keepdim=True)).int().argmax(-1)  # the first, which torch does not promise
    assert torch.equal(entry.long(), best + start)
    assert torch.equal(merit, wide.gather(1, best[:, None])[:, 0])
    assert torch.equal(score, source.gather(1, best[:, None])[:, 0])
    torch.testing.assert_close(total, source.logsumexp(-1), rtol=1e-6, atol=1e-5)
