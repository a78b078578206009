# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which models' prompt forwards are captured, and what is said of the others."""

import functools

import pytest
import torch
from harness import rollout_of
from models import FAMILIES, LoraLinear, Tokenizer, tiny_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deepspeed_hybrid import HybridEngineRollout
from deepspeed_hybrid.segments.replayable import prompt_obstacle


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    obstacle = prompt_obstacle(tiny_model(family))
    assert obstacle is None or family == "qwen3_next" and "SparseMoeBlock" in obstacle


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_conditional"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engines_own_hooks_are_none(make_engine, monkeypatch, family, stage):
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # ZeRO-3 replaces it for good
    rollout = HybridEngineRollout(make_engine(tiny_model(family), stage=stage), Tokenizer())
    assert rollout._injection.prompt_obstacle is None


def changed(model: torch.nn.Module, how: str) -> torch.nn.Module:
    layer = model.model.layers[1]
    if how == "hook":
        layer.mlp.register_forward_hook(lambda *args: None)
    elif how == "hook of the head":
        model.lm_head.register_forward_pre_hook(lambda *args: None)
    elif how == "forward of its own":
        layer.post_attention_layernorm.forward = lambda hidden: hidden
    elif how == "strange module":
        layer.mlp.gate_proj = LoraLinear(layer.mlp.gate_proj)
    elif how == "strange layer":
        layer.__class__ = type("Counting", (type(layer),), {"forward": lambda self, *args, **kwargs: args[0]})
    elif how == "strange rotary":
        rotary = model.model.rotary_emb
        rotary.__class__ = type("Reading", (type(rotary),), {"forward": lambda self, *args: None})
    return model


@pytest.mark.parametrize(
    "how, said",
    [
        ("hook", "MLP has a forward or hooks"),
        ("hook of the head", "Linear has a forward or hooks"),
        ("forward of its own", "RMSNorm has a forward or hooks"),
        ("strange module", "LoraLinear is not known"),
        ("strange layer", "Counting is not known"),
        ("strange rotary", "Reading is not known"),
    ],
)
def test_obstacles(how, said):
    assert said in prompt_obstacle(changed(tiny_model(), how))


def test_hooks_at_every_call():
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert "every module" in prompt_obstacle(tiny_model())
    finally:
        handle.remove()


def test_a_reader_of_images_does_not_count():
    model = tiny_model("qwen3_5_conditional")
    model.model.visual.register_forward_hook(lambda *args: None)
    assert prompt_obstacle(model) is None


def test_an_exchanged_linear_forward(monkeypatch):
    plain = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, inputs: plain(self, inputs))
    assert "Linear is not known" in prompt_obstacle(tiny_model("qwen3"))


@pytest.mark.parametrize("layer", [torch.nn.Linear, torch.nn.Embedding], ids=["Linear", "Embedding"])
def test_an_exchanged_forward_that_claims_to_be_the_old_one(monkeypatch, layer):
    plain = layer.forward
    monkeypatch.setattr(layer, "forward", functools.wraps(plain)(lambda self, inputs: plain(self, inputs)))
    assert f"{layer.__name__} is not known" in prompt_obstacle(tiny_model("qwen3"))


@pytest.mark.parametrize("claims", [True, False])
def test_attention_of_somebody_else(monkeypatch, claims):
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def counting(*args, **kwargs):
        return plain(*args, **kwargs)

    own = functools.wraps(plain)(counting) if claims else counting
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", own)
    assert prompt_obstacle(tiny_model("qwen3")) == "attention 'sdpa' was registered by somebody else"


def test_containers_have_no_forward():
    """As PEFT's layers hold their adapters."""
    model = tiny_model("qwen3")
    layer = model.model.layers[0].mlp.gate_proj
    layer.adapters, layer.embedded = torch.nn.ModuleDict(), torch.nn.ParameterDict()
    assert prompt_obstacle(model) is None


def test_reason_is_described_and_followed():
    """It is a hint for captured generation alone, and goes with what was in the way."""
    model = tiny_model()
    rollout = rollout_of(model)
    assert "prompt capture" not in rollout.describe()
    rollout._paths.graph = True
    assert "prompt capture: on" in rollout.describe() and "8192 tokens" in rollout.describe()
    handle = model.model.layers[0].register_forward_hook(lambda *args: None)
    rollout.sync_segki_weights()
    assert "prompt capture is off: Qwen3_5DecoderLayer has a forward or hooks of its own" in rollout.describe()
    assert "DecoderLayer" in rollout._paths.reasons()["prompt capture_off"]
    handle.remove()
    rollout.sync_segki_weights()
    assert "prompt capture: on" in rollout.describe()
