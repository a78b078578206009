# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One table of tolerances for ops against their references, by the dtype of what is compared."""

import torch

# fp32 math inside, so an output is off by a few roundings of its own dtype.
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare on the CPU within the tolerance of ``actual``'s dtype; a NaN matches only a NaN."""
    torch.testing.assert_close(
        actual.cpu(), expected.cpu().to(actual.dtype), equal_nan=True, **TOLERANCES[actual.dtype]
    )


def assert_close_when_turned(actual: torch.Tensor, expected: torch.Tensor, width: int) -> None:
    """Of heads [..., D], whose first ``width`` dimensions were rotated, one half against the other: what is left where
    two values nearly cancel is off by a rounding of these, so that tolerance is relative to the length of the pair."""
    tolerance = TOLERANCES[actual.dtype]
    mine, other = (heads[..., :width].cpu().double().unflatten(-1, (2, -1)) for heads in (actual, expected))
    excess = (mine - other).abs() - tolerance["rtol"] * other.norm(dim=-2, keepdim=True)
    assert (excess <= tolerance["atol"]).all(), f"rotated values are up to {float(excess.max())} too far apart"
    assert_close(actual[..., width:], expected[..., width:])


# Where an op rounds a value halfway, as the training forward does, that rounding may fall the other way: one unit in
# the last place of a number that is larger than what comes out.
HALFWAY = {
    torch.float32: TOLERANCES[torch.float32],
    torch.float16: {"rtol": 4e-3, "atol": 5e-3},
    torch.bfloat16: {"rtol": 3.2e-2, "atol": 4e-2},
}
FEW = 2e-3  # of all entries


def assert_close_but_for_roundings(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """As ``assert_close`` but for a few entries, which may be a rounding halfway apart."""
    actual, expected = actual.cpu(), expected.cpu().to(actual.dtype)
    torch.testing.assert_close(actual, expected, equal_nan=True, **HALFWAY[actual.dtype])
    close = torch.isclose(actual, expected, equal_nan=True, **TOLERANCES[actual.dtype])
    apart = int((~close).sum())
    assert apart <= max(1, FEW * close.numel()), f"{apart} of {close.numel()} entries are a rounding apart"
