# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which layers attention_streamed takes, which machines, and in how many splits; its kernel is for the tests on a
GPU."""

from types import SimpleNamespace

import pytest
import torch
from attention_cases import attention_arguments

from deepspeed_hybrid.ops import attention_streamed, few_rows, gdn_kept_block, gdn_streamed, warpgroup
from deepspeed_hybrid.ops.attention_streamed import choose_splits
from deepspeed_hybrid.segments import chains

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
        ({}, {"sin": torch.Tensor.half}, False),
        ({}, {"k_norm": torch.Tensor.half}, False),
        ({}, {"keys": shifted}, False),
        ({}, {"values": shifted}, False),
        ({}, {"projected": shifted}, True),
    ],
)
def test_which_layers(options, changes, expected, monkeypatch):
    assert takes(monkeypatch, changes, **options) is expected


def test_more_rows_than_a_grid_has(monkeypatch):
    monkeypatch.setattr(attention_streamed, "MOST_ROWS", 2)
    assert takes(monkeypatch)
    monkeypatch.setattr(attention_streamed, "MOST_ROWS", 1)
    assert not takes(monkeypatch)


def test_a_card_that_cannot(monkeypatch):
    monkeypatch.setattr(attention_streamed, "obstacle", lambda index: f"card {index} is old")
    attention_streamed._capable.cache_clear()
    arguments = attention_arguments([3], **LAYER)
    assert not attention_streamed.takes(**arguments | {"projected": OnCard(arguments["projected"])})
    attention_streamed._capable.cache_clear()


@pytest.mark.parametrize(
    "lengths, splits, passed", [([3, 4], 0, (1, 8)), ([3, 4], 5, (5, 4)), ([], 0, (1, 8))], ids=str
)
def test_what_the_op_is_called_with(lengths, splits, passed, monkeypatch):
    """A number of splits that is given is of blocks of one size in any batch."""
    calls: list[tuple] = []
    op = SimpleNamespace(attention_streamed=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(attention_streamed, "load", {"attention_streamed": op}.__getitem__)
    arguments = attention_arguments(lengths or [1], **LAYER)
    if not lengths:
        arguments["projected"] = arguments["projected"][:0]
    attention_streamed.launch(**arguments | {"splits": splits})
    ((*_, chosen, warps),) = calls
    assert (chosen, warps) == passed


def test_what_is_off_is_said(monkeypatch):
    for op in (attention_streamed, few_rows, gdn_kept_block, gdn_streamed, warpgroup):
        monkeypatch.setattr(
            op, "obstacle", lambda index, op=op: None if op is few_rows else f"{op.__name__} on {index}"
        )
    package, plain = "deepspeed_hybrid.ops", SimpleNamespace(gdn_deferred=None)
    attention = {"attention_streamed op": f"{package}.attention_streamed on 1"}
    products = {"warpgroup_linear op": f"{package}.warpgroup on 1"}
    assert chains.ops_off(1, plain, train_consistent=True) == attention
    assert chains.ops_off(1, plain, train_consistent=False) == attention | products
    states = {
        "gdn_streamed op": f"{package}.gdn_streamed on 1",
        "gdn_streamed_block op": f"{package}.gdn_kept_block on 1",
    }
    assert chains.ops_off(1, SimpleNamespace(gdn_deferred=print), train_consistent=True) == attention | states


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


@pytest.mark.parametrize("capacity", [1, 16, 640, 641, 4096, 32768, 262144])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 200])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 33, 64, 99, 128, 256, 1000])
def test_splits_of_any_size(rows, kv_heads, capacity):
    """They have something to do, and all are at work at once."""
    splits, warps = choose_splits(rows, kv_heads, capacity)
    assert 1 <= splits <= min(-(-capacity // (attention_streamed.TILE * warps)), attention_streamed.MOST_SPLITS)
    room = attention_streamed.PROCESSORS * (1 if warps == attention_streamed.MANY_WARPS else 2)
    assert splits == 1 or splits * rows * kv_heads <= room


@pytest.mark.parametrize(
    "rows, capacity, chosen",
    [
        (1, 640, (1, 8)),  # no second launch for so little
        (1, 704, (6, 8)),
        (1, 32768, (33, 8)),
        (8, 640, (1, 8)),
        (16, 640, (1, 4)),  # blocks of many warps would be neighbours on half of the card
        (16, 16384, (2, 8)),
        (20, 16384, (3, 4)),
        (32, 640, (1, 8)),
        (64, 640, (1, 4)),  # two on a multiprocessor
        (256, 640, (1, 4)),
    ],
)
def test_sizes_that_were_measured(rows, capacity, chosen):
    """Four heads of keys and values, as Qwen3.5-4B has them."""
    assert choose_splits(rows, 4, capacity) == chosen
