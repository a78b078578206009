# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What stands in assembly, element by element: roundings to the last bit, activations against float64."""

import pytest
import torch
from decode_cases import same_bits

triton = pytest.importorskip("triton")
hopper_math = pytest.importorskip("deepspeed_hybrid.ops.triton.hopper_math", reason="needs Triton")
tl = triton.language

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZE = 1024
ZERO_BELOW = -87.0
rounded_in_pairs, sigmoid, silu = hopper_math.rounded_in_pairs, hopper_math.sigmoid, hopper_math.silu


@triton.jit
def _each(values, pairs, opened, activated, count, SIZE: tl.constexpr, HOPPER: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    value = tl.load(values + at, mask=inside, other=0.0)
    tl.store(pairs + at, rounded_in_pairs(True, value, tl.bfloat16, HOPPER), mask=inside)
    tl.store(opened + at, sigmoid(value, HOPPER), mask=inside)
    tl.store(activated + at, silu(value, HOPPER), mask=inside)


def of(values: torch.Tensor) -> list[torch.Tensor]:
    """Rounded to bf16, sigmoid and SiLU of fp32 values, in fp32."""
    results = [torch.full_like(values, float("nan")) for _ in range(3)]
    hopper = torch.cuda.get_device_capability()[0] >= 9
    _each[(triton.cdiv(len(values), SIZE),)](values, *results, len(values), SIZE=SIZE, HOPPER=hopper)
    return results


def all_of_bf16() -> torch.Tensor:
    """Every finite number that bf16 has, and both infinities, in fp32."""
    values = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16).float()
    return values[~values.isnan()]


def test_roundings_are_torchs():
    """Of numbers of bf16, of ties between two of them, and of what is next to a tie."""
    exact = all_of_bf16()
    bits = exact[exact.isfinite()].view(torch.int32)
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (bits | low).view(torch.float32)
        assert same_bits(of(values)[0], values.bfloat16().float())
    assert same_bits(of(exact)[0], exact)


def test_activations_against_float64():
    values = all_of_bf16()
    _, opened, activated = of(values)
    usual = values.isfinite() & (values > ZERO_BELOW)
    for result, oracle in (
        (opened, values.double().sigmoid()),
        (activated, torch.nn.functional.silu(values.double())),
    ):
        result, oracle = result[usual].double(), oracle[usual]
        assert float(((result - oracle).abs() - 2**-16 * oracle.abs()).max()) <= 1e-37
    small = values.isfinite() & ~usual
    assert float(opened[small].abs().max()) < 1e-37 and float(activated[small].abs().max()) < 1e-35
    assert opened[values == float("inf")].item() == 1 and opened[values == -float("inf")].item() == 0
    assert activated[values == float("inf")].item() == float("inf")
