# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What tests on a GPU that compare fp32 values share."""

import pytest
import torch


@pytest.fixture
def exact_fp32():
    """Tensor-core rounding would hide what these tests compare."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
    torch.set_float32_matmul_precision(precision)
