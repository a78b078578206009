# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Products in groups of rows against the same product in one go."""

import pytest
import torch
from fused_linear_cases import normed_arguments, residual_arguments
from tolerances import assert_close

from deepspeed_hybrid.ops import batch_invariant
from deepspeed_hybrid.ops.batch_invariant import normed_linear_in_groups, residual_linear_in_groups
from deepspeed_hybrid.ops.fused_linear import normed_linear_reference, residual_linear_reference


@pytest.fixture(params=[1, 3, 16])
def step(request, monkeypatch):
    monkeypatch.setattr(batch_invariant, "rows_at_once", lambda *_: request.param)
    return request.param


def recorded(op, sizes):
    def call(*arguments):
        sizes.append(len(arguments[0]))
        assert arguments[0].is_contiguous() and arguments[1].is_contiguous()
        return op(*arguments)

    return call


@pytest.mark.parametrize("parts", [0, 1, 70])
@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
def test_normed_linear(step, parts, glu):
    arguments, sizes = normed_arguments(7, 12, 33, parts=parts, glu=glu), []
    out = normed_linear_in_groups(recorded(normed_linear_reference, sizes), **arguments)
    assert_close(out, normed_linear_reference(**arguments))
    assert sum(sizes) == 7 and max(sizes) == min(step, 7)


def test_residual_linear(step):
    arguments, sizes = residual_arguments(7, 12, 33, bias=True), []
    grouped = residual_linear_in_groups(recorded(residual_linear_reference, sizes), *arguments.values())
    for one, other in zip(grouped, residual_linear_reference(**arguments), strict=True):
        assert one.shape == other.shape
        assert_close(one, other)
    assert sum(sizes) == 7 and max(sizes) == min(step, 7)


def test_sums_with_a_residual_in_fp16_are_the_librarys(monkeypatch):
    """Which goes by the number of rows."""
    monkeypatch.setattr(batch_invariant, "rows_at_once", lambda *_: 16)
    arguments, sizes = residual_arguments(7, 12, 33, dtype=torch.float16), []
    residual_linear_in_groups(recorded(residual_linear_reference, sizes), *arguments.values())
    assert sizes == [1] * 7


def test_a_cpu_takes_one_row_at_a_time():
    arguments = normed_arguments(2, 64, 64, dtype=torch.bfloat16)
    assert batch_invariant.rows_at_once(arguments["scaled"], arguments["weight"], False) == 1
