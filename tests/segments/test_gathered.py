# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""ZeRO-3: rollouts on gathered copies follow every synced step and refuse stale ones; training knows nothing of it."""

import copy

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from harness import assert_same_answers, greedy, prompt
from models import LoraLinear, Tokenizer, engine_of, ragged_prompts, solo, tiny_model

from deepspeed_hybrid import HybridEngineRollout, HybridEngineRolloutConfig, RolloutRequest, SamplingConfig
from deepspeed_hybrid.segments.gathered import GatheredWeights

PROMPTS, NEW_TOKENS, STEPS = [3, 7, 5], 6, 5
# Some parameters partitioned all the time and some kept whole between steps, as in a large model.
ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 1000}


@pytest.fixture(autouse=True)
def own_linear(monkeypatch):
    """DeepSpeed replaces the process's linear function when ZeRO-3 begins, and leaves it so."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)


@pytest.fixture
def zero3(make_engine):
    def make(model: torch.nn.Module, **config):
        return make_engine(model, zero_optimization=ZERO3, **config)

    return make


def rollout_in(engine, use_segki: bool | None = True) -> HybridEngineRollout:
    return HybridEngineRollout(engine, Tokenizer(), HybridEngineRolloutConfig(use_segki=use_segki))


def tied_model() -> torch.nn.Module:
    """One weight for the embedding and the head."""
    model = tiny_model("qwen3")
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def adapted_model() -> torch.nn.Module:
    model = tiny_model("qwen3_5")
    for layer in model.model.layers[:2]:
        layer.mlp.gate_proj = LoraLinear(layer.mlp.gate_proj)
    return model


MODELS = {
    "qwen3_5": tiny_model,
    "qwen3_next": lambda: tiny_model("qwen3_next"),
    "qwen2_5, biases": lambda: tiny_model("qwen2_5"),
    "tied": tied_model,
    "adapters": adapted_model,
}


def training_batch(step: int) -> dict[str, torch.Tensor]:
    ids, mask = ragged_prompts([20, 13], seed=40 + step)
    return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False)


def train_step(engine, step: int) -> float:
    loss = engine(**training_batch(step)).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def answer(rollout: HybridEngineRollout, **options):
    return greedy(rollout, ragged_prompts(PROMPTS), NEW_TOKENS, **options)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def oracles(plain: torch.nn.Module, model: torch.nn.Module) -> list:
    """Hugging Face's answers with the weights of ``model``, by a model that no engine knows."""
    plain.load_state_dict(weights_of(model), strict=False)
    return [solo(plain.eval(), prompt(ragged_prompts(PROMPTS), row), NEW_TOKENS) for row in range(len(PROMPTS))]


