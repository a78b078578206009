# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Train a draft model on the policy's own rollouts. The policy gets no gradient from it: it is only read.

Blocks start at anchors drawn from the answers. All blocks of a row go through one forward: each sees the row's context
before its anchor, and itself. A block's token i is to be the row's own token at that very place.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_hybrid.compat import causal_model, text_model
from deepspeed_hybrid.generation.batch import RolloutBatch
from deepspeed_hybrid.speculative.capture import FeatureCapture
from deepspeed_hybrid.speculative.config import SLIDING, DraftConfig
from deepspeed_hybrid.speculative.draft import DFlashDraft, attention

# Shapes: R rows, S tokens, N anchors a row, T block tokens, C features, D hidden.


@dataclass(frozen=True)
class Answered:
    """Rows without padding before them: ids [R, S] int64, answered [R, S] bool, which of them are an answer's."""

    ids: torch.Tensor
    answered: torch.Tensor

    @classmethod
    def of(cls, batch: RolloutBatch) -> "Answered":
        """Rows of a rollout, moved to the left: what is behind a row's end no token before it has seen."""
        mask = batch.attention_mask.bool()
        width, lengths = mask.shape[1], mask.sum(dim=1)
        padding = mask.long().argmax(dim=1)
        columns = torch.arange(width, device=mask.device)[None]
        source = (columns + padding[:, None]).clamp(max=width - 1)
        real = columns < lengths[:, None]
        ids = batch.input_ids.gather(1, source).masked_fill(~real, 0)
        answered = real & (columns + padding[:, None] >= batch.response_start_idx[:, None])
        longest = int(lengths.max())
        return cls(ids[:, :longest], answered[:, :longest])


