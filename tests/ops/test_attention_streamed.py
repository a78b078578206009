# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which layers attention_streamed takes, which machines, and in how many splits; its kernel is for the tests on a
GPU."""

from types import SimpleNamespace

import pytest
import torch
from attention_cases import attention_arguments

from deepspeed_hybrid.ops import attention_streamed
from deepspeed_hybrid.ops.attention_streamed import choose_splits

LAYER = {"query_heads": 4, "kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16}


class OnCard:
    """A tensor that says it is on a GPU."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __getattr__(self, name: str):
        return getattr(self.tensor, name)


def takes(monkeypatch, changes: dict | None = None, **options) -> bool:
    monkeypatch.setattr(attention_streamed, "_capable", lambda index: True)
    arguments = attention_arguments([3, 4], **{**LAYER, **options})
    for name, change in (changes or {}).items():
        arguments[name] = change(arguments[name])
    return attention_streamed.takes(**arguments | {"projected": OnCard(arguments["projected"])})


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same one element further on than a boundary."""
    storage = tensor.new_zeros(tensor.numel() + 1)
    return storage[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(
    "options, changes, expected",
    [
        ({}, {}, True),
        ({"dtype": torch.float16}, {}, True),
        ({"dtype": torch.float32}, {}, False),
        ({"head_dim": 256, "query_heads": 16}, {}, True),
        ({"head_dim": 64}, {}, False),
        ({"query_heads": 18}, {}, False),
        ({"normed": False, "gated": False}, {}, True),
        ({"cos_dtype": torch.bfloat16}, {}, True),
        ({"cos_dtype": torch.float16}, {}, False),
        ({"norm_dtype": torch.float32}, {}, True),
        ({"norm_dtype": torch.float16}, {}, False),
        ({}, {"keys": shifted}, False),
        ({}, {"values": shifted}, False),
        ({}, {"projected": shifted}, True),
    ],
    ids=str,
)
def test_which_layers(options, changes, expected, monkeypatch):
    assert takes(monkeypatch, changes, **options) is expected


@pytest.mark.parametrize(
    "major, shared, build, said",
    [
        (9, 227, None, None),
        (10, 227, None, None),
        (8, 163, None, "a card has no copy engine, or too little shared memory"),
        (12, 99, None, "a card has no copy engine, or too little shared memory"),
        (9, 227, "no nvcc", "no nvcc"),
    ],
)
def test_which_machines(major, shared, build, said, monkeypatch):
    card = SimpleNamespace(name="a card", major=major, shared_memory_per_block_optin=shared * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(attention_streamed, "op_obstacle", lambda name: build)
    assert attention_streamed.obstacle(0) == said


def test_not_on_a_cpu():
    assert not attention_streamed.takes(**attention_arguments([3, 4], **LAYER))
