# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Fused weights over parameters: aliased, re-homed or packed, always the values of now, and never a copy too many."""

import copy

import pytest
import torch
from models import tiny_model
from torch import nn

from deepspeed_hybrid.segments.weights import ALIASED, PACKED, FusedLinear, FusedTensor, sync

INPUTS, OUTPUTS = 6, [5, 3, 8]
ROWS = sum(OUTPUTS)


def layers(bias: bool = False, seed: int = 0) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList(nn.Linear(INPUTS, outputs, bias=bias) for outputs in OUTPUTS)


def weights(modules: nn.ModuleList) -> list[nn.Parameter]:
    return [layer.weight for layer in modules]


def lay_flat(parameters: list[nn.Parameter], order=None, gap: int = 0, before: int = 7, after: int = 9):
    """Move parameters into one flat buffer, as ZeRO does; ``order`` of the parameters, ``gap`` elements between."""
    order = list(order or range(len(parameters)))
    total = before + after + sum(parameter.numel() + gap for parameter in parameters)
    flat = torch.full((total,), 77.0)
    position = before
    for parameter in (parameters[index] for index in order):
        place = flat[position : position + parameter.numel()].view_as(parameter)
        parameter.data = place.copy_(parameter.data)
        position += parameter.numel() + gap
    return flat


def scatter(parameters: list[nn.Parameter]) -> None:
    """Make every parameter a view of a larger storage of its own."""
    for parameter in parameters:
        parameter.data = torch.cat([parameter.data.flatten(), torch.zeros(3)])[:-3].view_as(parameter)


def storages(tensors) -> dict[int, int]:
    """Address -> bytes of every storage in use."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def is_right(tensor: FusedTensor) -> bool:
    return torch.equal(tensor.data, torch.cat([parameter.detach() for parameter in tensor.parameters]))


# ----------------------------------------------------------------------------------------------------------- aliased


@pytest.mark.parametrize("before", [0, 7])
def test_neighbours_in_a_flat_buffer_are_a_view(before):
    parameters = weights(layers())
    flat = lay_flat(parameters, before=before)
    places = [parameter.data_ptr() for parameter in parameters]

    fused = FusedTensor(parameters)

    assert fused.mode == ALIASED and fused.data.shape == (ROWS, INPUTS)
    assert fused.data.data_ptr() == parameters[0].data_ptr()
    assert fused.data.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert [parameter.data_ptr() for parameter in parameters] == places, "ZeRO's views must stay where they are"
    assert is_right(fused) and not fused.data.requires_grad


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("flatten", [True, False])
def test_view_is_never_stale(index, flatten):
    parameters = weights(layers())
    flat = lay_flat(parameters) if flatten else None
    fused = FusedTensor(parameters)
    before = fused.data.clone()

    parameters[index].data.add_(1.0)

    assert is_right(fused) and not torch.equal(fused.data, before)
    assert fused.refresh() == 0 and is_right(fused)
    if flatten:
        flat.mul_(2)
        assert is_right(fused)


@pytest.mark.parametrize(
    "options", [dict(order=[1, 0, 2]), dict(order=[0, 2, 1]), dict(gap=1), dict(gap=INPUTS)], ids=str
)
def test_flat_buffer_in_another_layout_is_copied(options):
    parameters = weights(layers())
    lay_flat(parameters, **options)
    places = [parameter.data_ptr() for parameter in parameters]

    fused = FusedTensor(parameters)

    assert fused.mode == PACKED and is_right(fused)
    assert [parameter.data_ptr() for parameter in parameters] == places


def test_a_parameter_between_two_others_is_copied():
    """Weights and biases one after another, as ZeRO lays a layer with biases."""
    modules = layers(bias=True)
    lay_flat(list(modules.parameters()))
    fused = FusedLinear(list(modules))
    assert fused.mode == PACKED and [tensor.mode for tensor in fused.tensors] == [PACKED, PACKED]
    assert fused.packed_bytes == 4 * ROWS * (INPUTS + 1)
    assert all(is_right(tensor) for tensor in fused.tensors)


# ---------------------------------------------------------------------------------------------------------- re-homed


@pytest.mark.parametrize("bias", [False, True])
def test_parameters_of_their_own_storage_move_together_once(bias):
    modules = layers(bias)
    kept, objects = copy.deepcopy(modules.state_dict()), list(modules.parameters())
    total = sum(storages(objects).values())

    fused = FusedLinear(list(modules))

    assert fused.mode == ALIASED and fused.packed_bytes == 0
    assert [id(one) for one in modules.parameters()] == [id(one) for one in objects]
    assert all(isinstance(one, nn.Parameter) and one.is_leaf and one.requires_grad for one in objects)
    state = modules.state_dict()
    assert list(state) == list(kept) and all(torch.equal(state[name], kept[name]) for name in kept)
    assert all(is_right(tensor) for tensor in fused.tensors)
    in_use = storages([*objects, *(tensor.data for tensor in fused.tensors)])
    assert sum(in_use.values()) == total and len(in_use) == len(fused.tensors), "no byte more than before"

    places = [parameter.data_ptr() for parameter in objects]
    again = FusedLinear(list(modules))
    assert [parameter.data_ptr() for parameter in objects] == places
    assert [one.data.data_ptr() for one in again.tensors] == [one.data.data_ptr() for one in fused.tensors]


def test_copy_of_a_model_keeps_its_memory_and_its_own_weights():
    modules = layers()
    FusedLinear(list(modules))
    other = copy.deepcopy(modules)
    assert sum(storages(other.parameters()).values()) == 4 * ROWS * INPUTS
    fused = FusedLinear(list(other))
    other[0].weight.data.zero_()
    assert is_right(fused.tensors[0]) and bool(modules[0].weight.any())


def train(modules: nn.ModuleList, optimizer: torch.optim.Optimizer, steps: int) -> None:
    inputs = torch.linspace(-1, 1, 4 * INPUTS).view(4, INPUTS)
    for _ in range(steps):
        sum(layer(inputs).square().sum() for layer in modules).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_optimizer_goes_on_and_its_state_loads():
    """Adam's moments belong to the parameter objects: a move in the middle of training shows nowhere."""
    plain, moved = layers(bias=True), layers(bias=True)
    optimizers = [torch.optim.AdamW(modules.parameters(), lr=0.1) for modules in (plain, moved)]
    for modules, optimizer in zip((plain, moved), optimizers, strict=True):
        train(modules, optimizer, 2)

    fused = FusedLinear(list(moved))
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    train(plain, optimizers[0], 2)
    train(moved, optimizers[1], 1)
    resumed = torch.optim.AdamW(moved.parameters(), lr=0.1)
    resumed.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    train(moved, resumed, 1)

    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), moved.parameters(), strict=True))
    assert all(is_right(tensor) for tensor in fused.tensors), "steps must reach the view"


