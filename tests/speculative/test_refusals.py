# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What speculation is not built for is refused by name, and what it holds is reported and given back."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness import greedy, rollout_of
from models import LoraLinear, Tokenizer, ragged_prompts, tiny_model
from mtp_cases import mtp_rollout
from speculative_cases import draft_config, speculative_rollout, tiny_draft

from deepspeed_hybrid import HybridEngineRollout, HybridEngineRolloutConfig
from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.generation.arena import PLAIN
from deepspeed_hybrid.speculation import draft_cache_dtype, speculation_obstacle
from deepspeed_hybrid.speculative.draft import DFlashDraft


@pytest.fixture
def target():
    return tiny_model()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(speculative="eagle", draft_model="x"), "speculative must be None or one of .*'dflash'.*got 'eagle'"),
        (dict(speculative="MTP", draft_model="x"), "speculative must be None or one of .*'mtp'.*got 'MTP'"),
        (dict(speculative="dflash"), "draft_model must be set"),
        (dict(speculative="mtp"), "draft_model must be set"),
        (dict(draft_model="x"), "draft_model must be None where speculative is None; got 'x'"),
        (dict(draft_block_size=4), "draft_block_size must be None where speculative is None"),
        (dict(speculative="dflash", draft_model="x", draft_block_size=1), "draft_block_size must be None, an integer"),
        (dict(speculative="dflash", draft_model="x", draft_block_size=True), "draft_block_size"),
        (dict(draft_side_stream=True), "draft_side_stream must be False where speculative is None"),
        (dict(draft_kv_cache_dtype="fp8_e4m3"), "draft_kv_cache_dtype must be None where speculative is None"),
        (
            dict(speculative="mtp", draft_model="x", draft_side_stream=True),
            "draft_side_stream must be False with speculative='mtp'; got True",
        ),
        (
            dict(speculative="mtp", draft_model="x", draft_kv_cache_dtype="fp8_e4m3"),
            "draft_kv_cache_dtype must be None with speculative='mtp'; got 'fp8_e4m3'",
        ),
        (dict(speculative="dflash", draft_model="x", draft_kv_cache_dtype="int4"), "draft_kv_cache_dtype.*got 'int4'"),
    ],
)
def test_settings(options, named):
    with pytest.raises(ValueError, match=named):
        HybridEngineRolloutConfig(**options)


@pytest.mark.parametrize(
    ("draft", "named"),
    [
        (lambda target: "/nowhere", "draft_model must be a folder with a config.json.*'/nowhere'"),
        (lambda target: torch.nn.Linear(2, 2), "draft_model must be a folder or a DFlashDraft; got Linear"),
        (lambda target: DFlashDraft(draft_config(target, hidden_size=64)), "its hidden_size is 64, the model has 128"),
        (lambda target: tiny_draft(target, vocab_size=300), "its vocab_size is 300, the model has 256"),
        (lambda target: tiny_draft(target, num_target_layers=5), "its num_target_layers is 5, the model has 4"),
        (
            lambda target: tiny_draft(target, target_layer_ids=(4,)),
            r"target_layer_ids are \[4\], the model has 4 layers",
        ),
        (lambda target: tiny_draft(target, mask_token_id=256), "mask_token_id is 256, the model has 256 embeddings"),
    ],
)
def test_drafts_of_another_kind_or_model(target, draft, named):
    with pytest.raises(ValueError, match=named):
        rollout_of(target, speculative="dflash", draft_model=draft(target))


def test_a_block_longer_than_the_drafts(target):
    with pytest.raises(ValueError, match="draft_block_size must be at most the draft's own 8; got 9"):
        rollout_of(target, speculative="dflash", draft_model=tiny_draft(target), draft_block_size=9)
    rollout = speculative_rollout(target, draft_block_size=3)
    greedy(rollout, ragged_prompts([3]), 4)
    assert set(rollout.get_last_profile()["speculation"]["steps"]) == {3}