def bytes_of(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def traces(engine) -> dict:
    """What generation could leave behind, of modules and of DeepSpeed's parameters; tables by identity."""
    model = engine.module
    tables = ("_parameters", "_forward_hooks", "_forward_pre_hooks")
    return {
        "tables": [id(module.__dict__[name]) for module in model.modules() for name in tables],
        "hooks": [[*module._forward_hooks, *module._forward_pre_hooks] for module in model.modules()],
        "attributes": [sorted(module.__dict__) for module in model.modules()],
        "external": [list(module._external_params) for module in model.modules()],
        "modes": [module.training for module in model.modules()],
        "parameters": [
            (id(one), one.ds_status, one.data_ptr(), one.shape, one.ds_tensor.data_ptr(), one.ds_persist, one._version)
            for one in model.parameters()
        ],
    }


# ------------------------------------------------------------------------------------------------------------ outputs


@pytest.mark.parametrize("name", MODELS)
def test_every_synced_step_is_served_from_copies_that_stay(zero3, name):
    plain = MODELS[name]()
    model = copy.deepcopy(plain).train()
    size = bytes_of(plain)
    engine = zero3(model)
    rollouts = [rollout_in(engine, use_segki) for use_segki in (True, False)]
    for rollout in rollouts:
        assert "packed" in rollout.describe() and rollout.memory_report()["packed_weights"] == 0
    batches, addresses = [], []
    for step in range((STEPS if name == "qwen3_5" else 2) + 1):
        if step:
            train_step(engine, step)
        expected = oracles(plain, model)
        for rollout in rollouts:
            if step:  # the first generate() gathers by itself
                report = rollout.sync_segki_weights()
                assert set(report.modes.values()) == {"packed"} and report.bytes_copied == size and report.seconds > 0
            batches.append(answer(rollout))
            assert_same_answers(batches[-1], expected)
            assert rollout.memory_report()["packed_weights"] == size, "nothing may be stored twice"
        addresses.append([whole.data_ptr() for one in rollouts for whole in one._injection.gathered._copies.values()])
    assert all(one == addresses[0] for one in addresses)
    for before, after in zip(batches, batches[2:], strict=False):
        assert not torch.equal(before.logprobs, after.logprobs)


def test_fused_weights_are_views_of_the_copies(zero3):
    rollout = rollout_in(zero3(tiny_model()))
    answer(rollout)
    blocks = {
        whole.untyped_storage().data_ptr(): whole.untyped_storage().nbytes()
        for whole in rollout._injection.gathered._copies.values()
    }
    fused = rollout._injection.fused
    assert {tensor.data.untyped_storage().data_ptr() for one in fused.values() for tensor in one.tensors} <= set(
        blocks
    )
    assert len(fused) == len(rollout._injection.segments) > 0
    assert sum(blocks.values()) == rollout.memory_report()["packed_weights"]


def test_neighbours_are_copied_as_one(zero3, monkeypatch):
    """What makes a sync as fast as a plain copy of its bytes."""
    model = tiny_model()
    rollout = rollout_in(zero3(model))
    runs = []
    original = torch.Tensor.as_strided
    monkeypatch.setattr(torch.Tensor, "as_strided", lambda tensor, *args: runs.append(args) or original(tensor, *args))
    rollout.sync_segki_weights()
    assert len(runs) == 2, "a source and a target"


def test_model_that_was_born_partitioned(one_process, zero3):
    plain = tiny_model("qwen3")
    weights = copy.deepcopy(plain.state_dict())
    config = copy.deepcopy(plain.config)
    config.pad_token_id = None  # transformers would write to the row of an embedding that has none yet
    options = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": ZERO3}
    # A dtype that is named is not heeded where a CPU has no fp16; without one, the configuration's is taken: fp32.
    with deepspeed.zero.Init(config_dict_or_path=options):
        model = type(plain)(config)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    engine = zero3(model.train())
    rollout = rollout_in(engine)
    assert_same_answers(answer(rollout), oracles(plain, model))
    train_step(engine, 0)
    rollout.sync_segki_weights()
    assert_same_answers(answer(rollout), oracles(plain, model))


def test_bf16_engine(zero3):
    model = tiny_model().train()
    engine = zero3(model, bf16={"enabled": True})
    rollout = rollout_in(engine)
    before = answer(rollout)
    train_step(engine, 0)
    report = rollout.sync_segki_weights()
    assert report.bytes_copied == sum(2 * parameter.ds_numel for parameter in model.parameters())
    assert not torch.equal(answer(rollout).logprobs, before.logprobs)


# ---------------------------------------------------------------------------------------------------------- staleness


def test_copies_of_another_step_are_refused(zero3):
    engine = zero3(tiny_model().train(), gradient_accumulation_steps=2)
    rollout = rollout_in(engine)
    first = answer(rollout)
    train_step(engine, 0)
    assert torch.equal(answer(rollout).logprobs, first.logprobs), "half a step changes nothing"
    train_step(engine, 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"optimizer step 0.*step 1.*sync_segki_weights\(\)"):
            answer(rollout)
    rollout.sync_weights(engine.global_steps)
    assert not torch.equal(answer(rollout).logprobs, first.logprobs)


def test_rows_still_running_do_not_outlive_a_step(zero3):
    engine = zero3(tiny_model().train())
    rollout = rollout_in(engine)
    sampling = SamplingConfig(max_new_tokens=20, temperature=0.0, continuous_batch_size=1)
    rows = rollout.generate_iter(RolloutRequest(*ragged_prompts(PROMPTS)), sampling)
    next(rows)
    train_step(engine, 0)
    with pytest.raises(RuntimeError, match="sync_segki_weights"):
        next(rows)


def test_checkpoint_of_another_step_is_refused_until_a_sync(zero3, tmp_path):
    engine = zero3(tiny_model("qwen3").train())
    rollout = rollout_in(engine)
    first = answer(rollout)
    engine.save_checkpoint(str(tmp_path), tag="saved")
    train_step(engine, 0)
    rollout.sync_segki_weights()
    assert not torch.equal(answer(rollout).logprobs, first.logprobs)
    engine.load_checkpoint(str(tmp_path), tag="saved")
    with pytest.raises(RuntimeError, match="optimizer step 1.*step 0"):
        answer(rollout)
    rollout.sync_segki_weights()
    assert torch.equal(answer(rollout).logprobs, first.logprobs)


def test_release_gives_the_copies_back(zero3):
    engine = zero3(tiny_model().train())
    rollout = rollout_in(engine)
    first, size = answer(rollout), rollout.memory_report()["packed_weights"]
    rollout.release_memory()
    assert rollout.memory_report()["packed_weights"] == 0
    assert torch.equal(answer(rollout).logprobs, first.logprobs)
    assert rollout.memory_report()["packed_weights"] == size > 0
    train_step(engine, 0)
    rollout.release_memory()
    assert not torch.equal(answer(rollout).logprobs, first.logprobs), "there are no copies that could be stale"


def test_another_layer_is_gathered_anew(zero3):
    engine = zero3(tiny_model("qwen3").train())
    rollout = rollout_in(engine)
    first = answer(rollout)
    layer = engine.module.model.layers[0].mlp
    layer.up_proj, kept = torch.nn.Linear(128, 256, bias=False), layer.up_proj
    changed = answer(rollout)
    layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight.data)  # copies are known by their parameters
    assert torch.equal(answer(rollout).logprobs, changed.logprobs)
    layer.up_proj = kept
    assert not torch.equal(changed.logprobs, first.logprobs)
    assert torch.equal(answer(rollout).logprobs, first.logprobs)


