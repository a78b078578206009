# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Philox4x32-10 against its authors' known answers, and the Gumbel noise made of it."""

import math

import pytest
import torch
from torch.testing import assert_close

from deepspeed_hybrid.ops import philox
from deepspeed_hybrid.ops.philox import gumbel_noise, philox4x32

# Counter, key and output of Random123's kat_vectors file for philox4x32-10.
KNOWN_ANSWERS = {
    "zeros": ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
}
EULER = 0.5772156649


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


def stacked(column: int) -> tuple[torch.Tensor, ...]:
    """One column of the known answers, all rows in one tensor a word."""
    rows = [words(row[column]) for row in KNOWN_ANSWERS.values()]
    return tuple(torch.cat(word) for word in zip(*rows, strict=True))


def key(rows: int = 1, *, seed: int = 5, request: int = 1, sample: int = 0, position: int = 9) -> tuple:
    return tuple(torch.full((rows,), value) for value in (seed, request, sample, position))


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS.values(), ids=KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    assert philox4x32(words(counter), words(key)) == words(expected)


def test_counters_are_independent():
    for word, expected in zip(philox4x32(stacked(0), stacked(1)), stacked(2), strict=True):
        assert torch.equal(word, expected)


def test_noise_takes_each_word_once_and_in_order():
    seed, request, sample, position = -3 * 2**40 + 17, 2**32 - 1, 7, 12345
    noise = gumbel_noise(*key(seed=seed, request=request, sample=sample, position=position), 11)
    low_high = tuple(torch.tensor([(seed >> shift) & 0xFFFFFFFF]) for shift in (0, 32))
    for entry in range(11):
        counter = tuple(torch.tensor([word]) for word in (entry // 4, position, sample, request))
        word = int(philox4x32(counter, low_high)[entry % 4])
        expected = -math.log(-math.log1p(-(word + 0.5) / 2**32))
        assert noise[0, entry].item() == pytest.approx(expected, rel=2e-6, abs=2e-6)


def test_noise_of_a_row_does_not_depend_on_the_batch():
    generator = torch.Generator().manual_seed(0)
    keys = [torch.randint(0, 2**31, (6,), generator=generator) for _ in range(4)]
    together = gumbel_noise(*keys, 130)
    for row in range(6):
        assert torch.equal(together[row : row + 1], gumbel_noise(*(part[row : row + 1] for part in keys), 130))


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 127])
def test_a_shorter_vocabulary_has_the_same_first_entries(vocab_size):
    assert torch.equal(gumbel_noise(*key(), vocab_size), gumbel_noise(*key(), 400)[:, :vocab_size])


def test_noise_may_start_anywhere():
    keys = key(3)
    whole = gumbel_noise(*keys, 4000)
    first = torch.tensor([0, 1024, 2052])
    some = gumbel_noise(*keys, 130, first)
    for row, begin in enumerate(first.tolist()):
        assert torch.equal(some[row], whole[row, begin : begin + 130])
    assert torch.equal(gumbel_noise(*keys, 130, 1024), whole[:, 1024:1154])


def test_entries_past_any_vocabulary_have_counters_of_their_own(monkeypatch):
    """Entry 2**33 is counter word 2**31: no int32 vocabulary index, divided by four, comes near."""
    drawn = []
    monkeypatch.setattr(philox, "philox4x32", lambda counter, key: drawn.append(counter) or philox4x32(counter, key))
    gumbel_noise(*key(), 9, 2**33)
    gumbel_noise(*key(), 9, 2**31 - 1024)
    assert [counter[0].tolist() for counter in drawn] == [
        [[2**31, 2**31 + 1, 2**31 + 2]],
        [[2**29 - 256, 2**29 - 255, 2**29 - 254]],
    ]


@pytest.mark.parametrize("part", ["seed", "request", "sample", "position"])
@pytest.mark.parametrize("bit", [0, 31])
def test_every_part_of_the_key_matters(part, bit):
    base, other = key(**{part: 0}), key(**{part: 1 << bit})
    assert (gumbel_noise(*base, 64) != gumbel_noise(*other, 64)).all()


def test_high_half_of_the_seed_matters():
    assert (gumbel_noise(*key(seed=1), 64) != gumbel_noise(*key(seed=1 + 2**40), 64)).all()


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_noise_is_finite_at_both_ends(monkeypatch, word):
    monkeypatch.setattr(philox, "philox4x32", lambda counter, key: (torch.full_like(counter[0], word),) * 4)
    assert gumbel_noise(*key(), 8).isfinite().all()


def test_moments():
    noise = torch.cat([gumbel_noise(*key(position=position), 100_000) for position in range(4)]).double().flatten()
    count, variance = noise.numel(), math.pi**2 / 6
    assert abs(noise.mean() - EULER) < 4 * math.sqrt(variance / count)
    # The fourth central moment of a Gumbel variable is 5.4 squared variances, so var(s^2) is 4.4 of them over n.
    assert abs(noise.var() - variance) < 4 * variance * math.sqrt(4.4 / count)
    below_zero = (noise < 0).double().mean()
    assert_close(below_zero, torch.tensor(math.exp(-1), dtype=torch.float64), rtol=0, atol=4 * 0.5 / math.sqrt(count))


def test_largest_noisy_score_is_a_sample_of_the_softmax():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5])
    draws = 40_000
    positions = torch.arange(draws)
    noise = gumbel_noise(*(torch.full((draws,), part) for part in (3, 1, 0)), positions, 7)
    seen = (logits + noise).argmax(dim=-1).bincount(minlength=7).double()
    expected = logits.double().softmax(dim=-1) * draws
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < 27.86  # 1 in 10,000 with 6 degrees of freedom
