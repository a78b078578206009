# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Features are the residual stream behind a layer, in the configured order, in every forward of a call."""

import pytest
import torch
from harness import answers, prompt
from models import ragged_prompts, tiny_model
from speculative_cases import Schedule, speculative_rollout, tiny_draft
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.generation import prefill
from deepspeed_hybrid.speculative.capture import FeatureCapture

pytestmark = pytest.mark.core


@torch.no_grad()
def hidden_states(model, ids: torch.Tensor) -> list[torch.Tensor]:
    """What leaves each layer, [T, D], by Hugging Face; of the last layer before the last norm, which is taken away."""
    norm = text_model(model).norm
    text_model(model).norm = nn.Identity()
    try:
        return [state[0] for state in model(input_ids=ids[None], output_hidden_states=True).hidden_states[1:]]
    finally:
        text_model(model).norm = norm


@pytest.mark.parametrize("ids", [(0, 2), (2, 0), (3,), (3, 1, 2)], ids=str)
def test_hooks_see_what_hugging_face_reports(ids):
    target = tiny_model()
    tokens = torch.arange(3, 14)
    seen = []
    with FeatureCapture(ids, lambda features: seen.append(features.clone())).on(text_model(target).layers):
        with torch.no_grad():
            reported = target(input_ids=tokens[None], output_hidden_states=True).hidden_states
    (features,) = seen
    last = len(text_model(target).layers) - 1
    expected = hidden_states(target, tokens)
    for column, index in enumerate(ids):
        part = features[0].chunk(len(ids), dim=-1)[column]
        torch.testing.assert_close(part, expected[index], atol=0, rtol=0)
        if index < last:
            assert torch.equal(part, reported[index + 1][0])
        else:  # which is behind the last norm there
            assert not torch.allclose(part, reported[index + 1][0], atol=1e-2)
            torch.testing.assert_close(text_model(target).norm(part), reported[index + 1][0])


def test_no_hook_is_left():
    target = tiny_model()
    capture = FeatureCapture((1, 3), lambda features: None)
    with pytest.raises(KeyError), capture.on(text_model(target).layers):
        raise KeyError
    assert not any(layer._forward_hooks for layer in text_model(target).layers)


def test_a_forward_without_one_of_the_layers_is_an_error():
    target = tiny_model()
    layers = text_model(target).layers
    with FeatureCapture((1, 3), lambda features: None).on(layers), torch.no_grad():
        target(input_ids=torch.arange(4)[None])
        layers[1] = layers[0]
        with pytest.raises(RuntimeError, match="1 of 2 features"):
            target(input_ids=torch.arange(4)[None])


@pytest.mark.parametrize("blocks", [(8,), (1,), (1, 8, 3)], ids=str)
@pytest.mark.parametrize("budget", [8192, 4], ids=["whole", "chunks"])
def test_the_drafts_context_is_of_every_committed_token(blocks, budget, monkeypatch):
    """Behind every step, whatever it was, keys and values are those of the features of all tokens so far."""
    target = tiny_model()
    monkeypatch.setattr(prefill.prefill, "__defaults__", (budget, None, False))
    draft = tiny_draft(target, target_layer_ids=(3, 0))
    rollout = speculative_rollout(target, draft, Schedule(*blocks))
    prompts, checked, samples = ragged_prompts([9, 1, 6]), [], 2  # which share a prompt's context
    original = rollout._speculation.step

    def watched(model, cache, state, *rest):
        original(model, cache, state, *rest)
        lengths = state.position[: 3 * samples].tolist()
        kept = rollout._speculation.drafter.cache
        checked.append(
            [
                (kept.keys[row, :length].clone(), kept.values[row, :length].clone())
                for row, length in enumerate(lengths)
            ]
        )

    rollout._speculation.step = watched
    sampling = SamplingConfig(max_new_tokens=14, temperature=1.0, seed=2, n_samples_per_prompt=samples)
    batch = rollout.generate(RolloutRequest(*prompts), sampling)
    for row, tokens in enumerate(answers(batch)):
        whole = torch.cat([prompt(prompts, row // samples), tokens])
        states = hidden_states(target, whole)
        features = torch.cat([states[3], states[0]], dim=-1)[None]
        with torch.no_grad():
            expected = draft.context_keys_values(draft.context(features), torch.arange(len(whole))[None])
        for step in checked:
            for mine, theirs in zip(step[row], expected, strict=True):
                torch.testing.assert_close(mine, theirs[0, : len(mine)], atol=5e-4, rtol=1e-3)
    assert len(checked) >= 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_with_their_hooks_within_a_checkpoint(reentrant):
    """As in transformers before 5.24, which checkpoints a layer's forward alone."""
    layers, seen, x = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), [], torch.randn(1, 2, 4, requires_grad=True)
    with FeatureCapture((2, 0), lambda features: seen.append(features)).on(layers):
        for _ in range(2):
            hidden = x
            for layer in layers:
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
            hidden.sum().backward()
    assert len(seen) == 2 and torch.equal(*seen)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
def test_a_policys_own_steps_are_watched(reentrant):
    """Its backward passes, within, run checkpointed layers once more, the last first; no graph outlives its pass."""
    target = tiny_model().requires_grad_(True).train()
    if reentrant is not None:
        target.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        target.enable_input_require_grads()
    seen, tokens = [], torch.arange(3, 14)[None]
    capture = FeatureCapture((3, 1), lambda features: seen.append(features))
    with capture.on(text_model(target).layers):
        for _ in range(2):
            target(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert len(seen) == 2 and torch.equal(*seen)
    assert not any(features.requires_grad for features in seen)
