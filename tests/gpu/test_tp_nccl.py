# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Two ranks on a GPU each share a model through NCCL, and what goes between them is part of a captured decode step."""

import copy

import pytest
import torch
from models import engine_of, torch_scans
from ranks import RANKS, Ranks
from tensor_parallel_cases import (
    FAMILIES,
    SAMPLINGS,
    answer,
    counted,
    engine_over,
    first_difference,
    plain,
    rollout_over,
    train,
    whole_weights,
)

from deepspeed_hybrid.autotp import is_sharded
from deepspeed_hybrid.tools.breakdown import step_breakdown

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < RANKS,
        reason=f"needs {RANKS} CUDA devices, one a rank; {torch.cuda.device_count()} are visible",
    ),
    pytest.mark.xdist_group("two_ranks"),
]

HERE = "gpu.test_tp_nccl"
COMPILING_SECONDS = 180  # of a call that compiles and tunes kernels; others take SECONDS at most
SECONDS = 60
CYCLES, WARM_CYCLES = 30, 5
GDN_LAYERS, LAYERS, ATTENTION_LAYERS = 3, 4, 1  # of the tiny Qwen3.5


@pytest.fixture(scope="module")
def nccl():
    pair = Ranks("nccl")
    yield pair
    pair.stop()


def call(ranks: Ranks, function, timeout: float = SECONDS, **arguments):
    """What a function of this file returns on both ranks, which must be the same."""
    first, second = ranks.run(f"{HERE}:{function.__name__}", timeout, **arguments)
    assert first == second, "ranks differ"
    return first


def shared(family: str, **sizes):
    """The whole model, an engine whose layers ranks share, and a captured rollout over that."""
    whole = FAMILIES[family](**sizes).cuda()
    engine = engine_over(copy.deepcopy(whole).train())
    return whole, engine, rollout_over(engine, use_graph_capture=True, enable_profiling=True)


def same_as_whole(family: str, samplings: list[str], new_tokens: int, sizes: dict) -> dict:
    """Asserts that captured steps of a shared model answer as those of the whole one do, at first and again."""
    whole, _, rollout = shared(family, **sizes)
    alone = rollout_over(engine_of(whole), use_graph_capture=True)
    tokens = []
    for name in samplings:
        asked = {**SAMPLINGS[name], "n_samples_per_prompt": 1 if name == "greedy" else 2}
        expected = answer(alone, new_tokens, **asked)
        for what in ("captured", "replayed"):
            batch = answer(rollout, new_tokens, **asked)
            same = torch.equal(batch.input_ids, expected.input_ids)
            assert same, f"{name}, {what}: {first_difference(batch, expected)}"
            off = (batch.logprobs - expected.logprobs).abs()
            assert off.mean() < 1e-4 and off.max() < 5e-3, f"{name}: logprobs are off by up to {off.max()}"
        tokens.append(batch.input_ids.tolist())
    profile = rollout.get_last_profile()
    off = [name for name in profile if name.endswith("_off")]
    text = rollout.describe().splitlines()
    shared_heads, chains = (sum(words in line for line in text) for words in ("rank's heads", "one chain of ops"))
    on = "graph capture: on" in text and "use_graph_capture_off" not in off
    sums = rollout._injection.sums
    assert sums.obstacle is None and len(sums.shapes) == len({shape[0] for shape in sums.shapes}), sums.obstacle
    prompts = profile["prefill_graph_captures"] > 0
    return dict(
        tokens=tokens, captures=profile["graph_captures"], on=on, prompts=prompts, heads=shared_heads, chains=chains
    )


MODELS = {
    "hybrid": dict(family="hybrid", samplings=["greedy", "sampled", "top_p", "all at once"], new_tokens=128),
    "plain": dict(family="plain", samplings=["greedy", "all at once"], new_tokens=128),
    "several chunks": dict(family="plain", samplings=["sampled", "all at once"], new_tokens=24, vocab=2501),
}


@pytest.mark.parametrize("name", MODELS)
def test_captured_steps_answer_as_the_whole_model(nccl, name):
    """fp32 without TF32; one capture for each kind of sampling."""
    case = dict(MODELS[name])
    sizes = {"vocab_size": case.pop("vocab")} if "vocab" in case else {}
    outcome = call(nccl, same_as_whole, COMPILING_SECONDS, **case, sizes=sizes)
    assert outcome["captures"] == len(case["samplings"])
    layers = (GDN_LAYERS, LAYERS) if case["family"] == "hybrid" else (0, 2)
    assert outcome["on"] and outcome["prompts"] and (outcome["heads"], outcome["chains"]) == layers


