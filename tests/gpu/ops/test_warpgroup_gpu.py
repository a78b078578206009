# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""warpgroup_linear against float64: odd numbers of rows and columns, everything around the product, any batch."""

import pytest
import torch
from product_cases import AROUND, case, check, check_bits_of_fewer_rows, check_inside_a_graph, run

from deepspeed_hybrid.ops import warpgroup


def obstacle() -> str | None:
    return warpgroup.obstacle(0) if torch.cuda.is_available() else "needs a CUDA device"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))]

OP = "warpgroup_linear"
SHAPES = [(72, 320), (1000, 448), (2560, 2560)]


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("m", [1, 17, 32, 33, 64])
@pytest.mark.parametrize("n, k", SHAPES, ids=str)
def test_against_float64(around, m, n, k):
    check(OP, case(m, n, k, **around))


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("m", [19, 50])
def test_fp16(around, m):
    check(OP, case(m, 200, 320, dtype=torch.float16, **around))


@pytest.mark.parametrize("columns", [18432, 10240, 16896, 2048, 4096, 5120], ids=str)
@pytest.mark.parametrize(
    "around", [AROUND["norm"], AROUND["glu"], AROUND["residual"]], ids=["norm", "glu", "residual"]
)
@pytest.mark.parametrize("rows", [24, 40])
def test_every_size_of_tiles(around, columns, rows):
    check(OP, case(rows, columns, 256, **around))


@pytest.mark.parametrize("around", [AROUND["norm and bias"], AROUND["glu"], AROUND["residual"]], ids=str)
@pytest.mark.parametrize("n, k", [(528, 2560), (8192, 256)], ids=str)  # so many columns show one bit of a factor
def test_a_row_has_the_same_bits_in_any_batch(around, n, k):
    check_bits_of_fewer_rows(OP, case(64, n, k, **around), (17, 20, 32, 33, 63))


def test_parameters_at_any_place_of_a_flat_buffer():
    arguments = case(40, 2560, 256, residual=True, bias=True)
    for name in ("bias", "next_norm"):
        flat = torch.zeros(2561, dtype=torch.bfloat16, device="cuda")
        flat[1:].copy_(arguments[name])
        arguments[name] = flat[1:]
    check(OP, arguments)


@pytest.mark.parametrize("around", [{"residual": True, "norm": True}, {"glu": True, "bias": True}], ids=str)
def test_what_does_not_go_together_is_refused(around):
    with pytest.raises(RuntimeError, match="a residual goes with a norm behind it"):
        run(OP, case(20, 64, 256, **around))


@pytest.mark.parametrize("rows", [24, 64])
def test_inside_a_graph_behind_another_kernel(rows):
    check_inside_a_graph(OP, rows)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": (65, 256)}, "x must have 1 to 64 rows, got 65"),
        ({"x": (20, 288), "weight": (64, 288)}, "multiple of 64 from 256 on, got 288"),
        ({"x": (20, 192), "weight": (64, 192)}, "multiple of 64 from 256 on, got 192"),
        ({"weight": (68, 256)}, "columns must be a multiple of 8, got 68"),
        ({"weight": (56, 256)}, "must have more columns, got 56"),
    ],
    ids=["too many rows", "odd inner size", "small inner size", "odd columns", "few columns"],
)
def test_what_it_does_not_take_is_refused(change, message):
    arguments = case(20, 64, 256)
    for name, shape in change.items():
        arguments[name] = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match=message):
        run(OP, arguments)


def test_other_dtypes_and_offsets_are_refused():
    with pytest.raises(RuntimeError, match="x must be bfloat16 or float16"):
        run(OP, case(20, 64, 256, dtype=torch.float32))
    arguments = case(20, 64, 256)
    arguments["x"] = torch.zeros(20 * 256 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(20, 256)
    with pytest.raises(RuntimeError, match="16-byte boundaries"):
        run(OP, arguments)
