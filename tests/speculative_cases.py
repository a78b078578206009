# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Drafters whose guesses a test decides, and tiny draft models."""

from collections.abc import Callable

import pytest
import torch
from harness import answers, rollout_of
from models import VOCAB

from deepspeed_hybrid import HybridEngineRollout
from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.speculative.config import DraftConfig
from deepspeed_hybrid.speculative.draft import DFlashDraft
from deepspeed_hybrid.speculative.rope import RopeSettings
from deepspeed_hybrid.speculative.train import draw_anchors

MASK = VOCAB - 1  # of drafts for the tiny models


def draft_config(target: torch.nn.Module, **options) -> DraftConfig:
    """A draft of two layers for a tiny target."""
    decoder = text_model(target)
    settings = dict(
        hidden_size=decoder.embed_tokens.weight.shape[1],
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        block_size=8,
        target_layer_ids=(0, len(decoder.layers) - 1),
        mask_token_id=decoder.embed_tokens.weight.shape[0] - 1,
        vocab_size=decoder.embed_tokens.weight.shape[0],
        rope=RopeSettings(options.get("head_dim", 16)),
        sliding_window=5,
    )
    return DraftConfig(**{**settings, **options})


def with_head_bias(target: torch.nn.Module) -> torch.nn.Module:
    """The target, whose head prefers some tokens whatever it reads."""
    head = target.lm_head
    target.lm_head = torch.nn.Linear(head.in_features, head.out_features)
    target.lm_head.weight.data.copy_(head.weight.data)
    torch.nn.init.normal_(target.lm_head.bias)
    return target


def tiny_draft(target: torch.nn.Module, seed: int = 0, **options) -> DFlashDraft:
    """Random weights: its guesses are almost always wrong."""
    torch.manual_seed(seed)
    return DFlashDraft(draft_config(target, **options)).requires_grad_(False)


def speculative_rollout(target: torch.nn.Module, draft=None, controller=None, **options) -> HybridEngineRollout:
    """A rollout over a bare model.

    Args:
        draft: a draft model, or a drafter to put in its place; None: a draft model of random weights.
        controller: of block lengths; None: always the draft's own.
    """
    scripted = draft is not None and not isinstance(draft, DFlashDraft)
    model = tiny_draft(target) if draft is None or scripted else draft
    rollout = rollout_of(target, speculative="dflash", draft_model=model, enable_profiling=True, **options)
    if scripted:
        rollout._speculation.drafter = draft
    rollout._speculation.controller = controller or rollout._speculation.controller
    return rollout


def figures(rollout: HybridEngineRollout) -> dict:
    """Of speculation in the last call."""
    return rollout.get_last_profile()["speculation"]


def script_of(batch, samples: int = 1) -> dict[tuple[int, int], list[int]]:
    """What a scripted drafter has to know of a plain run's answers."""
    return {(row // samples, row % samples): tokens.tolist() for row, tokens in enumerate(answers(batch))}


def assert_gradients_are_slopes(trainer, rows) -> None:
    """Of each weight: a step along its gradient changes the loss as much as the gradient says."""
    features = trainer.features(rows)
    anchors, found = draw_anchors(rows.answered, 8, torch.Generator().manual_seed(0))
    trainer.loss(features, rows, anchors, found).loss.backward()
    for name, weight in trainer.draft.named_parameters():
        size, start = float(weight.grad.norm()), weight.detach().clone()
        step = 2e-3 * float(start.norm()) * weight.grad / size
        losses = []
        for sign in (1, -1):
            weight.data = start + sign * step
            losses.append(float(trainer.loss(features, rows, anchors, found).loss.detach()))
        weight.data = start
        slope = (losses[0] - losses[1]) / float(2 * step.norm())
        assert slope == pytest.approx(size, rel=0.05), name


class ScriptedDrafter:
    """Proposes what a test knows will come, wrong from a chosen place on.

    Args:
        answers: tokens by (request, sample).
        right: how many of the next drafts are right, by request, sample and tokens answered so far.
    """

    def __init__(self, answers: dict[tuple[int, int], list[int]], right: Callable[[int, int, int], int]):
        self.answers, self.right = answers, right
        self.wrong = 1  # what a wrong token is beside the right one
        self.layer_ids: tuple[int, ...] = ()
        self.most_tokens = 16

    def attach(self, cache) -> None:
        """It keeps nothing of slots."""

    def cache_bytes(self, slots: int, capacity: int) -> int:
        return 0

    def release(self) -> None:
        """Nor of caches."""

    def refresh(self) -> None:
        """It has no weights."""

    def describe(self) -> str:
        return "a script"

    def observe(self, features, plan) -> None:
        raise AssertionError("it asked for no features")

    def propose(self, state, tokens: int, kv_length: int) -> torch.Tensor:
        rows = []
        for request, sample, length, parked in zip(
            state.request.tolist(), state.sample.tolist(), state.length.tolist(), state.parked.tolist(), strict=True
        ):
            if parked:
                rows.append([0] * (tokens - 1))
                continue
            coming = self.answers[request, sample][length : length + tokens - 1]
            coming = coming + [1] * (tokens - 1 - len(coming))
            right = self.right(request, sample, length)
            rows.append([token if at < right else (token + self.wrong) % VOCAB for at, token in enumerate(coming)])
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), tokens - 1)


class DeviceScript(ScriptedDrafter):
    """The same without a look at a value, so that its steps can be captured."""

    def __init__(self, answers: dict[tuple[int, int], list[int]], right: Callable[[int, int, int], int], device="cpu"):
        super().__init__(answers, right)
        requests, samples = (max(key[axis] for key in answers) + 1 for axis in (0, 1))
        columns = max(map(len, answers.values())) + self.most_tokens
        self.tokens = torch.ones(requests, samples, columns, dtype=torch.int64)
        self.rights = torch.zeros(requests, samples, columns, dtype=torch.int64)
        for (request, sample), tokens in answers.items():
            self.tokens[request, sample, : len(tokens)] = torch.tensor(tokens)
            self.rights[request, sample] = torch.tensor([right(request, sample, length) for length in range(columns)])
        self.tokens, self.rights = self.tokens.to(device), self.rights.to(device)

    def propose(self, state, tokens: int, kv_length: int) -> torch.Tensor:
        requests, samples, columns = self.tokens.shape
        rows = state.request.clamp(max=requests - 1)[:, None], state.sample.clamp(max=samples - 1)[:, None]
        places = torch.arange(tokens - 1, device=state.token.device)[None]
        length = state.length[:, None]
        coming = self.tokens[(*rows, (length + places).clamp(max=columns - 1))]
        right = self.rights[(*rows, length.clamp(max=columns - 1))]
        return torch.where(places < right, coming, (coming + self.wrong) % VOCAB)


class Schedule:
    """Block lengths in turn."""

    def __init__(self, *blocks: int):
        self.blocks, self.steps = blocks, 0
        self.most_tokens = max(blocks)
        self.lengths = tuple(set(blocks))

    def begin(self) -> None:
        """It goes on where it was."""

    def disturb(self) -> None:
        """It measures nothing."""

    def record(self, lanes: int, tokens: int, reached: torch.Tensor) -> None:
        """It knows already."""

    def tokens(self, lanes: int) -> int:
        self.steps += 1
        return self.blocks[(self.steps - 1) % len(self.blocks)]
