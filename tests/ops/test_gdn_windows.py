# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gdn_windows: windows behind the tokens taken over are those of as many decode steps, in the kernel as well."""

import pytest
import torch
from decode_cases import same_bits
from gdn_decode_cases import interpreted

from deepspeed_hybrid.ops.gdn_windows import gdn_windows

LANES, CHANNELS = 5, 700


def kernel(*arguments) -> None:
    from deepspeed_hybrid.ops.triton.gdn_windows import launch

    launch(*arguments)


both = pytest.mark.parametrize(
    "op",
    [gdn_windows, pytest.param(kernel, marks=[pytest.mark.interpreter, interpreted])],
    ids=["reference", "kernel"],
)


def layers(tokens: int, size: int, count: int = 2) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What tokens project to, and windows with a slot more than there are lanes."""
    generator = torch.Generator().manual_seed(tokens)
    projected = [torch.randn(tokens * LANES, CHANNELS + 9, generator=generator) for _ in range(count)]
    return projected, [torch.randn(LANES + 1, CHANNELS, size, generator=generator) for _ in range(count)]


@both
@pytest.mark.parametrize("size", [1, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 16])
def test_windows_of_as_many_steps(op, tokens, size):
    projected, windows = layers(tokens, size)
    position = torch.tensor([0, 13, 2, 7, 41])
    counts = torch.tensor([0, 1, tokens, tokens - 1, tokens // 2])
    expected = [window.clone() for window in windows]
    for rows, window in zip(projected, expected, strict=True):
        for lane in range(LANES):
            for token in range(int(counts[lane])):
                window[lane, :, (position[lane] + token) % size] = rows[token * LANES + lane, :CHANNELS]
    op(projected, windows, position, counts)
    assert all(map(same_bits, windows, expected))


@both
def test_no_layers_and_no_lanes(op):
    none = torch.zeros(0, dtype=torch.int64)
    op([], [], none, none)
    op([torch.zeros(0, 12)], [torch.zeros(1, 8, 4)], none, none)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rows, windows: (rows, windows[:1]), "the same layers"),
        (lambda rows, windows: (rows, [windows[0], windows[1][:, 1:].contiguous()]), "same sizes"),
        (lambda rows, windows: (rows, [window.half() for window in windows]), "window"),
        (lambda rows, windows: (rows, [window[:3] for window in windows]), "a slot for each"),
        (lambda rows, windows: ([part[1:] for part in rows], windows), "projected"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    places = torch.ones(LANES, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=message):
        gdn_windows(*change(*layers(2, 4)), places, places)
