# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Two ranks' launches behind a shared product, on two streams of one card: they wait for one another as on two."""

import pytest
import torch
from decode_cases import same_bits
from fused_linear_cases import EPS, normal, rms_norm_oracle
from glue_cases import poisoned_outputs
from shared_sum_cases import expected, terms_of
from tolerances import assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RANKS, LAUNCHES, PATIENCE = 2, 20, 20.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows, n", [(1, 2560), (7, 130), (32, 4096)], ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_two_ranks_agree(rows, n, biased, dtype):
    from deepspeed_hybrid.ops.triton.shared_sum import launch, words_of

    inboxes = torch.zeros(RANKS, 2, RANKS, rows, words_of(n, dtype), dtype=torch.int64, device="cuda")
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device="cuda")
    counts = torch.zeros(RANKS, rows, dtype=torch.int32, device="cuda")
    bias = normal(n, dtype=dtype, seed=3).cuda() if biased else None
    weight = normal(n, dtype=dtype, seed=4, scale=0.5).cuda()
    steps = [[one.cuda() for one in terms_of(RANKS, rows, n, dtype, seed)] for seed in range(LAUNCHES)]
    streams = [torch.cuda.Stream() for _ in range(RANKS)]
    torch.cuda.synchronize()

    def run(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        *terms, residual = steps[step]
        return launch(terms[rank], bias, residual, weight, 1.0, EPS, addresses, counts[rank], rank, PATIENCE)

    # A kernel's first launch loads it, which waits for those that run: so each comes once with all that it waits for.
    inboxes.fill_(1 << 32)
    for rank in range(RANKS):
        run(rank, 0)
    torch.cuda.synchronize()
    inboxes.zero_()
    counts.zero_()
    torch.cuda.synchronize()
    outputs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(RANKS)]
    with poisoned_outputs():
        for step in range(LAUNCHES):
            for rank, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    outputs[rank].append(run(rank, step))
    torch.cuda.synchronize()
    for step, (*terms, residual) in enumerate(steps):
        for rank in range(RANKS):
            hidden, normed = outputs[rank][step]
            assert same_bits(hidden, expected(terms, bias, residual)), (step, rank)
            assert_close(normed, rms_norm_oracle(hidden, weight, 1.0, EPS))
    assert counts.eq(LAUNCHES).all()
