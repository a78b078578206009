# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Tiny MTP heads, and the oracle: transformers' own decoder layer over whole sequences, without any cache."""

import copy
from types import SimpleNamespace

import torch
from harness import answers, greedy, prompt, rollout_of
from models import tiny_model
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from deepspeed_hybrid import HybridEngineRollout
from deepspeed_hybrid.compat import text_config, text_model
from deepspeed_hybrid.speculative.mtp import MtpDraft
from deepspeed_hybrid.speculative.mtp_config import MtpConfig
from deepspeed_hybrid.speculative.mtp_train import MtpTrainer
from deepspeed_hybrid.speculative.train import Answered


def tiny_target(family: str = "qwen3_5") -> nn.Module:
    """A last norm that does something: one that only scales would not be missed before a head's own norm."""
    target = tiny_model(family)
    torch.manual_seed(1)
    with torch.no_grad():
        text_model(target).norm.weight.uniform_(-0.7, 0.7)
    return target


def tiny_mtp(target: nn.Module, seed: int = 0, **settings) -> MtpDraft:
    """Random weights, norms too, so that leaving one out shows. Its guesses are almost always wrong."""
    torch.manual_seed(seed)
    draft = MtpDraft(MtpConfig.from_json({**text_config(target).to_dict(), **settings})).requires_grad_(False)
    for parameter in draft.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(-0.5, 0.5)
    return draft.to(text_model(target).embed_tokens.weight.device)


def taught_mtp(target: nn.Module, prompts, new_tokens: int, steps: int = 30) -> MtpDraft:
    """A head that has the model's greedy answers to these prompts by heart."""
    draft = tiny_mtp(target)
    said = Answered.of(greedy(rollout_of(target), prompts, new_tokens))
    rows = Answered(said.ids.to(draft.fc.weight.device), said.answered.to(draft.fc.weight.device))
    trainer = MtpTrainer(target, draft, learning_rate=3e-3, anchors=16)
    features = trainer.features(rows)
    for _ in range(steps):
        trainer.update(rows, features)
    return draft.requires_grad_(False)


def mtp_rollout(target: nn.Module, draft=None, controller=None, **options) -> HybridEngineRollout:
    """A rollout over a bare model.

    Args:
        draft: a head, or where it is; None: one of random weights.
        controller: of block lengths, up to ``draft_block_size``; None: always that.
    """
    draft = tiny_mtp(target) if draft is None else draft
    rollout = rollout_of(target, speculative="mtp", draft_model=draft, enable_profiling=True, **options)
    rollout._speculation.controller = controller or rollout._speculation.controller
    return rollout


class Oracle:
    """An MTP head in transformers' own modules. Positions are those of the hidden states, one less than ours."""

    def __init__(self, target: nn.Module, draft: MtpDraft):
        config = copy.deepcopy(text_config(target))
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        config._attn_implementation = "eager"
        weights, eps = draft.state_dict(), config.rms_norm_eps
        self.target, self.fc = target, weights["fc.weight"]
        self.layer = theirs.Qwen3_5DecoderLayer(config, 0).eval()
        own = {name.removeprefix("layers.0."): part for name, part in weights.items() if name.startswith("layers.0.")}
        self.layer.load_state_dict(own)
        self.rotary = theirs.Qwen3_5TextRotaryEmbedding(config)
        self.norms = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norms[name] = theirs.Qwen3_5RMSNorm(config.hidden_size, eps)
            self.norms[name].load_state_dict({"weight": weights[f"{name}.weight"]})

    @torch.no_grad()
    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """[S, D] of the target behind its last norm, for tokens [S]."""
        return self.target(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states[-1][0]

    @torch.no_grad()
    def passes(self, ids: torch.Tensor, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """What each of a chain's passes gives, [count, D].

        Args:
            ids: [S + count - 1], the last ``count`` of which are the anchor and the guesses behind it.
            hidden: [S - 1, D] of the target, of all tokens before the anchor.
        """
        embeddings = text_model(self.target).embed_tokens(ids)
        states, outputs = list(hidden), []
        for _ in range(count):
            known = self.norms["pre_fc_norm_hidden"](torch.stack(states))
            read = self.norms["pre_fc_norm_embedding"](embeddings[1 : len(states) + 1])
            x = torch.cat([read, known], dim=-1) @ self.fc.T
            positions = torch.arange(len(x)).expand(3, 1, -1)  # one axis for each of an image's
            mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
            out = self.layer(x[None], position_embeddings=self.rotary(x[None], positions), attention_mask=mask)
            outputs.append(self.norms["norm"](out[0, -1]))
            states.append(outputs[-1])
        return torch.stack(outputs)


def watch_proposals(rollout: HybridEngineRollout) -> list[SimpleNamespace]:
    """Every proposal from now on: of each lane its row, position, the tokens it has room for, outputs [T - 1, D] and
    guesses [T - 1]."""
    drafter, seen = rollout._speculation.drafter, []
    propose = drafter.propose

    def watched(state, tokens, kv_length):
        outputs = []
        handle = drafter.draft.norm.register_forward_hook(lambda *args: outputs.append(args[2]))
        guesses = propose(state, tokens, kv_length)
        handle.remove()
        facts = (state.request, state.sample, state.position, state.limit - state.length, state.parked)
        rows, samples, position, room, parked = (fact.tolist() for fact in facts)
        seen.append(SimpleNamespace(requests=rows, samples=samples, position=position, room=room, parked=parked))
        seen[-1].outputs, seen[-1].guesses = torch.cat(outputs, dim=1), guesses.clone()
        return guesses

    drafter.propose = watched
    return seen


def assert_as_by_the_oracle(seen: list[SimpleNamespace], oracle: Oracle, prompts, batch, samples: int) -> int:
    """All proposals, as far as there is room for their tokens, against whole sequences; returns how many rows there
    were."""
    said = [torch.cat([prompt(prompts, row // samples), tokens]) for row, tokens in enumerate(answers(batch))]
    hidden = [oracle.hidden(ids) for ids in said]
    head, checked = oracle.target.get_output_embeddings(), 0
    for one in seen:
        for lane, parked in enumerate(one.parked):
            if parked:
                continue
            row, position, room = one.requests[lane] * samples + one.samples[lane], one.position[lane], one.room[lane]
            outputs, guesses = one.outputs[lane, :room], one.guesses[lane, :room]
            ids = torch.cat([said[row][: position + 1], guesses])
            expected = oracle.passes(ids, hidden[row][:position], len(guesses))
            torch.testing.assert_close(outputs, expected, atol=1e-3, rtol=1e-3)
            logits = head(expected)
            best = logits.gather(1, guesses[:, None])[:, 0]
            assert (best >= logits.amax(dim=1) - 1e-2).all()
            checked += 1
    return checked