def test_a_block_longer_than_what_is_not_read_ahead(target):
    draft = tiny_draft(target, block_size=65)
    with pytest.raises(ValueError, match="draft_block_size must be at most 64 with batch_invariant=True; got 65"):
        rollout_of(target, speculative="dflash", draft_model=draft, batch_invariant=True)
    rollout_of(target, speculative="dflash", draft_model=draft, batch_invariant=True, draft_block_size=64)
    rollout_of(target, speculative="dflash", draft_model=draft)


@pytest.mark.parametrize("options", [dict(use_segki=False), dict(segki_kernel="fused_glu")], ids=str)
def test_layers_that_are_no_chains(target, options):
    with pytest.raises(RuntimeError, match="speculative='dflash' cannot be honoured: .* is no decode chain"):
        rollout_of(target, speculative="dflash", draft_model=tiny_draft(target), **options)


def test_a_family_that_is_no_chain():
    target = tiny_model("qwen3_next")
    with pytest.raises(RuntimeError, match="speculative='dflash' cannot be honoured: layer 0 is no decode chain"):
        rollout_of(target, speculative="dflash", draft_model=tiny_draft(target))


def test_a_layer_that_stops_to_be_a_chain_later(target):
    rollout = speculative_rollout(target)
    greedy(rollout, ragged_prompts([3]), 4)
    layer = text_model(target).layers[1].mlp
    layer.down_proj = LoraLinear(layer.down_proj)
    with pytest.raises(RuntimeError, match="speculative='dflash' cannot be honoured: layer 1"):
        greedy(rollout, ragged_prompts([3]), 4)


@pytest.mark.parametrize("make", [speculative_rollout, mtp_rollout])
def test_a_layer_that_is_taken_away_later(target, make):
    rollout = make(target)
    decoder, config = text_model(target), text_model(target).config
    decoder.layers = decoder.layers[:3]
    config.num_hidden_layers, config.layer_types = 3, config.layer_types[:3]
    with pytest.raises(RuntimeError, match="draft_model reads from layer 3, and the model has 3 layers now"):
        greedy(rollout, ragged_prompts([3]), 4)


@pytest.mark.parametrize("make", [speculative_rollout, mtp_rollout])
def test_a_draft_that_is_changed_later(target, make):
    """What serves goes on as it was."""
    rollout = make(target)
    source = rollout._speculation.drafter.source
    shape = tuple(source.fc.weight.shape)
    source.fc = torch.nn.Linear(1, 1, bias=False)
    with pytest.raises(RuntimeError, match=f"fc.weight was {re.escape(str(shape))} when .* is \\(1, 1\\) now"):
        rollout.sync_weights(1)
    greedy(rollout, ragged_prompts([3]), 4)
    source.norm = torch.nn.Identity()
    source.fc = torch.nn.Linear(*shape[::-1], bias=False)
    with pytest.raises(RuntimeError, match="the shape of norm.weight was .* and is None now"):
        rollout.sync_weights(2)


def test_graph_capture_that_is_asked_for(target):
    with pytest.raises(RuntimeError, match="use_graph_capture=True cannot be honoured"):
        rollout_of(target, speculative="dflash", draft_model=tiny_draft(target), use_graph_capture=True)


def test_a_model_split_over_processes(target):
    rollout = rollout_of(target)
    assert speculation_obstacle(rollout._paths) is None
    shared = replace(rollout._paths, peers=SimpleNamespace(group="peers", count=2))
    assert speculation_obstacle(shared) == "2 ranks share the model (tensor parallel)"


@pytest.mark.parametrize(
    ("part", "base", "named"),
    [
        (lambda target: text_model(target).embed_tokens, torch.nn.Embedding, "embed_tokens is a Own, not"),
        (lambda target: target.lm_head, torch.nn.Linear, "the head is a Own, not"),
    ],
    ids=["embedding", "head"],
)
def test_an_embedding_and_a_head_that_do_more(target, part, base, named):
    """A drafter reads their weights alone."""
    part(target).__class__ = type("Own", (base,), {})
    with pytest.raises(RuntimeError, match=f"speculative='dflash' cannot be honoured: {named}"):
        rollout_of(target, speculative="dflash", draft_model=tiny_draft(target))


