# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Counter-based random numbers: Philox4x32-10 in plain torch.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A number depends on its key and counter alone,
so a row's noise is the same in any batch, slot, bucket or schedule, and on any device. The CUDA kernels compute the
same words; this file is their reference.
"""

import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF

# The largest fp32 below one: -log1p(-u) stays finite there.
LARGEST_UNIFORM = 1.0 - 2.0**-24


def philox4x32(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Four 32-bit words for each counter.

    Args:
        counter: four broadcastable int64 tensors holding unsigned 32-bit words.
        key: two such tensors.

    Returns:
        Four int64 tensors of the broadcast shape, each word in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply_words(c0, MULTIPLIERS[0])
        high1, low1 = _multiply_words(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + KEY_INCREMENTS[0]) & WORD
        k1 = (k1 + KEY_INCREMENTS[1]) & WORD
    return c0, c1, c2, c3


def gumbel_noise(
    seed: torch.Tensor,
    request: torch.Tensor,
    sample: torch.Tensor,
    position: torch.Tensor,
    count: int,
    first: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Standard Gumbel noise for ``count`` consecutive entries of every row.

    The key is the 64-bit seed; the counter is (entry // 4, position, sample, request), and the word within the
    counter's four is entry % 4.

    Args:
        seed, request, sample, position: [B] int64.
        first: the first entry of every row, or [B] int64 with one for each; multiples of 4 below 2**34.

    Returns:
        [B, count] fp32, finite.
    """
    blocks = torch.arange((count + 3) // 4, device=seed.device)[None, :]
    blocks = blocks + (first[:, None] if isinstance(first, torch.Tensor) else first) // 4
    counter = (blocks, *((word & WORD)[:, None] for word in (position, sample, request)))
    key = ((seed & WORD)[:, None], ((seed >> 32) & WORD)[:, None])
    words = torch.stack(philox4x32(counter, key), dim=-1).flatten(1)[:, :count]
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp_(max=LARGEST_UNIFORM)
    return -torch.log(-torch.log1p(-uniform))


def _multiply_words(words: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low words of a 32 x 32 bit product. int64 wraps, and the wrapped bits are the right ones."""
    product = words * factor
    return (product >> 32) & WORD, product & WORD
