# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton keep_tokens on a GPU, at the sizes of a model."""

import pytest
import torch
from decode_cases import same_bits
from keep_tokens_cases import arguments_of, entering, kept

from deepspeed_hybrid.ops.keep_tokens import keep_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_gpu(arguments: dict) -> dict:
    """With the strides that they have: keys are turned, and values are columns of a product."""
    moved = {name: tensor.cuda() for name, tensor in arguments.items() if name not in ("key", "value")}
    for name in ("key", "value"):
        tensor = arguments[name]
        storage = torch.full((tensor.untyped_storage().nbytes() // tensor.itemsize,), float("nan")).to(tensor.dtype)
        placed = storage.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        moved[name] = placed.copy_(tensor)
    return moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "rows, heads, tokens, size", [(1, 4, 128, 256), (3, 4, 61, 256), (2, 8, 33, 96), (1, 1, 1, 1)]
)
def test_places(rows, heads, tokens, size, dtype):
    arguments = arguments_of(rows, heads, tokens, size, dtype)
    expected, moved = kept(**arguments), on_gpu(arguments)
    keep_tokens(**moved)
    assert all(same_bits(moved[name].cpu(), buffer) for name, buffer in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "rows, heads, tokens, size", [(1, 4, 128, 256), (5, 4, 61, 256), (4, 8, 33, 96), (1, 1, 1, 1)]
)
def test_a_row_that_enters_leaves_zeros_behind_it(rows, heads, tokens, size, dtype):
    arguments = entering(arguments_of(rows, heads, tokens, size, dtype))
    expected, moved = kept(**arguments), on_gpu(arguments)
    keep_tokens(**moved)
    assert all(same_bits(moved[name].cpu(), buffer) for name, buffer in expected.items())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_sync_is_needed():
    moved = on_gpu(arguments_of(2, 2, 5, 64))
    keep_tokens(**moved)
    torch.cuda.set_sync_debug_mode("error")
    try:
        keep_tokens(**moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
