# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The kernel behind a library's product (residual, RMSNorm), in the interpreter, against float64."""

import pytest
import torch
from decode_cases import same_bits
from fused_linear_cases import EPS, normal, rms_norm_oracle
from gdn_decode_cases import interpreted
from glue_cases import poisoned_outputs
from tolerances import assert_close

pytestmark = [pytest.mark.interpreter, interpreted]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # of bf16 the interpreter cuts bits off
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("rows, n", [(1, 1), (3, 127), (17, 100), (2, 2560)])
def test_sum_and_norm(rows, n, offset, dtype):
    from deepspeed_hybrid.ops.triton.residual_norm import launch

    product, residual = normal(rows, n, dtype=dtype, seed=1), normal(rows, n, dtype=dtype, seed=2)
    weight = normal(n, dtype=dtype, seed=4, scale=0.5)
    given = [one.clone() for one in (product, residual, weight)]
    with poisoned_outputs():
        hidden, normed = launch(product, residual, weight, offset, EPS)
    assert_close(hidden, product.double() + residual.double())
    assert_close(normed, rms_norm_oracle(hidden, weight, offset, EPS))  # of the sum as it was rounded
    for one, other in zip((product, residual, weight), given, strict=True):
        assert same_bits(one, other)


def test_a_row_of_zeros_is_divided_by_its_epsilon():
    from deepspeed_hybrid.ops.triton.residual_norm import launch

    zeros = torch.zeros(2, 33)
    hidden, normed = launch(zeros, zeros, torch.ones(33), 0.0, EPS)
    assert same_bits(hidden, zeros) and same_bits(normed, zeros)
