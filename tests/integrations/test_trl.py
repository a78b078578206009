# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""TRL's GRPOTrainer trains on rollouts of ours: what it gets, when weights are synced, and what is refused."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed_hybrid import SamplingConfig

MODULE = "deepspeed_hybrid.integrations.trl"
RUNS = Path(__file__).with_name("trl_runs.py")
MOST_DIFFERENCE = 1e-3  # of logprobs, in fp32
GAP = "sampling/sampling_logp_difference/max"

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl is not installed (it wants Python 3.11)"
)


def test_without_trl_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(ImportError, match=r"needs trl.*pip install 'deepspeed_hybrid\[trl\]'"):
        importlib.import_module(MODULE)


# -------------------------------------------------------------------------------------------------------- what it asks


@pytest.fixture
def integration():
    return importlib.import_module(MODULE)


def trainer_of(**options) -> SimpleNamespace:
    """What is read of a trainer: GRPOConfig's values, most of them also as its own."""
    shared = dict(
        max_completion_length=32,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=None,
        repetition_penalty=1.1,
        generation_kwargs=None,
        loss_type="dapo",
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="sequence_mask",
        cache_implementation=None,
        use_vllm=False,
    )
    args = {**shared, **options}
    return SimpleNamespace(
        **args, args=SimpleNamespace(**args), eos_token_ids=[2, 7], _tokenize_prompts=None, _tokenizer=None
    )


@needs_trl
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, {}, id="config"),
        pytest.param({"min_p": 0.05, "top_k": 0}, {"min_p": 0.05, "top_k": 0}, id="min-p"),
        pytest.param(
            {"generation_kwargs": {"temperature": 0.3, "max_new_tokens": 5, "continuous_batch_size": 4}},
            {"temperature": 0.3, "max_new_tokens": 5, "continuous_batch_size": 4},
            id="overruled",
        ),
        pytest.param({"generation_kwargs": {"do_sample": False}}, {"temperature": 0.0}, id="greedy"),
    ],
)
def test_sampling_is_what_grpo_config_asks_for(integration, options, expected):
    wanted = dict(
        max_new_tokens=32,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.0,
        repetition_penalty=1.1,
        stop_token_ids=[2, 7],
        n_samples_per_prompt=8,
        seed=5,
    )
    assert integration.sampling_of(trainer_of(**options), 8, 5) == SamplingConfig(**{**wanted, **expected})


@needs_trl
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"generation_kwargs": {"suppress_tokens": [3], "top_k": 5}}, "generation_kwargs .*suppress_tokens"),
        ({"generation_kwargs": {"seed": 3}}, "generation_kwargs .*seed"),
        ({"max_completion_length": None}, "max_completion_length"),
        ({"use_vllm": True}, "use_vllm must be False"),
        ({"cache_implementation": "static"}, "cache_implementation must be None"),
        ({"vllm_structured_outputs_regex": "a*"}, "vllm_structured_outputs_regex must be None"),
        ({"loss_type": "vespo"}, "vllm_importance_sampling_mode"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_that_would_be_dropped_are_refused_by_name(integration, options, named):
    trainer = trainer_of(**options)
    with pytest.raises(ValueError, match=named):
        integration.hybrid_rollout()(["text"], trainer)
    assert not hasattr(trainer, "vllm_generation")


@needs_trl
def test_another_trainer_is_refused(integration):
    trainer = trainer_of()
    del trainer._tokenize_prompts
    with pytest.raises(RuntimeError, match="SimpleNamespace has no _tokenize_prompts"):
        integration.hybrid_rollout()(["text"], trainer)


@needs_trl
def test_a_field_of_the_config_is_refused_at_once(integration):
    with pytest.raises(ValueError, match="segki_kernel"):
        integration.hybrid_rollout(SimpleNamespace(segki_kernel="some"))


@needs_trl
@pytest.mark.parametrize(
    ("rows", "prompts", "samples"),
    [("aabb", "ab", 2), ("aaaaab", "aaaaab", 1), ("aaaabb", "aab", 2), ("aaaaaa", "a", 6), ("aba", "aba", 1)],
)
def test_repeats_become_samples_in_the_same_order(integration, rows, prompts, samples):
    assert integration.without_repeats([[row] for row in rows]) == ([[row] for row in prompts], samples)


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("trl") / "runs.json"
    launcher = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    result = subprocess.run([sys.executable, RUNS, out], env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return {**json.loads(out.read_text()), "printed": result.stdout}


in_one_worker = pytest.mark.xdist_group("trl")


@needs_trl
@in_one_worker
@pytest.mark.slow
def test_the_trainer_learns_from_our_rollouts(runs):
    seen = runs["learning"]
    assert seen["stage"] == 2
    rewards = [row["reward"] for row in seen["log"]]
    assert sum(rewards[-3:]) > 5 * sum(rewards[:3])
    assert all(row[GAP] < MOST_DIFFERENCE for row in seen["log"])
    assert all(abs(row["sampling/importance_sampling_ratio/mean"] - 1) < MOST_DIFFERENCE for row in seen["log"])
    # Every completion that was rewarded came from here.
    assert seen["rewarded"] == [answer for call in seen["calls"] for answer in call["answers"]]
    assert [(call["prompts"], call["samples"]) for call in seen["calls"]] == [(8, 16)] * 12


@needs_trl
@in_one_worker
def test_the_trainers_dressing_of_the_model_costs_no_fast_path(runs):
    """Its fused head and activation checkpointing are on the model between generations, and off for us."""
    seen = runs["learning"]
    assert seen["fused_head"] and seen["changes"] == 0
    table, _, rest = seen["plan"].partition("graph capture")
    assert "one chain of ops" in table and "left alone  " not in table and rest


@needs_trl
@in_one_worker
def test_weights_are_synced_once_after_a_step(runs):
    assert runs["learning"]["syncs"] == list(range(1, 12))
    assert runs["repeating"]["syncs"] == [2]
    assert runs["accumulating"]["syncs"] == [1, 2]


@needs_trl
@in_one_worker
def test_every_generation_has_a_seed_of_its_own(runs):
    calls = runs["accumulating"]["calls"]
    assert [call["samples"] for call in calls] == [16, 16, 16, 16, 4]
    assert len({call["seed"] for call in calls}) == 5
    seeds = [call["seed"] for call in runs["learning"]["calls"]]
    assert len(set(seeds)) == 12 and calls[0]["seed"] == seeds[0]


@needs_trl
@in_one_worker
def test_correction_is_the_trainers_choice(runs):
    (row,) = runs["uncorrected"]["log"]
    assert GAP not in row and len(runs["uncorrected"]["calls"]) == 1


@needs_trl
@in_one_worker
def test_later_turns_have_the_form_that_the_trainer_reads(runs):
    prompts, completions, logprobs, ids = runs["learning"]["turn"]
    assert prompts == [[1, 5, 6], [1, 7]] and ids is None
    assert [len(row) for row in completions] == [len(row) for row in logprobs]
    assert all(len(token) == 1 and token[0] <= 0 for row in logprobs for token in row)


@needs_trl
@in_one_worker
def test_the_example_runs_under_zero_3(runs):
    (line,) = [line for line in runs["printed"].splitlines() if line.startswith("reward ")]
    assert float(line.rpartition(" ")[2]) < MOST_DIFFERENCE
    assert "gathered from ZeRO stage 3" in runs["printed"]
