# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Hands and eyes for tests: run a rollout, watch its logits, force its tokens, feed its cache by hand."""

from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace

import torch
from models import Tokenizer, engine_of

from deepspeed_hybrid import (
    HybridEngineRollout,
    HybridEngineRolloutConfig,
    RolloutBatch,
    RolloutRequest,
    SamplingConfig,
)
from deepspeed_hybrid.cache.layers import StepPlan
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall, layer_kinds
from deepspeed_hybrid.generation.loop import StopFlags
from deepspeed_hybrid.ops.decode_step import decode_step_reference
from deepspeed_hybrid.ops.fused_silu_mul_halves import fused_silu_mul_halves_reference
from deepspeed_hybrid.ops.gdn_gates import gdn_gates_reference
from deepspeed_hybrid.segments.apply import bound
from deepspeed_hybrid.segments.injection import Injection

Prompts = tuple[torch.Tensor, torch.Tensor]


def rollout_of(model: torch.nn.Module, tokenizer: Tokenizer | None = None, **options) -> HybridEngineRollout:
    """A rollout over a bare model; ``options`` are the configuration's."""
    return HybridEngineRollout(engine_of(model), tokenizer or Tokenizer(), HybridEngineRolloutConfig(**options))


def greedy(rollout: HybridEngineRollout, prompts: Prompts, new_tokens: int, **options) -> RolloutBatch:
    """``generate()`` at temperature 0."""
    return rollout.generate(
        RolloutRequest(*prompts), SamplingConfig(max_new_tokens=new_tokens, temperature=0.0, **options)
    )


def answers(batch: RolloutBatch) -> list[torch.Tensor]:
    """Each row's answer, cut to its length."""
    start = int(batch.response_start_idx[0])
    return [
        row[start : start + length]
        for row, length in zip(batch.input_ids, batch.response_lengths.tolist(), strict=True)
    ]


def prompt(prompts: Prompts, row: int) -> torch.Tensor:
    """One prompt without its padding."""
    ids, mask = prompts
    return ids[row][mask[row].bool()]


def assert_same_answers(batch: RolloutBatch, expected: list, samples: int = 1, atol: float = 5e-5) -> None:
    """Tokens equal to the oracle's, logprobs within ``atol``; ``expected`` has one oracle a prompt."""
    got = answers(batch)
    assert len(got) == len(expected) * samples
    for row, tokens in enumerate(got):
        oracle = expected[row // samples]
        assert tokens.tolist() == oracle.tokens.tolist(), f"row {row}"
        logprobs = batch.logprobs[row, : len(tokens)].float()
        torch.testing.assert_close(
            logprobs, oracle.logprobs, atol=atol, rtol=0, msg=lambda text, row=row: f"row {row}: {text}"
        )


def record_logits(rollout: HybridEngineRollout) -> list[torch.Tensor]:
    """The last-position logits of every forward from now on, prefills included, in the order of the calls."""
    call, seen = rollout._paths.call, []
    original = call.logits

    def recording(*args) -> torch.Tensor:
        logits = original(*args)
        seen.append(logits.detach().float().clone())
        return logits

    call.logits = recording
    return seen


def stepwise_logits(seen: list[torch.Tensor], rows: int, samples: int = 1) -> torch.Tensor:
    """[steps, rows * samples, V] from the record of a call that made one prefill of all ``rows`` prompts."""
    first = seen[0].repeat_interleave(samples, dim=0)
    assert first.shape[0] == rows * samples
    return torch.stack([first, *(step[: rows * samples] for step in seen[1:])])


def force_tokens(rollout: HybridEngineRollout, script: torch.Tensor) -> None:
    """Have request r answer ``script[r]`` ([requests, steps]), whatever the logits; logprobs stay the model's own."""

    def choose(
        scores, raw_logits, temperature, seed, request, sample, limit, stop_ids, token, position, length, *rest
    ) -> None:
        forced = script[request, length.clamp(max=script.shape[1] - 1)]
        certain = torch.full_like(scores, float("-inf")).scatter_(1, forced[:, None], 0.0)
        model_scores = scores if raw_logits is None else raw_logits
        decode_step_reference(
            certain, model_scores, temperature, seed, request, sample, limit, stop_ids, token, position, length, *rest
        )

    rollout._arena.choose = choose


class LateFlags(StopFlags):
    """The host looks one burst behind, as it does on a device that runs ahead: rows go on, or move, that have ended
    unseen."""

    def __init__(self, state):
        super().__init__(state)
        self.asynchronous = True

    def record(self, occupants) -> None:
        self._queued.append((self.state.parked[: len(occupants)].clone(), None, list(occupants)))


def watch_chain(rollout: HybridEngineRollout, note: Callable[[str, tuple], None]) -> None:
    """Have ``note(op, arguments)`` called behind every op of the decode chains from now on."""
    injection = rollout._injection
    chain = injection.chain

    def noted(name: str) -> Callable:
        op = getattr(chain, name)

        def run(*args):
            result = op(*args)
            note(name, args)
            return result

        return run

    names = {field.name for field in fields(chain) if getattr(chain, field.name) is not None}
    names -= {"shared_sum"}  # it has a state
    injection.chain = replace(chain, **{name: noted(name) for name in names})
    injection.follow()


def new_cache(model: torch.nn.Module, slots: int = 2, capacity: int = 64) -> SimpleNamespace:
    """A cache of our own with the model's call, for feeding by hand."""
    return SimpleNamespace(model=model, call=ModelCall(model), slots=SlotCache(layer_kinds(model), slots, capacity))


@torch.no_grad()
def by_hand(cache: SimpleNamespace, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run ``forward`` with the layers bound to slots."""
    injection = Injection(
        cache.model, None, False, fused_silu_mul_halves_reference, gdn_gates_reference, "fed by hand"
    )
    with bound(injection.bindings):
        return forward()


def feed(cache: SimpleNamespace, tokens: torch.Tensor, start: int, slot: int = 0) -> torch.Tensor:
    """Feed tokens [T] at positions start.. of a slot in one forward; the last one's logits [V]."""
    end = start + len(tokens)
    positions = torch.arange(start, end)[None, :]
    where = torch.tensor([slot])
    plan = StepPlan(
        lanes=1,
        slots=where,
        kv_length=end,
        before=torch.tensor([start]),
        after=torch.tensor([end]),
        write_positions=positions,
        first=start == 0,
    )
    mask = torch.arange(end)[None, None, None, :] <= positions[:, None, :, None]

    def forward() -> torch.Tensor:
        with cache.slots.planned(plan):
            return cache.call.logits(tokens[None, :], positions, mask, cache.slots)

    return by_hand(cache, forward)[0]