# ----------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("name", ["qwen3_5", "tied"])
def test_training_is_the_same_to_the_bit(zero3, name):
    """With fused rollouts in between (before and after the forward), with plain ones, and with none."""
    start = MODELS[name]().train()
    losses, weights = {}, {}
    for use_segki in (True, False, None):
        engine = zero3(copy.deepcopy(start))
        rollout = None if use_segki is None else rollout_in(engine, use_segki)
        losses[use_segki] = []
        for step in range(STEPS):
            if rollout is not None:
                rollout.sync_segki_weights()
                answer(rollout, n_samples_per_prompt=2)
            loss = engine(**training_batch(step)).loss
            if rollout is not None:
                answer(rollout)
            engine.backward(loss)
            engine.step()
            losses[use_segki].append(float(loss.detach()))
        weights[use_segki] = weights_of(engine.module)
    assert losses[True] == losses[False] == losses[None] and len(set(losses[True])) == STEPS
    for name, alone in weights[None].items():
        assert torch.equal(weights[True][name], alone) and torch.equal(weights[False][name], alone)


def test_generating_leaves_modules_and_parameters_as_they_were(zero3):
    """Also with rows pending, and after a failure in a layer."""
    engine = zero3(tiny_model().train())
    train_step(engine, 0)
    rollout = rollout_in(engine)
    before = traces(engine)
    assert len({status for _, status, *_ in before["parameters"]}) == 2, "whole ones, and partitioned ones"
    assert any(before["external"]), "conv1d.weight is read without a call of conv1d"
    answer(rollout)
    assert traces(engine) == before
    sampling = SamplingConfig(max_new_tokens=20, temperature=0.0, continuous_batch_size=1)
    rows = rollout.generate_iter(RolloutRequest(*ragged_prompts(PROMPTS)), sampling)
    next(rows)
    assert traces(engine) == before
    rows.close()

    def fail(*args) -> None:
        raise KeyboardInterrupt("stop")

    handle = engine.module.model.layers[2].mlp.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt, match="stop"):
        answer(rollout)
    handle.remove()
    assert traces(engine) == before


