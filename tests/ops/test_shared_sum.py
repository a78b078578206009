# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The launch behind a shared product (sum over ranks, bias, residual, RMSNorm), in the interpreter: one rank's part,
with what the others would have sent."""

import pytest
import torch
from decode_cases import same_bits
from fused_linear_cases import EPS, normal, rms_norm_oracle
from gdn_decode_cases import interpreted
from glue_cases import poisoned_outputs
from shared_sum_cases import expected, packets, terms_of
from tolerances import assert_close

pytestmark = [pytest.mark.interpreter, interpreted]

POISON = -1
CASES = [  # rank, ranks, rows, n, dtype, biased, offset
    (0, 2, 1, 2, torch.bfloat16, True, 0.0),
    (1, 2, 3, 130, torch.bfloat16, False, 1.0),
    (2, 3, 2, 66, torch.float16, True, 1.0),
    (0, 4, 2, 33, torch.float32, True, 0.0),
    (1, 2, 1, 1, torch.float32, False, 1.0),
]


def unrounded(values: torch.Tensor) -> torch.Tensor:
    """Numbers whose sums are exact in bf16, to which the interpreter cuts off instead of rounding."""
    return values.mul(4).round().clamp(-16, 16).div(4) if values.dtype == torch.bfloat16 else values


@pytest.mark.parametrize("rank, ranks, rows, n, dtype, biased, offset", CASES, ids=str)
def test_launches_in_a_row(rank, ranks, rows, n, dtype, biased, offset):
    """Halves of the inboxes alternate, and a number that has run over is as good as any."""
    from deepspeed_hybrid.ops.triton.shared_sum import launch, words_of

    words = words_of(n, dtype)
    inboxes = [torch.zeros(2, ranks, rows, words, dtype=torch.int64) for _ in range(ranks)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    launches = torch.full((rows,), 2**31 - 2, dtype=torch.int32)
    bias = unrounded(normal(n, dtype=dtype, seed=3)) if biased else None
    weight = normal(n, dtype=dtype, seed=4, scale=0.5)
    for step, number in enumerate((2**31 - 1, -(2**31), 1 - 2**31)):
        *terms, residual = map(unrounded, terms_of(ranks, rows, n, dtype, seed=step))
        half = number & 1
        for inbox in inboxes:
            inbox.fill_(POISON)
        for other in set(range(ranks)) - {rank}:
            inboxes[rank][half, other] = packets(terms[other], number)
        before = [inbox.clone() for inbox in inboxes]
        with poisoned_outputs():
            hidden, normed = launch(
                terms[rank], bias, residual, weight, offset, EPS, addresses, launches, rank, patience=1.0
            )
        assert same_bits(hidden, expected(terms, bias, residual))
        assert_close(normed, rms_norm_oracle(hidden, weight, offset, EPS))
        assert launches.tolist() == [number] * rows
        for other in set(range(ranks)) - {rank}:
            before[other][half, rank] = packets(terms[rank], number)
        assert all(same_bits(inbox, one) for inbox, one in zip(inboxes, before, strict=True))


def test_rows_that_do_not_fill_words_are_refused():
    from deepspeed_hybrid.ops.triton.shared_sum import words_of

    with pytest.raises(ValueError, match="rows of 33 numbers of 2 bytes are no multiple of 4 bytes"):
        words_of(33, torch.bfloat16)
