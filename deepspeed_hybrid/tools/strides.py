# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A language of strides: a start, the same step again and again modulo the vocabulary, and now and then a jump.

The rest follows from two tokens until the next jump, so that a tiny model learns it within a minute and a draft of
several tokens can be right.
"""

import torch

WORDS = 62
PAD, MASK = WORDS, WORDS + 1  # never said
VOCAB = WORDS + 2
STRIDES = 7
JUMPS = 0.07  # share of tokens


def sentences(rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, length] int64."""
    stride = torch.randint(1, STRIDES + 1, (rows,), generator=generator)
    token = torch.randint(0, WORDS, (rows,), generator=generator)
    said = [token]
    for _ in range(length - 1):
        elsewhere = torch.randint(0, WORDS, (rows,), generator=generator)
        jumps = torch.rand(rows, generator=generator) < JUMPS
        token = torch.where(jumps, elsewhere, (token + stride) % WORDS)
        said.append(token)
    return torch.stack(said, dim=1)
