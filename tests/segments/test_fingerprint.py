# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the walk over a model sees: attributes exchanged for others, and nothing where nothing changed."""

import pytest
import torch
from harness import greedy, rollout_of
from models import ragged_prompts, tiny_model

from deepspeed_hybrid.segments.fingerprint import SeenModel


def test_an_unchanged_model_has_the_same():
    model = tiny_model()
    before = SeenModel(model)
    assert before.is_same()
    model.train()
    assert before.is_same()
    model.model.layers[0].ds_count = 1
    assert before.is_same() and before.is_same()


def test_checkpointing_turned_off_for_a_rollout_and_on_again_is_no_change():
    """As trainers do at every step, each time with new objects; else every step would cost a capture."""
    model = tiny_model()
    # Newer versions have another name for it, and warn of the earlier one.
    turn_on = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    turn_off = getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)
    before = SeenModel(model)
    for _ in range(2):
        turn_on()
        assert before.is_same() and model.model.embed_tokens._forward_hooks
        turn_off()
        assert before.is_same()
        model.enable_input_require_grads()
        model.disable_input_require_grads()
        assert before.is_same()


@pytest.mark.parametrize("kind", [list, dict, set])
def test_an_attribute_exchanged_time_and_again(kind):
    """The memory of an object that is gone is given to the next, and with it the id."""
    model = tiny_model()
    layer = model.model.layers[1].mlp
    for _ in range(20):
        layer.choice = kind()
        before = SeenModel(model)
        for _ in range(2):  # the second may lie where the first lay
            layer.choice = kind()
        assert not before.is_same()


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_another_dtype_before_a_sync(family):
    """The sync sees the change first, and gives the buffers of the old dtype back."""
    model, prompts = tiny_model(family), ragged_prompts([3, 5])
    rollout = rollout_of(model)
    greedy(rollout, prompts, 4)
    model.to(torch.bfloat16)
    rollout.sync_segki_weights()
    expected = greedy(rollout_of(model), prompts, 4)
    assert torch.equal(greedy(rollout, prompts, 4).input_ids, expected.input_ids)


def rename(layer) -> None:
    layer.__dict__["other"] = layer.__dict__.pop("last")


def to_the_next(layer) -> None:
    """In a list of all that modules hold, what is moved stays where it was."""
    first, second = layer.mlp, layer.input_layernorm
    assert not first._buffers and not second._buffers
    first._buffers["one"] = first.up_proj._parameters.pop("weight")


def swap_names(table: dict) -> None:
    """The same things in the same order."""
    entries = [*table.items()]
    table.clear()
    table.update((name, one) for (_, one), (name, _) in zip(entries, reversed(entries), strict=True))


CHANGES = {
    "an attribute has another name": rename,
    "an attribute is gone": lambda layer: layer.__dict__.pop("last"),
    "a weight is transposed in place": lambda layer: layer.mlp.up_proj.weight.set_(layer.mlp.up_proj.weight.data.T),
    "a weight lies elsewhere": lambda layer: setattr(layer.mlp.up_proj.weight, "data", layer.mlp.up_proj.weight + 0),
    "a weight is another": lambda layer: setattr(layer.mlp.up_proj, "weight", torch.nn.Parameter(torch.ones(2, 2))),
    "a weight has become a buffer": to_the_next,
    "a child is another": lambda layer: setattr(layer.mlp, "up_proj", torch.nn.Linear(2, 2)),
    "children change places": lambda layer: layer.mlp._modules.update(
        up_proj=layer.mlp.gate_proj, gate_proj=layer.mlp.up_proj
    ),
    "children have each other's names": lambda layer: swap_names(layer.mlp._modules),
    "a weight has another name": lambda layer: swap_names(layer.mlp.up_proj._parameters),
    "a child is shared": lambda layer: setattr(layer.mlp, "up_proj", layer.mlp.gate_proj),
    "a hook": lambda layer: layer.mlp.register_forward_hook(lambda *_: None),
    "a module has another class": lambda layer: setattr(layer.mlp, "__class__", torch.nn.Identity),
    "a module has another table": lambda layer: setattr(layer.mlp, "__dict__", {**layer.mlp.__dict__, "more": 1}),
    "a module has a copy of its table": lambda layer: setattr(layer.mlp, "__dict__", {**layer.mlp.__dict__}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("touched", [False, True], ids=["untouched", "another mode"])
@torch.no_grad()
def test_a_change_is_seen(change, touched):
    """Right away, and by the look that follows where training and evaluation take turns."""
    model = tiny_model()
    layer = model.model.layers[1]
    layer.last = object()
    before = SeenModel(model)
    if touched:
        model.train(not model.training)
    assert before.is_same()
    CHANGES[change](layer)
    assert not before.is_same() and not before.is_same()
