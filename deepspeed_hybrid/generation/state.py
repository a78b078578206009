# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Everything about the rows in flight that is not in the cache: one tensor a fact, one row a slot."""

from dataclasses import dataclass, fields

import torch

from deepspeed_hybrid.generation.requests import SamplingPlan
from deepspeed_hybrid.generation.transfer import upload
from deepspeed_hybrid.ops.decode_step import RUNNING

STOP_ID_BUCKET = 8


@dataclass
class DecodeState:
    """Buffers of fixed address; a decode step reads and writes the first B rows. S slots, C columns."""

    token: torch.Tensor  # [S] int64, the last token chosen: the next input
    position: torch.Tensor  # [S] int64, its position in the sequence, and where its key will be written
    length: torch.Tensor  # [S] int64, tokens answered so far
    limit: torch.Tensor  # [S] int64, most tokens of an answer
    stepped: torch.Tensor  # [S] int64, tokens of the row's last step; kept where a step may have several
    parked: torch.Tensor  # [S] bool: not in flight, nothing of the row changes
    finish: torch.Tensor  # [S] uint8: RUNNING, STOPPED or LENGTH
    seed: torch.Tensor  # [S] int64; with request, sample and position the key of the noise
    request: torch.Tensor  # [S] int64
    sample: torch.Tensor  # [S] int64
    temperature: torch.Tensor  # [S] fp32
    top_k: torch.Tensor  # [S] int64, 0 for all
    top_p_tail: torch.Tensor  # [S] fp32, 1 - top_p
    min_p: torch.Tensor  # [S] fp32
    penalty: torch.Tensor  # [S] fp32
    tokens: torch.Tensor  # [S, C] int64, the answers
    logprobs: torch.Tensor  # [S, C] fp32
    stop_ids: torch.Tensor  # [N] int64 for all rows, padded with -1
    seen: torch.Tensor | None = None  # [S, V] bool, where a repetition penalty is asked for

    @classmethod
    def empty(cls, slots: int, columns: int, device: torch.device) -> "DecodeState":
        """All rows parked."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token=zeros(slots),
            position=zeros(slots),
            length=zeros(slots),
            limit=zeros(slots),
            stepped=zeros(slots),
            parked=zeros(slots, dtype=torch.bool).fill_(True),
            finish=zeros(slots, dtype=torch.uint8),
            seed=zeros(slots),
            request=zeros(slots),
            sample=zeros(slots),
            temperature=zeros(slots, dtype=torch.float32).fill_(1),
            top_k=zeros(slots),
            top_p_tail=zeros(slots, dtype=torch.float32),
            min_p=zeros(slots, dtype=torch.float32),
            penalty=zeros(slots, dtype=torch.float32).fill_(1),
            tokens=zeros(slots, columns),
            logprobs=zeros(slots, columns, dtype=torch.float32),
            stop_ids=zeros(STOP_ID_BUCKET).fill_(-1),
        )

    @classmethod
    def starting(
        cls,
        requests: list[int],
        samples: list[int],
        lengths: list[int],
        plan: SamplingPlan,
        columns: int,
        device: torch.device,
    ) -> "DecodeState":
        """Rows just prefilled: the position is the last prompt token's, and no token is chosen yet."""
        count = len(requests)
        rows = [request * plan.samples + sample for request, sample in zip(requests, samples, strict=True)]
        numbers = {
            "token": [0] * count,
            "position": [length - 1 for length in lengths],
            "length": [0] * count,
            "limit": [plan.limit(row) for row in rows],
            "stepped": [0] * count,
            "seed": [plan.seed] * count,
            "request": requests,
            "sample": samples,
            "top_k": [plan.top_k] * count,
        }
        options = [plan.temperature or 1.0, 1 - plan.top_p, plan.min_p, plan.penalty]
        temperature, top_p_tail, min_p, penalty = torch.empty(4, count, dtype=torch.float32, device=device)
        for tensor, option in zip((temperature, top_p_tail, min_p, penalty), options, strict=True):
            tensor.fill_(option)
        return cls(
            **dict(zip(numbers, upload([*numbers.values()], device), strict=True)),
            parked=torch.zeros(count, dtype=torch.bool, device=device),
            finish=torch.zeros(count, dtype=torch.uint8, device=device),
            temperature=temperature,
            top_p_tail=top_p_tail,
            min_p=min_p,
            penalty=penalty,
            tokens=torch.zeros(count, columns, dtype=torch.int64, device=device),
            logprobs=torch.zeros(count, columns, dtype=torch.float32, device=device),
            stop_ids=upload(padded_stop_ids(plan.stop_ids), device),
        )

    def set_stop_ids(self, ids: tuple[int, ...]) -> None:
        """Replace the stop ids, in place where they fit the buffer."""
        padded = padded_stop_ids(ids, self.stop_ids.numel())
        if len(padded) != self.stop_ids.numel():
            self.stop_ids = self.stop_ids.new_empty(len(padded))
        self.stop_ids.copy_(upload(padded, self.stop_ids.device))

    def track_seen(self, vocab_size: int) -> None:
        """Have the ``seen`` buffer from now on."""
        if self.seen is None:
            self.seen = torch.zeros(self.token.numel(), vocab_size, dtype=torch.bool, device=self.token.device)

    def lanes(self, count: int) -> "DecodeState":
        """The first ``count`` rows, as views."""
        return self.part(slice(count))

    def part(self, rows: slice) -> "DecodeState":
        """Some of the rows, as views."""
        return DecodeState(
            **{name: value if name == "stop_ids" or value is None else value[rows] for name, value in self._items()}
        )

    def store(self, slots: torch.Tensor, rows: "DecodeState") -> None:
        """Copy ``rows`` (as many as ``slots``, [N] int64) into their slots."""
        for name, value in rows._items():
            if name == "stop_ids" or value is None:
                continue
            target = getattr(self, name)
            if value.dim() == 2:
                target = target[:, : value.shape[1]]
            target.index_copy_(0, slots, value)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole rows, ``sources[i]`` to ``targets[i]`` (both [N] int64, disjoint), and park the former."""
        for name, value in self._items():
            if name != "stop_ids" and value is not None:
                value.index_copy_(0, targets, value.index_select(0, sources))
        self.parked.index_fill_(0, sources, True)

    def park(self) -> None:
        """No row is in flight."""
        self.parked.fill_(True)
        self.finish.fill_(RUNNING)

    def bytes(self) -> int:
        return sum(value.numel() * value.element_size() for _, value in self._items() if value is not None)

    def _items(self) -> list[tuple[str, torch.Tensor | None]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def padded_stop_ids(ids: tuple[int, ...], room: int = STOP_ID_BUCKET) -> list[int]:
    """With -1, which is no token's, up to ``room`` of them or to as many as need fewest buckets."""
    return [*ids, *[-1] * (max(room, -(-len(ids) // STOP_ID_BUCKET) * STOP_ID_BUCKET) - len(ids))]
