# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""few_rows_linear against float64: odd numbers of rows and columns, everything around the product, any batch."""

import pytest
import torch
from product_cases import AROUND, case, check, check_bits_of_fewer_rows, check_inside_a_graph, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

OP = "few_rows_linear"


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("m", [1, 2, 3, 8, 9, 16])
@pytest.mark.parametrize("n, k", [(48, 64), (61, 192), (2560, 2560), (128, 9216)], ids=str)
def test_against_float64(around, m, n, k):
    check(OP, case(m, n, k, **around))


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("m", [5, 13])
def test_fp16(around, m):
    check(OP, case(m, 100, 320, dtype=torch.float16, **around))


@pytest.mark.parametrize("around", [AROUND["norm and bias"], AROUND["glu"], AROUND["residual"]], ids=str)
@pytest.mark.parametrize("n, k", [(528, 2560), (8192, 128)], ids=str)  # so many columns show one bit of a factor
def test_a_row_has_the_same_bits_in_any_batch(around, n, k):
    check_bits_of_fewer_rows(OP, case(16, n, k, **around), (1, 3, 8, 9, 15))


def test_inside_a_graph_behind_another_kernel():
    check_inside_a_graph(OP, 8)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": (17, 128)}, "x must have 1 to 16 rows, got 17"),
        ({"x": (2, 96), "weight": (64, 96)}, "multiple of 64, got 96"),
    ],
    ids=["too many rows", "odd inner size"],
)
def test_what_it_does_not_take_is_refused(change, message):
    arguments = case(2, 64, 128)
    for name, shape in change.items():
        arguments[name] = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match=message):
        run(OP, arguments)


def test_other_dtypes_and_offsets_are_refused():
    with pytest.raises(RuntimeError, match="x must be bfloat16 or float16"):
        run(OP, case(2, 64, 128, dtype=torch.float32))
    arguments = case(2, 64, 128)
    arguments["x"] = torch.zeros(2 * 128 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(2, 128)
    with pytest.raises(RuntimeError, match="16-byte boundaries"):
        run(OP, arguments)