def draw_anchors(
    answered: torch.Tensor, count: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places where blocks start: tokens of an answer behind which there is another, without replacement, sorted.

    Args:
        answered: [R, S] bool.
        count: N.

    Returns:
        anchors [R, N] int64, and which of them are any [R, N] bool; those that are not stand at 0.
    """
    possible = answered & F.pad(answered[:, 1:], (0, 1))
    lots = torch.rand(answered.shape, generator=generator, device="cpu").to(answered.device)
    count = min(count, answered.shape[1])
    drawn = lots.masked_fill(~possible, -1.0).topk(count, dim=1)
    found = drawn.values >= 0
    anchors, order = drawn.indices.masked_fill(~found, 0).sort(dim=1)
    return anchors, found.gather(1, order)


def visible(config: DraftConfig, layer: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Which keys a query of a layer sees, of its own block and of the context before it.

    Args:
        queries: [R, Q], their positions.
        keys: [R, K] or [1, K], theirs.

    Returns:
        [R, Q, K] bool.
    """
    queries, keys = queries[..., None], keys[:, None, :]
    seen = (keys <= queries) | (not config.causal[layer])
    return seen & (keys > queries - config.sliding_window) if config.layer_types[layer] == SLIDING else seen


def block_masks(config: DraftConfig, anchors: torch.Tensor, length: int) -> list[torch.Tensor]:
    """For each layer [R, N * T, S + N * T] bool: what a block's token sees of the context, and then of all blocks."""
    tokens = config.block_size
    positions = (anchors[..., None] + torch.arange(tokens, device=anchors.device)).flatten(1)
    start = anchors.repeat_interleave(tokens, dim=1)
    context = torch.arange(length, device=anchors.device)[None]
    blocks = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(tokens)
    together = blocks[:, None] == blocks[None, :]
    masks = []
    for layer in range(config.num_layers):
        before = visible(config, layer, positions, context) & (context[:, None] < start[..., None])
        within = visible(config, layer, positions, positions) & together
        masks.append(torch.cat([before, within], dim=-1))
    return masks


@dataclass(frozen=True)
class DraftLoss:
    """``loss`` has the gradient; ``right`` [T - 1] is the share of right guesses at each place of a block."""

    loss: torch.Tensor
    right: torch.Tensor


def draft_loss(
    draft: DFlashDraft,
    features: torch.Tensor,
    rows: Answered,
    anchors: torch.Tensor,
    found: torch.Tensor,
    embedding: torch.Tensor,
    head: torch.Tensor,
    head_bias: torch.Tensor | None,
    decay: float,
) -> DraftLoss:
    """Cross entropy of the blocks' tokens behind their anchors, the further from the anchor the less.

    Args:
        features: [R, S, C] of the target, in the order of target_layer_ids.
        anchors, found: [R, N], of :func:`draw_anchors`.
        embedding, head, head_bias: the target's; they get no gradient.
        decay: a token i places behind its anchor counts exp(-(i - 1) / decay).
    """
    config, tokens = draft.config, draft.config.block_size
    length, device = rows.ids.shape[1], rows.ids.device
    places = anchors[..., None] + torch.arange(tokens, device=device)  # [R, N, T]
    ids = torch.full(places.shape, config.mask_token_id, dtype=torch.int64, device=device)
    ids[..., 0] = rows.ids.gather(1, anchors)
    context = draft.context(features.detach())
    keys, values = draft.context_keys_values(context, torch.arange(length, device=device)[None])
    masks = block_masks(config, anchors, length)

    def attend(layer: int, queries: torch.Tensor, own_keys: torch.Tensor, own_values: torch.Tensor) -> torch.Tensor:
        both = torch.cat([keys[:, :, layer], own_keys], dim=1), torch.cat([values[:, :, layer], own_values], dim=1)
        return attention(queries, *both, masks[layer])

    hidden = draft.block(F.embedding(ids.flatten(1), embedding.detach()), places.flatten(1), attend)
    guesses = hidden.unflatten(1, ids.shape[1:])[:, :, 1:]

    behind = places[..., 1:]
    within = behind < length
    behind = behind.clamp(max=length - 1).flatten(1)
    labels = rows.ids.gather(1, behind).view(within.shape)
    counted = rows.answered.gather(1, behind).view(within.shape) & within & found[..., None]
    bias = None if head_bias is None else head_bias.detach()
    logits = F.linear(guesses[counted].to(head.dtype), head.detach(), bias).float()
    weights = torch.exp(-torch.arange(tokens - 1, device=device) / decay).expand(within.shape)[counted]
    errors = F.cross_entropy(logits, labels[counted], reduction="none")
    right = torch.zeros(within.shape, device=device)
    right[counted] = (logits.argmax(dim=-1) == labels[counted]).float()
    shares = right.sum(dim=(0, 1)) / counted.sum(dim=(0, 1)).clamp(min=1)
    return DraftLoss((errors * weights).sum() / weights.sum().clamp(min=1e-6), shares)


class FeatureTrainer(ABC):
    """AdamW over a draft model that reads the policy's features, a rollout at a time; what all kinds have in common.

    Args:
        model: the target, of which nothing is changed.
        draft: in fp32, on the target's device.
        layer_ids: of the target, whose features the draft reads.
        learning_rate: of AdamW.
        anchors: blocks a row.
        clip: of the gradient's norm.
        seed: of the anchors.
    """

    def __init__(
        self,
        model: nn.Module,
        draft: nn.Module,
        layer_ids: tuple[int, ...],
        learning_rate: float,
        anchors: int,
        clip: float,
        seed: int,
    ):
        self.model, self.draft = causal_model(model), draft.requires_grad_(True)
        self.layer_ids, self.anchors, self.clip = layer_ids, anchors, clip
        self.optimizer = torch.optim.AdamW(draft.parameters(), lr=learning_rate, weight_decay=0.0)
        self._generator = torch.Generator().manual_seed(seed)

    @contextmanager
    def watching(self) -> Iterator[list[torch.Tensor]]:
        """Inside, the features of each of the target's forwards are appended to the list, detached: [R, S, C]."""
        seen: list[torch.Tensor] = []
        capture = FeatureCapture(self.layer_ids, lambda features: seen.append(features.detach().clone()))
        with capture.on(text_model(self.model).layers):
            yield seen

    @torch.no_grad()
    def features(self, rows: Answered) -> torch.Tensor:
        """[R, S, C], by a forward of the target."""
        with self.watching() as seen:
            self.model(input_ids=rows.ids, use_cache=False, logits_to_keep=1)
        return seen[0]

    def update(self, rows: Answered, features: torch.Tensor | None = None) -> DraftLoss:
        """One optimizer step.

        Args:
            rows: of one rollout, or some of them.
            features: [R, S, C] of a forward over ``rows.ids`` under :meth:`watching`; None: one is made for them.

        Raises:
            ValueError: no row has two tokens of an answer.
        """
        anchors, found = draw_anchors(rows.answered, self.anchors, self._generator)
        if not bool(found.any()):
            raise ValueError("rows must have answers of at least two tokens to train a draft on")
        features = self.features(rows) if features is None else features
        with torch.enable_grad():
            outcome = self.loss(features, rows, anchors, found)
            self.optimizer.zero_grad(set_to_none=True)
            outcome.loss.backward()
        nn.utils.clip_grad_norm_(self.draft.parameters(), self.clip)
        self.optimizer.step()
        return DraftLoss(outcome.loss.detach(), outcome.right)

    @abstractmethod
    def loss(self, features: torch.Tensor, rows: Answered, anchors: torch.Tensor, found: torch.Tensor) -> DraftLoss:
        """With the gradient; ``anchors`` and ``found`` are of :func:`draw_anchors`."""


class DraftTrainer(FeatureTrainer):
    """AdamW over a draft model, a rollout at a time; usable between the policy's own steps.

    What a rollout serves is a copy: its ``sync_weights()`` takes the trained weights over.

    Args:
        model: the target, of which nothing is changed.
        draft: in fp32, on the target's device.
        learning_rate: of AdamW; 6e-4 from scratch, far less to follow a policy.
        anchors: blocks a row.
        decay: None: 4 for blocks of up to 8 tokens, 7 for longer ones.
        clip: of the gradient's norm.
        seed: of the anchors.
    """

    def __init__(
        self,
        model: nn.Module,
        draft: DFlashDraft,
        learning_rate: float = 6e-4,
        anchors: int = 64,
        decay: float | None = None,
        clip: float = 1.0,
        seed: int = 0,
    ):
        super().__init__(model, draft, draft.config.target_layer_ids, learning_rate, anchors, clip, seed)
        self.decay = decay or (4.0 if draft.config.block_size <= 8 else 7.0)

    def loss(self, features: torch.Tensor, rows: Answered, anchors: torch.Tensor, found: torch.Tensor) -> DraftLoss:
        head, embedding = self.model.get_output_embeddings(), text_model(self.model).embed_tokens.weight
        return draft_loss(self.draft, features, rows, anchors, found, embedding, head.weight, head.bias, self.decay)