def test_gradients_pass_a_move_between_forward_and_backward():
    plain, moved = layers(), layers()
    inputs = torch.randn(4, INPUTS)
    losses = [sum(layer(inputs).square().sum() for layer in modules) for modules in (plain, moved)]
    FusedLinear(list(moved))
    for loss in losses:
        loss.backward()
    for one, other in zip(plain.parameters(), moved.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_moved_parameters_are_saved_and_loaded(tmp_path):
    model = tiny_model("qwen2_5")
    kept = copy.deepcopy(model.state_dict())
    for layer in model.model.layers:
        attention = layer.self_attn
        FusedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert list(loaded) == list(kept) and all(torch.equal(loaded[name], kept[name]) for name in kept)
    with torch.no_grad():
        model.load_state_dict({name: value + 1 for name, value in kept.items()})
    assert all(torch.equal(value, kept[name] + 1) for name, value in model.state_dict().items())


def test_neighbours_by_chance():
    """Addresses that follow one another in storages of their own are not one tensor."""
    modules = layers()
    memory, position = bytearray(4 * ROWS * INPUTS), 0
    for parameter in weights(modules):
        place = torch.frombuffer(memory, dtype=torch.float32, count=parameter.numel(), offset=position)
        parameter.data = place.view_as(parameter).copy_(parameter.data)
        position += 4 * parameter.numel()
    addresses = [parameter.data_ptr() for parameter in weights(modules)]
    assert addresses[1] == addresses[0] + 4 * OUTPUTS[0] * INPUTS
    assert len(storages(weights(modules))) == len(OUTPUTS)

    fused = FusedTensor(weights(modules))

    modules[2].weight.data.add_(1)
    fused.refresh()
    assert is_right(fused)


def test_one_parameter_in_two_places():
    """Tied projections cannot be neighbours of themselves."""
    modules = layers()
    modules[1] = modules[0]
    fused = FusedLinear(list(modules))
    assert modules[1].weight is modules[0].weight
    modules[0].weight.data.add_(1)
    fused.refresh()
    assert is_right(fused.tensors[0])


# ------------------------------------------------------------------------------------------------------------ packed


def test_views_of_larger_storages_are_copied_and_stay():
    modules = layers()
    scatter(weights(modules))
    places = [parameter.data_ptr() for parameter in weights(modules)]
    fused = FusedLinear(list(modules))
    assert fused.mode == PACKED and fused.packed_bytes == 4 * ROWS * INPUTS
    assert [parameter.data_ptr() for parameter in weights(modules)] == places
    assert is_right(fused.tensors[0])
    assert fused.tensors[0].data.data_ptr() not in places


def test_one_view_among_them_is_enough():
    modules = layers()
    scatter([modules[1].weight])
    places = [parameter.data_ptr() for parameter in weights(modules)]
    assert FusedTensor(weights(modules)).mode == PACKED
    assert [parameter.data_ptr() for parameter in weights(modules)] == places, "the others have no reason to move"


def write(parameter: nn.Parameter) -> None:
    parameter.data.mul_(-3)


def write_without_gradient(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.normal_()


def point_elsewhere(parameter: nn.Parameter) -> None:
    parameter.data = torch.randn_like(parameter)


@pytest.mark.parametrize("change", [write, write_without_gradient, point_elsewhere])
@pytest.mark.parametrize("changed", [[0], [1], [2], [0, 1, 2]], ids=str)
def test_refresh_follows_in_place(change, changed):
    modules = layers(bias=True)
    scatter(list(modules.parameters()))
    fused = FusedLinear(list(modules))
    addresses = [tensor.data.data_ptr() for tensor in fused.tensors]
    before = [tensor.data.clone() for tensor in fused.tensors]
    for index in changed:
        change(modules[index].weight)
        change(modules[index].bias)
    assert not any(is_right(tensor) for tensor in fused.tensors), "a copy cannot know"

    copied = fused.refresh()

    assert copied == fused.packed_bytes == 4 * ROWS * (INPUTS + 1)
    assert all(is_right(tensor) for tensor in fused.tensors)
    assert [tensor.data.data_ptr() for tensor in fused.tensors] == addresses
    assert not any(torch.equal(tensor.data, old) for tensor, old in zip(fused.tensors, before, strict=True))
    assert not any(tensor.data.requires_grad for tensor in fused.tensors)


def test_copy_does_not_write_back():
    modules = layers()
    scatter(weights(modules))
    kept = copy.deepcopy(modules.state_dict())
    fused = FusedLinear(list(modules))
    fused.tensors[0].data.zero_()
    assert all(torch.equal(value, kept[name]) for name, value in modules.state_dict().items())


# ------------------------------------------------------------------------------------------------- products, reports


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("arrange", [lay_flat, scatter, lambda parameters: None], ids=["flat", "scattered", "own"])
def test_product_is_every_layer_in_order(bias, arrange):
    modules = layers(bias)
    arrange(list(modules.parameters()))
    fused = FusedLinear(list(modules))
    inputs = torch.randn(2, 4, INPUTS)
    expected = [layer(inputs) for layer in modules]
    assert fused.sizes == OUTPUTS
    for part, output in zip(fused(inputs).split(fused.sizes, dim=-1), expected, strict=True):
        torch.testing.assert_close(part, output, atol=1e-6, rtol=1e-6)
    assert len(fused.tensors) == (2 if bias else 1)


def test_biases_of_qwen2_5():
    attention = tiny_model("qwen2_5").model.layers[0].self_attn
    modules = nn.ModuleList([attention.q_proj, attention.k_proj, attention.v_proj])
    with torch.no_grad():
        for layer in modules:
            layer.bias.normal_()
    scatter([attention.k_proj.bias])
    fused = FusedLinear(list(modules))
    assert [tensor.mode for tensor in fused.tensors] == [ALIASED, PACKED] and fused.mode == PACKED
    assert fused.packed_bytes == 4 * sum(layer.out_features for layer in modules)

    attention.v_proj.bias.data.add_(5)
    assert fused.refresh() == fused.packed_bytes

    inputs = torch.randn(3, 128)
    expected = torch.cat([layer(inputs) for layer in modules], dim=-1)
    torch.testing.assert_close(fused(inputs), expected, atol=1e-5, rtol=1e-5)


def test_report_of_a_sync():
    own, scattered = layers(), layers()
    scatter(weights(scattered))
    fused = {"own": FusedLinear(list(own)), "scattered": FusedLinear(list(scattered))}
    scattered[2].weight.data.zero_()

    report = sync(fused)

    assert report.modes == {"own": ALIASED, "scattered": PACKED}
    assert report.bytes_copied == 4 * ROWS * INPUTS and report.seconds > 0
    assert is_right(fused["scattered"].tensors[0])
    assert sync({}).bytes_copied == 0
