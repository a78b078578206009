# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments for decode_step: random scores, rows at different places, and outputs full of poison."""

import torch

POISON_TOKEN, POISON_LOGPROB = -7777, float("nan")  # neither can come out of a step
COLUMNS = 6
MUTATED = ("token", "position", "length", "parked", "finish", "tokens", "logprobs")


def decode_arguments(
    rows: int,
    vocab: int,
    *,
    dtype: torch.dtype = torch.float32,
    sampled: bool = True,
    temperature: bool = True,
    raw: torch.dtype | None = None,
    stop_ids: tuple[int, ...] = (-1,),
    limit: int = COLUMNS,
    row_stride: int | None = None,
    seed: int = 0,
) -> dict:
    """Keyword arguments of decode_step on the CPU; every third row is parked.

    Args:
        raw: dtype of raw_logits, or None to leave them out.
        row_stride: distance of two rows of the scores; ``vocab`` unless given.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (rows,), generator=generator)

    def logits(kind: torch.dtype) -> torch.Tensor:
        storage = torch.full((rows, row_stride or vocab), float("nan")).to(kind)
        storage[:, :vocab] = (4 * torch.randn(rows, vocab, generator=generator)).to(kind)
        return storage[:, :vocab]

    return {
        "scores": logits(dtype),
        "raw_logits": None if raw is None else logits(raw),
        "temperature": torch.rand(rows, generator=generator) + 0.5 if temperature else None,
        "seed": integers(-(2**62), 2**62),
        "request": integers(0, 2**32),
        "sample": integers(0, 64),
        "limit": torch.full((rows,), limit),
        "stop_ids": torch.tensor(stop_ids, dtype=torch.int64),
        "token": integers(0, vocab),
        "position": integers(0, 262144),
        "length": integers(0, COLUMNS - 1),
        "parked": torch.arange(rows) % 3 == 2,
        "finish": torch.zeros(rows, dtype=torch.uint8),
        "tokens": torch.full((rows, COLUMNS), POISON_TOKEN),
        "logprobs": torch.full((rows, COLUMNS), POISON_LOGPROB),
        "sampled": sampled,
    }


def rows_of(arguments: dict, rows: slice) -> dict:
    """A deep copy of some rows only."""
    return {
        name: value[rows].clone() if isinstance(value, torch.Tensor) and name != "stop_ids" else value
        for name, value in arguments.items()
    }


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal byte for byte, NaN included."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def copied(arguments: dict, device: str | torch.device = "cpu") -> dict:
    """A deep copy on a device. Scores keep their row stride."""
    return {
        name: _copy(value, device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
    }


def _copy(tensor: torch.Tensor, device) -> torch.Tensor:
    if tensor.dim() != 2 or tensor.is_contiguous():
        return tensor.clone().to(device)
    poison = POISON_LOGPROB if tensor.is_floating_point() else POISON_TOKEN
    storage = tensor.new_full((tensor.shape[0], tensor.stride(0)), poison, device=device)
    return storage[:, : tensor.shape[1]].copy_(tensor)
