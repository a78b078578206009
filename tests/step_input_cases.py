# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments for embedded_rows and rotary_tables, and what Hugging Face's modules make of them."""

import torch
from fused_linear_cases import EPS, normal
from models import tiny_model

# What a row starts at, what an H200's context ends with, and where fp32 no longer counts one by one.
POSITIONS = [0, 1, 7, 63, 4096, 100_003, 262_143, 2**24 + 1]
ULPS = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of numbers from 1 to 2, or below


def embedded_arguments(
    rows: int, size: int, *, dtype: torch.dtype = torch.float32, vocab: int = 50, offset: float = 1.0, seed: int = 0
) -> dict:
    """Keyword arguments of embedded_rows on the CPU; ids repeat, and the first and the last row are among them."""
    ids = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(seed))
    ids[:2] = torch.tensor([vocab - 1, 0])[:rows]
    return {
        "ids": ids,
        "table": normal(vocab, size, dtype=dtype, seed=seed + 1, scale=2.0),
        "norm": normal(size, dtype=dtype, seed=seed + 2, scale=0.5),
        "norm_offset": offset,
        "eps": EPS,
    }


def rotary_arguments(
    shape: tuple[int, int] = (len(POSITIONS), 1),
    half: int = 32,
    *,
    dtype: torch.dtype = torch.float32,
    inv_freq: torch.dtype = torch.float32,
    scaling: float = 1.0,
    first: int = 0,
) -> dict:
    """Keyword arguments of rotary_tables on the CPU, with the frequencies of a model of long context."""
    count = shape[0] * shape[1]
    repeated = torch.tensor(POSITIONS).repeat(-(-count // len(POSITIONS)))[:count] + first
    rates = 1e7 ** (-torch.arange(half) / half)
    return {"positions": repeated.view(shape), "inv_freq": rates.to(inv_freq), "scaling": scaling, "dtype": dtype}


def rotary_oracle(positions, inv_freq, scaling, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Hugging Face's module on the device of the arguments: its angles and products, in fp32 up to the last cast."""
    module = tiny_model("llama").model.rotary_emb
    module._buffers["inv_freq"], module.attention_scaling = inv_freq, scaling
    return module(inv_freq.new_empty(0, dtype=dtype), positions)


def assert_same_tables(actual, expected) -> None:
    """Within one unit in the last place."""
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and one.is_contiguous()
        largest = max(1.0, float(other.float().abs().max()))
        assert float((one.float() - other.float()).abs().max()) <= largest * ULPS[one.dtype]
