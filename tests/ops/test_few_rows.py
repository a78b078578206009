# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which products few_rows_linear takes, and which machines; its kernel is for the tests on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from deepspeed_hybrid.ops import few_rows


def takes(rows=8, n=64, k=128, dtype=torch.bfloat16, glu=False, shift=0) -> bool:
    storage = torch.zeros(rows * k + 8, dtype=dtype)
    return few_rows.takes(storage[shift : shift + rows * k].view(rows, k), torch.zeros(n, k, dtype=dtype), glu)


@pytest.mark.parametrize(
    "case, expected",
    [
        ({}, True),
        ({"rows": 1}, True),
        ({"rows": 16}, True),
        ({"rows": 17}, False),
        ({"rows": 0}, False),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"k": 96}, False),
        ({"n": 47}, False),
        ({"n": 48}, True),
        ({"n": 94, "glu": True}, False),
        ({"n": 96, "glu": True}, True),
        ({"shift": 1}, False),
        ({"shift": 8}, True),
    ],
    ids=str,
)
def test_which_products(case, expected, monkeypatch):
    monkeypatch.setattr(few_rows, "_capable", lambda index: True)
    assert takes(**case) is expected


@pytest.mark.parametrize(
    "major, shared, build, said",
    [
        (9, 232448, None, None),
        (10, 232448, None, None),
        (8, 166912, None, "a card has no clusters, or too little shared memory"),
        (12, 101376, None, "a card has no clusters, or too little shared memory"),
        (9, 232448, "nvcc is not there", "nvcc is not there"),
    ],
)
def test_which_machines(major, shared, build, said, monkeypatch):
    card = SimpleNamespace(name="a card", major=major, shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(few_rows, "op_obstacle", lambda name: build)
    assert few_rows.obstacle(0) == said
    few_rows._capable.cache_clear()
    assert takes() is (said is None)
    few_rows._capable.cache_clear()
