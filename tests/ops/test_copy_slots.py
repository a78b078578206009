# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""copy_slots on a CPU, and its Triton kernel in the interpreter: the slots that are asked for, and no others."""

import pytest
import torch
from copy_slots_cases import buffers_of, copied
from decode_cases import same_bits
from gdn_decode_cases import interpreted

from deepspeed_hybrid.cache.layers import SINGLE_TOKENS
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.ops.copy_slots import copy_slots, copy_slots_reference
from deepspeed_hybrid.segments import chains


def kernel(*arguments) -> None:
    from deepspeed_hybrid.ops.triton.copy_slots import launch  # under the interpreter only

    launch(*arguments)


both = pytest.mark.parametrize(
    "op", [copy_slots, pytest.param(kernel, marks=[pytest.mark.interpreter, interpreted])], ids=["op", "kernel"]
)


@both
@pytest.mark.parametrize("sources, targets", [([0], [3]), ([4, 4, 0], [1, 2, 5]), ([], []), ([5], [0])], ids=str)
def test_slots(op, sources, targets):
    buffers = buffers_of(6)
    expected = copied(buffers, sources, targets)
    op(buffers, *(torch.tensor(slots, dtype=torch.int64) for slots in (sources, targets)))
    assert all(same_bits(*pair) for pair in zip(buffers, expected, strict=True))


@pytest.mark.interpreter
@interpreted
def test_more_buffers_than_a_launch_has_addresses(monkeypatch):
    from deepspeed_hybrid.ops.triton import copy_slots as launcher

    monkeypatch.setattr(launcher, "MOST_BUFFERS", 2)
    buffers = [torch.randn(3, 5) for _ in range(5)]
    expected = copied(buffers, [2], [0])
    launcher.launch(buffers, torch.tensor([2]), torch.tensor([0]))
    assert all(same_bits(*pair) for pair in zip(buffers, expected, strict=True))


@pytest.mark.interpreter
@interpreted
def test_buffers_that_begin_anywhere():
    """In a storage, whose first element is at no multiple of a slot's word."""
    buffers = [torch.arange(41).to(torch.bfloat16)[1:].view(5, 8), torch.arange(40).to(torch.bfloat16).view(5, 8)]
    expected = copied(buffers, [4], [1])
    kernel(buffers, torch.tensor([4]), torch.tensor([1]))
    assert all(same_bits(*pair) for pair in zip(buffers, expected, strict=True))


def test_slots_are_copied_a_few_at_a_time(monkeypatch):
    """What is on its way takes little memory, however many slots are copied."""
    from deepspeed_hybrid.ops import copy_slots as module

    monkeypatch.setattr(module, "PIECE_BYTES", 1)
    buffers = buffers_of(6)
    expected = copied(buffers, [4, 4, 0], [1, 2, 5])
    copy_slots(buffers, torch.tensor([4, 4, 0]), torch.tensor([1, 2, 5]))
    assert all(same_bits(*pair) for pair in zip(buffers, expected, strict=True))


@pytest.mark.parametrize("backend", ["auto", "triton", "cuda", "torch"])
def test_where_triton_may_not_run_torch_copies(backend, monkeypatch):
    monkeypatch.setattr(chains, "triton_obstacle", lambda: None)
    expected = copy_slots if backend in ("auto", "triton") else copy_slots_reference
    assert chains.slot_copy(torch.device("cuda"), backend) is expected
    assert chains.slot_copy(torch.device("cpu"), backend) is copy_slots_reference
    monkeypatch.setattr(chains, "triton_obstacle", lambda: "Triton is not installed")
    assert chains.slot_copy(torch.device("cuda"), "auto") is copy_slots_reference


def test_a_cache_copies_as_it_is_told():
    """Tokens beside recurrent states only where that is asked for."""
    copied_by: list[int] = []

    def copy(buffers, *slots) -> None:
        copied_by.append(len(buffers))
        copy_slots_reference(buffers, *slots)

    cache = SlotCache(["linear_attention"], 3, 8, deferral=SINGLE_TOKENS, copy=copy)
    (layer,) = cache.layers
    layer.ensure(torch.zeros(1, 1, 24), 4, (2, 4, 8), key_heads=1)
    for buffer in cache.buffers():
        buffer.copy_(torch.randn(buffer.shape))
    kept = [part.clone() for part in layer.deferred]
    cache.fork(torch.tensor([2]), torch.tensor([0]))
    assert same_bits(layer.state[0], layer.state[2]) and same_bits(layer.window[0], layer.window[2])
    assert all(same_bits(*pair) for pair in zip(layer.deferred, kept, strict=True))
    cache.fork(torch.tensor([2]), torch.tensor([0]), deferred=True)
    assert all(same_bits(part[0], before[2]) for part, before in zip(layer.deferred, kept, strict=True))
    assert copied_by == [2, 5]


def test_opcheck():
    arguments = [torch.randn(3, 4), torch.randn(3, 2).bfloat16()], torch.tensor([0]), torch.tensor([2])
    torch.library.opcheck(torch.ops.deepspeed_hybrid.copy_slots.default, arguments)


def test_a_gradient_is_refused():
    with pytest.raises(RuntimeError, match="copy_slots is for inference and has no gradient"):
        copy_slots([torch.randn(2, 3, requires_grad=True)], torch.tensor([0]), torch.tensor([1]))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda b, s, t: (b, s.int(), t), "sources must be"),
        (lambda b, s, t: (b, s, t[None]), "targets must be"),
        (lambda b, s, t: (b, s, t.repeat(2)), "as many targets"),
        (lambda b, s, t: (b, torch.tensor([0, 1, 2])[::2], t), "sources must be"),
        (lambda b, s, t: (b, s, t.to("meta")), "targets is on meta"),
        (lambda b, s, t: ([b[0].t().contiguous().t()], s, t), "buffer 0 must be contiguous"),
        (lambda b, s, t: ([*b, b[0].to("meta")], s, t), "buffer 1 is on meta"),
        (lambda b, s, t: ([torch.tensor(1.0)], s, t), "buffer 0 must be contiguous"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    buffer = torch.randn(3, 4)
    before = buffer.clone()
    with pytest.raises(RuntimeError, match=message):
        copy_slots_reference(*change([buffer], torch.tensor([0]), torch.tensor([1])))
    assert same_bits(buffer, before)