def collectives_of_a_step() -> dict:
    """What the host sends between ranks in short and in longer calls, and NCCL's kernels of one step."""
    _, _, rollout = shared("hybrid")
    for _ in range(2):  # the second captures the prompts, too
        answer(rollout, 4, temperature=0.0)
    dispatched = []
    for new_tokens in (4, 12):
        with counted() as collectives:
            answer(rollout, new_tokens, temperature=0.0)
        dispatched.append(collectives.counts)
    shares = step_breakdown(lambda new_tokens: answer(rollout, new_tokens, temperature=0.0))
    kernels = next(share.count for share in shares if share.kind == "collective")
    return dict(dispatched=dispatched, kernels=kernels)


def test_collectives_are_in_the_graph(nccl):
    """The host sends none for a step, and every replay runs all: sums behind mixers and MLPs, and a choice."""
    outcome = call(nccl, collectives_of_a_step, COMPILING_SECONDS)
    few, many = outcome["dispatched"]
    assert few == many
    assert outcome["kernels"] == GDN_LAYERS + ATTENTION_LAYERS + LAYERS + 1


def following_weights(family: str, steps: int) -> list:
    """Asserts that one capture serves the weights of every step."""
    whole, engine, rollout = shared(family)
    alone = rollout_over(engine_of(whole), use_graph_capture=True)
    answers = []
    for step in range(steps):
        if step:
            with torch_scans(engine.module):
                train(engine, step)
            rollout.sync_segki_weights()
        batch = answer(rollout, 32, temperature=0.0)
        whole.load_state_dict(whole_weights(engine.module))
        alone.sync_segki_weights()
        expected = answer(alone, 32, temperature=0.0)
        same = torch.equal(batch.input_ids, expected.input_ids)
        assert same, f"step {step}: {first_difference(batch, expected)}"
        answers.append(batch.input_ids.tolist())
    assert rollout.get_last_profile()["graph_captures"] == 1
    return answers


@pytest.mark.parametrize("family", ["hybrid", "plain"])
def test_replays_follow_optimizer_steps(nccl, family):
    """ZeRO-1 beneath."""
    answers = call(nccl, following_weights, COMPILING_SECONDS, family=family, steps=4)
    assert all(before != after for before, after in zip(answers, answers[1:], strict=False))


def cycles(count: int) -> dict:
    """Of generation, an optimizer step and a sync."""
    _, engine, rollout = shared("hybrid")
    allocated, captures, tokens = [], [], []
    for step in range(count):
        tokens.append(answer(rollout, 8, temperature=1.0).input_ids.tolist())
        with torch_scans(engine.module):
            train(engine, step)
        rollout.sync_segki_weights()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
        captures.append(rollout.get_last_profile()["graph_captures"])
    growth = max(0, allocated[-1] - allocated[WARM_CYCLES])  # ranks have unlike weights, as many bytes or not
    return dict(growth=growth, captures=captures, tokens=[tokens[0], tokens[-1]])


def test_cycles_neither_hang_nor_grow(nccl):
    outcome = call(nccl, cycles, COMPILING_SECONDS, count=CYCLES)
    assert set(outcome["captures"]) == {1}
    assert outcome["growth"] == 0
    assert outcome["tokens"][0] != outcome["tokens"][1]


def unlike_graphs() -> list:
    """One rank has given its graphs up, which only it knows of."""
    _, _, rollout = shared("plain")
    before = answer(rollout, 20, temperature=0.0)
    if torch.distributed.get_rank() == 1:
        rollout._arena.drop_graphs()
    after = answer(rollout, 20, temperature=0.0)
    assert torch.equal(before.input_ids, after.input_ids), first_difference(after, before)
    return [rollout.get_last_profile()["graph_captures"]]


def test_ranks_capture_together(nccl):
    assert call(nccl, unlike_graphs) == [2]


def refused_backend() -> list[str]:
    engine = engine_over(plain().cuda().train())
    gloo = torch.distributed.new_group(backend="gloo")
    for module in filter(is_sharded, engine.module.modules()):
        module.mp_group = gloo
    with pytest.raises(RuntimeError) as refused:
        rollout_over(engine, use_graph_capture=True)
    return [str(refused.value), rollout_over(engine).describe()]


def test_backend_that_cannot_be_captured_is_refused_by_name(nccl):
    """gloo between GPUs; left to itself, capture is off and says why."""
    message, described = call(nccl, refused_backend)
    reason = "collective operations of the backend 'gloo' cannot be captured"
    assert message == f"use_graph_capture=True cannot be honoured: {reason}"
    assert f"use_graph_capture is off: {reason}" in described
