# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How many programs of attention_decode share a row: enough to fill a card, and never more than there is to do."""

import pytest

from deepspeed_hybrid.ops.attention_decode import MAX_SPLITS

attention_decode = pytest.importorskip("deepspeed_hybrid.ops.triton.attention_decode", reason="needs Triton")
choose_splits = attention_decode.choose_splits

ROWS = [1, 2, 3, 8, 16, 33, 64, 99, 128, 256, 1000]
CAPACITIES = [1, 32, 33, 64, 640, 4096, 32768, 262144]


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 200])
@pytest.mark.parametrize("rows", ROWS)
def test_any_size(rows, kv_heads, capacity):
    for block in (16, 32, 64):
        blocks = -(-capacity // block)
        splits = choose_splits(rows, kv_heads, capacity, block)
        assert 1 <= splits <= min(blocks, MAX_SPLITS)
        assert splits == 1 or splits * rows * kv_heads <= attention_decode.MANY_PROGRAMS
        few = attention_decode.FEW_PROGRAMS // (rows * kv_heads)
        assert splits >= min(blocks, MAX_SPLITS, few), "multiprocessors that have nothing to do"


@pytest.mark.parametrize(
    "rows, capacity, splits",
    [
        (1, 640, 20),  # a program a block: there are fewer blocks than programs
        (8, 640, 12),  # three programs a multiprocessor, with two blocks each
        (64, 640, 1),  # the rows alone fill the card: no second launch
        (1, 32768, 33),  # many blocks a program: one a multiprocessor, for its own loads run ahead
        (16, 16384, 2),
        (256, 32768, 1),
    ],
)
def test_sizes_that_were_measured(rows, capacity, splits):
    """Four heads of keys and values, blocks of 32 positions, as Qwen3.5-4B has them."""
    assert choose_splits(rows, 4, capacity, 32) == splits