def test_nothing_is_fetched_while_generating(zero3, monkeypatch):
    engine = zero3(tiny_model().train())
    rollout = rollout_in(engine)
    rollout.sync_segki_weights()
    fetched = []
    original = PartitionedParameterCoordinator.fetch_sub_module

    def fetch(self, module, *args, **options):
        fetched.append(module)
        return original(self, module, *args, **options)

    monkeypatch.setattr(PartitionedParameterCoordinator, "fetch_sub_module", fetch)
    gather = GatheredWeights.gather
    monkeypatch.setattr(GatheredWeights, "gather", lambda *args: fetched.append(args) or gather(*args))
    answer(rollout)
    assert fetched == []
    train_step(engine, 0)
    assert fetched != []
    rollout.sync_segki_weights()
    assert isinstance(fetched[-1], tuple)


def test_training_forward_that_failed_does_not_matter(zero3):
    """DeepSpeed then still believes to be in a forward, and gathers each parameter that is asked for by name."""
    engine = zero3(tiny_model("qwen3").train())
    rollout = rollout_in(engine)
    first = answer(rollout)
    with pytest.raises(IndexError):
        engine(input_ids=torch.full((1, 4), 10**6), use_cache=False)
    statuses = [parameter.ds_status for parameter in engine.module.parameters()]
    assert torch.equal(answer(rollout).logprobs, first.logprobs)
    assert [parameter.ds_status for parameter in engine.module.parameters()] == statuses


def test_hooks_of_others_run_and_see_whole_parameters(zero3):
    model = tiny_model()
    engine = zero3(model)
    rollout = rollout_in(engine)
    first = answer(rollout)
    projection, shapes = model.model.layers[0].mlp.up_proj, []
    handle = projection.register_forward_hook(lambda module, *args: shapes.append(module.weight.shape))
    assert torch.equal(answer(rollout).input_ids, first.input_ids)
    assert set(shapes) == {(256, 128)} and "up_proj has forward hooks" in rollout.describe()
    handle.remove()
    assert torch.equal(answer(rollout).logprobs, first.logprobs)
    assert "has forward hooks" not in rollout.describe()


# ----------------------------------------------------------------------------------------------------------- refusals


def test_engine_without_a_step_count_is_refused(zero3):
    model = zero3(tiny_model("qwen3")).module
    with pytest.raises(ValueError, match="ZeRO stage 3.*global_steps"):
        HybridEngineRollout(engine_of(model), Tokenizer())


def test_partitions_that_cannot_be_gathered_are_refused(zero3):
    engine = zero3(tiny_model("qwen3"))
    weight = engine.module.model.layers[1].mlp.up_proj.weight
    whole = weight.ds_tensor
    swapped = whole.clone()
    swapped.final_location = OffloadDeviceEnum.nvme
    for partition, reason in ((whole.to(torch.int8), "quantised"), (whole[:7], "MiCS"), (swapped, "NVMe")):
        weight.ds_tensor = partition
        with pytest.raises(ValueError, match=f"layers.1.mlp.up_proj.weight cannot be gathered .*{reason}"):
            rollout_in(engine)
    weight.ds_tensor = whole
    answer(rollout_in(engine))
