# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How rows share the programs of normed_rows' kernel, in the interpreter: a row must not notice."""

import pytest
import torch
from decode_cases import same_bits
from fused_linear_cases import EPS, normal, rms_norm_oracle
from gdn_decode_cases import interpreted
from glue_cases import poisoned_outputs, slice_of_poison
from tolerances import assert_close

pytestmark = [pytest.mark.interpreter, interpreted]


@pytest.mark.parametrize("size", [1, 24, 128, 256, 1000, 2049])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_among_any_others(dtype, size):
    """Short rows share a program, which need not be full."""
    from deepspeed_hybrid.ops.triton.rms_norm import launch  # under the interpreter only

    hidden, norm = normal(70, size, dtype=dtype, seed=1), normal(size, dtype=dtype, seed=2)
    with poisoned_outputs():
        together = launch(hidden, norm, 1.0, EPS)
        assert_close(together, rms_norm_oracle(hidden, norm, 1.0, EPS))
        for first, last in ((0, 1), (69, 70), (5, 22), (0, 65)):
            assert same_bits(launch(hidden[first:last], norm, 1.0, EPS), together[first:last])
        assert same_bits(launch(slice_of_poison(hidden, 2 * size + 3, 2), norm, 1.0, EPS), together)


def test_no_rows():
    from deepspeed_hybrid.ops.triton.rms_norm import launch

    assert launch(torch.empty(0, 24), torch.ones(24), 0.0, EPS).shape == (0, 24)
