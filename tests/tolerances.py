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
