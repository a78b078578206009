# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which layers gdn_streamed takes, and which machines; its kernel is for the tests on a GPU."""

from types import SimpleNamespace

import pytest
import torch
from gdn_decode_cases import Shape
from gdn_deferred_cases import aligned, deferred_block

from deepspeed_hybrid.ops import gdn_deferred, gdn_kept_block, gdn_streamed
from deepspeed_hybrid.ops.gdn_decode import GdnSizes
from deepspeed_hybrid.segments import injection

SHAPE = Shape(1, 2, 128, 128)


def takes(monkeypatch, shape: Shape = SHAPE, bias: bool = False, rounded: bool = True, **changes) -> bool:
    monkeypatch.setattr(gdn_streamed, "_capable", lambda index: True)
    options = {name: changes.pop(name) for name in ("dtype", "weights", "state_dtype") if name in changes}
    options = {"dtype": torch.bfloat16, "weights": torch.bfloat16} | options
    arguments = aligned(deferred_block(shape, [1, 1], 1, rounded, bias=bias, **options))
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    arguments = {name: arguments[name] for name in arguments if name != "eps"} | {"answered": arguments["counts"]}
    sizes = gdn_deferred.checked_deferred(**arguments)
    for name in ("position", "answered", "counts", "key_heads", "rounded_heads"):
        del arguments[name]
    on_gpu = torch.device("cuda", 0)
    arguments["projected"] = Elsewhere(arguments["projected"], on_gpu)
    return gdn_streamed.takes(**arguments, sizes=sizes)


class Elsewhere:
    """A tensor that says it is on another device."""

    def __init__(self, tensor: torch.Tensor, device: torch.device):
        self.tensor, self.device = tensor, device

    def __getattr__(self, name: str):
        return getattr(self.tensor, name)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same one element further on than a boundary."""
    storage = tensor.new_zeros(tensor.numel() + 1)
    return storage[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(
    "case, expected",
    [
        ({}, True),
        ({"dtype": torch.float16, "weights": torch.float16}, True),
        ({"dtype": torch.float32, "weights": torch.float32}, False),
        ({"weights": torch.float32}, False),
        ({"state_dtype": torch.bfloat16}, False),
        ({"bias": True}, False),
        ({"rounded": False}, False),
        ({"shape": Shape(1, 2, 64, 128)}, False),
        ({"shape": Shape(1, 2, 128, 64)}, False),
        ({"shape": Shape(1, 2, 128, 128, kernel=3)}, False),
        ({"shape": Shape(3, 3, 128, 128)}, True),
        ({"norm_weight": torch.Tensor.float}, True),
        ({"norm_weight": torch.Tensor.half}, False),
        ({"A_log": torch.Tensor.double}, False),
        ({"dt_bias": torch.Tensor.float}, True),
        ({"dt_bias": shifted}, True),
        ({"conv_weight": shifted}, False),
        ({"state": shifted}, False),
        ({"keys": shifted}, False),
        ({"shape": Shape(4, 4, 128, 128), "projected": torch.Tensor.contiguous}, True),
        ({"shape": Shape(3, 3, 128, 128), "projected": torch.Tensor.contiguous}, False),
    ],
    ids=lambda case: (
        "-".join(f"{name}={getattr(value, '__name__', value)}" for name, value in case.items())
        if isinstance(case, dict)
        else str(case)
    ),
)
def test_which_layers(case, expected, monkeypatch):
    assert takes(monkeypatch, **case) is expected


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
    monkeypatch.setattr(gdn_streamed, "op_obstacle", lambda name: build)
    assert gdn_streamed.obstacle(0) == said
    gdn_streamed._capable.cache_clear()
    layer = GdnSizes(1, 2, 128, 128, 4), torch.bfloat16, torch.float32, False
    assert gdn_streamed.suits(*layer, torch.device("cuda", 0)) is (said is None)
    assert not gdn_streamed.suits(*layer, torch.device("cpu"))
    gdn_streamed._capable.cache_clear()


@pytest.mark.parametrize(
    "options, state_dtype, many",
    [
        ({}, torch.float32, 8 * 32 // 4),
        ({}, torch.bfloat16, 24 * 32 // 4),
        ({"bias": True}, torch.float32, 24 * 32 // 4),
        ({"shape": Shape(2, 4, 64, 128)}, torch.float32, 24 * 32 // 4),
        ({"shape": Shape(2, 2, 128, 128)}, torch.float32, 24 * 32 // 2),  # 4 gates: no whole 16 bytes
    ],
    ids=str,
)
def test_from_how_many_rows_on(options, state_dtype, many, monkeypatch):
    """As soon as it is of use, where it takes what will be there; blocks of drafts there alone."""
    monkeypatch.setattr(gdn_streamed, "_capable", lambda index: True)
    monkeypatch.setattr(gdn_kept_block, "obstacle", lambda index: None)
    shape = options.get("shape", Shape(2, 4, 128, 128))
    weight, bias = torch.zeros(shape.channels, 1, 4, dtype=torch.bfloat16), torch.zeros(shape.channels)
    conv = SimpleNamespace(
        weight=Elsewhere(weight, torch.device("cuda", 0)), bias=bias if options.get("bias") else None
    )
    layer = SimpleNamespace(
        num_k_heads=shape.key_heads,
        num_v_heads=shape.value_heads,
        head_k_dim=shape.key_dim,
        head_v_dim=shape.value_dim,
        conv_kernel_size=4,
        conv1d=conv,
    )
    assert injection._many_rows(layer, state_dtype) == many
    takes = many == 64
    assert injection._many_rows(layer, state_dtype, blocks=True) == (64 if takes else None)
    monkeypatch.setattr(gdn_kept_block, "obstacle", lambda index: "no copy engine")
    assert injection._many_rows(layer, state_dtype, blocks=True) is None
