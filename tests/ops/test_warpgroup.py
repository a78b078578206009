# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which products warpgroup_linear takes, and which machines; its kernel is for the tests on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from deepspeed_hybrid.ops import fused_linear, warpgroup


def takes(rows=32, n=64, k=256, dtype=torch.bfloat16, glu=False, shift=0) -> bool:
    storage = torch.zeros(rows * k + 8, dtype=dtype)
    return warpgroup.takes(storage[shift : shift + rows * k].view(rows, k), torch.zeros(n, k, dtype=dtype), glu)


@pytest.mark.parametrize(
    "case, expected",
    [
        ({}, True),
        ({"rows": 16}, False),
        ({"rows": 17}, True),
        ({"rows": 64}, True),
        ({"rows": 65}, False),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"k": 288}, False),
        ({"k": 192}, False),
        ({"n": 56}, False),
        ({"n": 68}, False),
        ({"n": 72}, True),
        ({"n": 120, "glu": True}, False),
        ({"n": 136, "glu": True}, False),
        ({"n": 144, "glu": True}, True),
        ({"shift": 1}, False),
        ({"shift": 8}, True),
    ],
    ids=str,
)
def test_which_products(case, expected, monkeypatch):
    monkeypatch.setattr(warpgroup, "_capable", lambda index: True)
    assert takes(**case) is expected


@pytest.mark.parametrize("rows, kernel", [(16, "few"), (17, "warpgroup"), (64, "warpgroup"), (65, None)])
def test_who_takes_a_number_of_rows(rows, kernel, monkeypatch):
    for name, module in (("few", fused_linear.few_rows), ("warpgroup", warpgroup)):
        monkeypatch.setattr(module, "_capable", lambda index: True)
        monkeypatch.setattr(module, "launch", name)
    x, weight = (torch.zeros(size, 256, dtype=torch.bfloat16) for size in (rows, 64))
    assert fused_linear._launch(x, weight, False) == kernel


@pytest.mark.parametrize(
    "major, build, said",
    [
        (9, None, None),
        (8, None, "a card is not of Hopper's generation"),
        (10, None, "a card is not of Hopper's generation"),
        (9, "nvcc is not there", "nvcc is not there"),
    ],
)
def test_which_machines(major, build, said, monkeypatch):
    card = SimpleNamespace(name="a card", major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(warpgroup, "op_obstacle", lambda name: build)
    assert warpgroup.obstacle(0) == said
    warpgroup._capable.cache_clear()
    assert takes() is (said is None)
    warpgroup._capable.cache_clear()
