# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Norms are told apart by what their forward does, and whatever is not an RMSNorm of either form is refused."""

import random

import pytest
import torch
from fused_linear_cases import normal, rms_norm_oracle
from models import tiny_model
from tolerances import assert_close
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from deepspeed_hybrid.segments import norm as norms
from deepspeed_hybrid.segments.norm import as_rms_norm, rms_norm

SIZE, EPS = 24, 1e-3
PLAIN = [LlamaRMSNorm, Qwen3RMSNorm, nn.RMSNorm]
CENTRED = [Qwen3_5RMSNorm, Qwen3NextRMSNorm, GemmaRMSNorm]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """What an earlier test asked of a class would be remembered."""
    monkeypatch.setattr(norms, "_OFFSETS", {})


def made(kind: type[nn.Module], eps: float = EPS) -> nn.Module:
    module = kind(SIZE, eps=eps)
    with torch.no_grad():
        module.weight.copy_(normal(SIZE, dtype=torch.float32, seed=3))
    return module


@pytest.mark.parametrize("kind", PLAIN + CENTRED, ids=lambda kind: kind.__name__)
def test_the_form_of_an_rms_norm(kind):
    module = made(kind)
    form = as_rms_norm(module)
    assert form.offset == (1.0 if kind in CENTRED else 0.0)
    assert (form.size, form.eps) == (SIZE, EPS) and form.weight is module.weight
    x = normal(3, SIZE, dtype=torch.float32, seed=4, scale=0.05)  # small, so that epsilon counts
    assert_close(module(x), rms_norm_oracle(x, form.weight, form.offset, form.eps))
    assert rms_norm(module) == form


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")], ids=str)
def test_the_weights_of_now_do_not_matter(value):
    """Fresh norms hold ones or zeros, from which the two forms cannot be told; partitioned ones hold nothing."""
    for kind, offset in ((LlamaRMSNorm, 0.0), (Qwen3_5RMSNorm, 1.0)):
        module = made(kind)
        with torch.no_grad():
            module.weight.fill_(value)
        assert as_rms_norm(module).offset == offset


def test_a_partitioned_weight_has_its_shape_elsewhere():
    module = made(LlamaRMSNorm)
    module.weight.ds_shape, module.weight.data = torch.Size([SIZE]), torch.empty(0)
    assert as_rms_norm(module).size == SIZE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_dtype_of_a_weight_does_not_matter(dtype):
    for kind, offset in ((nn.RMSNorm, 0.0), (LlamaRMSNorm, 0.0), (Qwen3_5RMSNorm, 1.0)):
        module = made(kind).to(dtype)
        form = as_rms_norm(module)
        assert form.offset == offset and form.weight.dtype == dtype


class Scaled(LlamaRMSNorm):
    """Looks like its parent and is none."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 1.01 * super().forward(hidden_states)


class WithBias(LlamaRMSNorm):
    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + self.bias


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: None)
    return module


def pre_hooked(module: nn.Module) -> nn.Module:
    module.register_forward_pre_hook(lambda module, args: None)
    return module


def with_forward(module: nn.Module) -> nn.Module:
    module.forward = module.forward
    return module


OTHERS = {
    "LayerNorm": lambda: nn.LayerNorm(SIZE, eps=EPS),
    "LayerNorm without bias": lambda: nn.LayerNorm(SIZE, eps=EPS, bias=False),
    "Cohere's, which subtracts the mean": lambda: CohereLayerNorm(SIZE, eps=EPS),
    "a norm without weight": lambda: nn.RMSNorm(SIZE, eps=EPS, elementwise_affine=False),
    "a norm over two dimensions": lambda: nn.RMSNorm((2, SIZE), eps=EPS),
    "an epsilon that depends on the dtype": lambda: nn.RMSNorm(SIZE),
    "a norm with a bias": lambda: WithBias(SIZE, EPS),
    "a subclass that does more": lambda: Scaled(SIZE, EPS),
    "a hook": lambda: hooked(made(LlamaRMSNorm)),
    "a pre hook": lambda: pre_hooked(made(LlamaRMSNorm)),
    "a forward of its own": lambda: with_forward(made(LlamaRMSNorm)),
    "a linear layer": lambda: nn.Linear(SIZE, SIZE),
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_refused(name):
    as_rms_norm(made(LlamaRMSNorm))  # a class that is known to be one says nothing of what hangs on an instance
    module = OTHERS[name]()
    assert as_rms_norm(module) is None
    with pytest.raises(ValueError, match=f"{type(module).__name__} is not an RMSNorm"):
        rms_norm(module)


@pytest.mark.parametrize("asked_first", [True, False], ids=["known class", "new class"])
def test_another_method_under_an_inherited_forward(asked_first, monkeypatch):
    """What is known of a class does not hold where the forward calls something else."""
    if asked_first:
        assert as_rms_norm(made(Qwen3_5RMSNorm)) is not None
    halved = type("Halved", (Qwen3_5RMSNorm,), {"_norm": lambda self, x: 0.5 * x})
    assert as_rms_norm(made(halved)) is None
    module = made(Qwen3_5RMSNorm)
    module._norm = lambda x: 0.5 * x
    assert as_rms_norm(module) is None
    monkeypatch.setattr(Qwen3_5RMSNorm, "_norm", lambda self, x: 0.5 * x)
    assert as_rms_norm(made(Qwen3_5RMSNorm)) is None


def test_a_norm_that_wants_another_input_is_refused():
    """A gate, or a condition."""
    assert as_rms_norm(made(Qwen3_5RMSNormGated)) is None


@pytest.mark.parametrize("kind", PLAIN + CENTRED, ids=lambda kind: kind.__name__)
def test_asking_leaves_no_trace(kind):
    """No random numbers are drawn, and the module is what it was."""
    module = made(kind)
    before, weight, values = dict(module.__dict__), module.weight, module.weight.detach().clone()
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    as_rms_norm(module)
    assert torch.equal(torch.get_rng_state(), torch_state) and random.getstate() == python_state
    assert module.__dict__ == before and module.weight is weight and torch.equal(weight, values)
    assert weight.grad is None and weight.requires_grad


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_asking_under_another_default_device_and_dtype(device):
    """As while a model is built, or in a script with defaults of its own."""
    module = made(Qwen3_5RMSNorm)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            assert as_rms_norm(module).offset == 1.0
    finally:
        torch.set_default_dtype(torch.float32)


def test_every_class_is_asked_once(monkeypatch):
    asked = []
    original = norms._offset
    monkeypatch.setattr(norms, "_offset", lambda *args: asked.append(args) or original(*args))
    for _ in range(3):
        as_rms_norm(made(LlamaRMSNorm)), as_rms_norm(made(Qwen3_5RMSNorm))
    assert len(asked) == 2
    as_rms_norm(made(LlamaRMSNorm, eps=2 * EPS))
    assert len(asked) == 3


@pytest.mark.parametrize("family, offset", [("qwen3_5", 1.0), ("qwen3_next", 1.0), ("qwen3", 0.0), ("llama", 0.0)])
def test_norms_of_a_model(family, offset):
    decoder = tiny_model(family).model
    layer = decoder.layers[-1]
    modules = [decoder.norm, layer.input_layernorm, layer.post_attention_layernorm]
    if hasattr(layer.self_attn, "q_norm"):
        modules += [layer.self_attn.q_norm, layer.self_attn.k_norm]
    assert [as_rms_norm(module).offset for module in modules] == [offset] * len(modules)