def test_fp8_on_a_card_without_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    with pytest.raises(RuntimeError, match="draft_kv_cache_dtype='fp8_e4m3' cannot.*an A100 has .* 8.0, and .* 8.9"):
        draft_cache_dtype("fp8_e4m3", torch.device("cuda"))
    assert draft_cache_dtype(None, torch.device("cuda")) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert draft_cache_dtype("fp8_e4m3", torch.device("cuda")) == torch.float8_e4m3fn


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_partitioned_by_zero_3(make_engine):
    target = tiny_model()
    draft = tiny_draft(target)
    engine = make_engine(target, stage=3)
    config = HybridEngineRolloutConfig(speculative="dflash", draft_model=draft)
    with pytest.raises(RuntimeError, match=r"speculative='dflash' cannot be honoured: .*ZeRO stage 3"):
        HybridEngineRollout(engine, Tokenizer(), config)


# -------------------------------------------------------------------------------------------------------------- memory


def test_what_it_holds_is_reported_and_given_back(target):
    rollout = speculative_rollout(target)
    greedy(rollout, ragged_prompts([3, 9]), 4)
    report, cache = rollout.memory_report(), rollout._speculation.drafter.cache
    assert report["draft_keys"] == cache.keys.nbytes and report["draft_values"] == cache.values.nbytes
    assert report["draft_weights"] == rollout._speculation.drafter.weight_bytes > 0
    slots, capacity = cache.slots, rollout._arena.cache.capacity
    assert rollout._speculation.cache_bytes(slots, capacity) == cache.keys.nbytes + cache.values.nbytes
    rollout.release_memory()
    assert rollout._speculation.drafter.cache is None
    assert "draft_keys" not in rollout.memory_report()
    greedy(rollout, ragged_prompts([3, 9]), 4)
    assert "draft_keys" not in rollout_of(target).memory_report()


def test_what_a_call_needs_is_known_before(target):
    """The draft's share of a prompt that is kept, and logits of all tokens of a block."""
    rollout, plain = speculative_rollout(target), rollout_of(target)
    greedy(rollout, ragged_prompts([3, 9]), 4)
    arena = rollout._arena
    assert arena.slot_bytes(arena.cache.capacity) == sum(buffer[0].nbytes for buffer in arena.cache.buffers())
    logits = 4 * 7 * target.config.vocab_size * 4  # lanes, drafts of a block, fp32
    assert arena._logits_bytes(4, PLAIN) - plain._arena._logits_bytes(4, PLAIN) == logits


def test_the_model_is_as_it_was(target):
    draft = tiny_draft(target)
    rollout = speculative_rollout(target, draft)
    weights = {name: weight.clone() for name, weight in draft.state_dict().items()}
    greedy(rollout, ragged_prompts([3, 9]), 6)
    assert not any(layer._forward_hooks for layer in text_model(target).layers)
    assert not any("forward" in module.__dict__ for module in target.modules())
    assert all(torch.equal(weight, draft.state_dict()[name]) for name, weight in weights.items())


@pytest.mark.parametrize("make", [speculative_rollout, mtp_rollout])
def test_a_model_that_was_cast_since(target, make):
    """The serving copy, its cache and its stacks follow."""
    rollout = make(target)
    greedy(rollout, ragged_prompts([3, 9]), 4)
    target.to(torch.bfloat16)
    batch = greedy(rollout, ragged_prompts([3, 9]), 8)
    assert rollout._speculation.drafter.cache.keys.dtype == torch.bfloat16
    assert batch.response_lengths.tolist() == [8, 8]
    assert "speculative decoding: on" in rollout.describe()
