# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Rollouts of a GatedDeltaNet layer in blocks of drafts, of which some are right, and the same token by token."""

from collections.abc import Callable

import torch
from gdn_decode_cases import Shape, arguments_of, tokens_of
from glue_cases import slice_of_poison

from deepspeed_hybrid.ops.gdn_kept_block import PLACES, in_state, taken_in

RINGS = "keys", "deltas", "decays"
SLOTS = "window", "state", *RINGS


def kept_layer(
    shape: Shape,
    positions: list[int],
    rounded: bool = False,
    seed: int = 0,
    **options,
) -> dict:
    """A layer behind prompts that end before ``positions``, beside a free slot; rings are full of poison, of which
    nothing may be read."""
    rows = len(positions)
    arguments = arguments_of(shape, rows, slots=rows + 1, seed=seed, **options)
    for name in ("parked", "projected"):
        del arguments[name]
    dtype = arguments["window"].dtype if rounded else torch.float32
    nan = float("nan")
    rings = {
        "keys": torch.full((rows + 1, shape.key_heads, PLACES, shape.key_dim), nan, dtype=dtype),
        "deltas": torch.full((rows + 1, shape.value_heads, PLACES, shape.value_dim), nan),
        "decays": torch.full((rows + 1, shape.value_heads, PLACES), nan),
    }
    return arguments | rings | {"position": torch.tensor(positions), "rounded_heads": rounded}


class Rollout:
    """Rows of a layer that go on by blocks.

    Args:
        layer: of :func:`kept_layer`, updated.
        tokens: [B, L, N], what the rows' tokens project to.
        block, windows: gdn_kept_block and gdn_windows, or what does the same.
    """

    def __init__(self, layer: dict, tokens: torch.Tensor, block: Callable, windows: Callable):
        self.layer, self.tokens, self.block, self.windows = layer, tokens, block, windows
        rows, self.end = tokens.shape[:2]  # tokens that there are to come
        self.done = torch.zeros(rows, dtype=torch.int64, device=tokens.device)
        self.stepped = torch.full_like(self.done, -9)  # of no matter before the first step
        self.out = [[] for _ in range(rows)]
        self.prompts = layer["position"].clone()

    def step(self, length: int, right: torch.Tensor) -> None:
        """A block of ``length`` tokens a row, of which the first ``right`` [B] are the row's, and others are not; 0
        for a row that is parked."""
        rows, total, columns = self.tokens.shape
        left = (self.end - self.done).clamp(max=length)
        counts = torch.where(right > 0, left, 0)
        accepted = torch.minimum(right, counts)
        index = torch.arange(length, device=left.device)[:, None]
        taken = (self.done + index).clamp(max=total - 1)
        block = self.tokens[torch.arange(rows, device=left.device), taken]
        wrong = torch.randn(block.shape, generator=torch.Generator().manual_seed(length)).to(block)
        block = torch.where((index < accepted)[..., None], block, wrong)
        block = torch.where((index < counts)[..., None], block, float("nan"))
        projected = slice_of_poison(block.flatten(0, 1), -(-columns // 8) * 8 + 8, 8)
        position = self.prompts + self.done
        rest = {name: value for name, value in self.layer.items() if name != "position"}
        where = dict(position=position, answered=self.done + 1, stepped=self.stepped, counts=counts)
        out = self.block(projected, **rest, **where).view(length, rows, -1)
        assert bool((out[index.expand(length, rows) >= counts] == 0).all())
        if length > 1:
            self.windows([projected], [self.layer["window"]], position, accepted)
        for row, count in enumerate(accepted.tolist()):
            self.out[row] += out[:count, row]
        self.stepped = torch.where(accepted > 0, accepted, self.stepped)
        self.done = self.done + accepted

    def outputs(self) -> torch.Tensor:
        """[B, L, HV * DV]; all rows have come to their end."""
        return torch.stack([torch.stack(row) for row in self.out])

    def settled(self) -> torch.Tensor:
        """[B, HV, DK, DV] fp32, with all tokens."""
        end = self.prompts + self.done
        rows, rings = len(end), tuple(self.layer[name] for name in RINGS)
        found = in_state(end - self.stepped, self.prompts)
        return taken_in(self.layer["state"][:rows].float(), rings, found, end, self.done > 0)

    def beside(self) -> list[torch.Tensor]:
        """Of each ring, what is kept of the last tokens that a step may find."""
        end, kept = self.prompts + self.done, []
        for name in RINGS:
            ring = self.layer[name]
            for row, (last, first) in enumerate(zip(end.tolist(), self.prompts.tolist(), strict=True)):
                places = [place % ring.shape[2] for place in range(max(first, last - 22), last)]
                kept.append(ring[row][:, places])
        return kept


def rows_of_tokens(shape: Shape, rows: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return tokens_of(shape, rows, length, dtype=dtype, seed=5)


def roll(rollout: Rollout, schedule: Callable[[int], tuple[int, torch.Tensor]]) -> Rollout:
    """Steps of the length and number of right tokens that ``schedule`` says, until all rows have ended but for their
    last token; and one for that, so that however they came there, states have the same tokens in them."""
    total, step = rollout.end, 0
    rollout.end = total - 1
    while bool((rollout.done < rollout.end).any()):
        length, right = schedule(step)
        rollout.step(length, right.to(rollout.done.device))
        step += 1
    rollout.end = total
    rollout.step(1, torch.ones_like(rollout.done))
    return rollout


def one_by_one(rows: int) -> Callable[[int], tuple[int, torch.Tensor]]:
    return lambda step: (1, torch.ones(rows, dtype=torch.int64))


def by_chance(rows: int, lengths: tuple[int, ...], seed: int = 0, parked: bool = True):
    """Lengths, and numbers of right tokens up to them, drawn anew for each step; now and then a row is parked."""
    generator = torch.Generator().manual_seed(seed)

    def schedule(step: int) -> tuple[int, torch.Tensor]:
        length = lengths[int(torch.randint(len(lengths), (1,), generator=generator))]
        right = torch.randint(0 if parked else 1, length + 1, (rows,), generator=generator)
        return length, right

    return schedule
