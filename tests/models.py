# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Tiny models whose output depends on the whole context, ragged prompts, and Hugging Face as the oracle."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCAB, PAD = 256, 0
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    pad_token_id=PAD,
    eos_token_id=None,
    bos_token_id=None,
    max_position_embeddings=4096,
)
GDN = dict(
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
MROPE = dict(
    rope_type="default",
    rope_theta=10000.0,
    partial_rotary_factor=0.25,
    mrope_section=[2, 1, 1],
    mrope_interleaved=True,
)
VISION = dict(
    depth=1,
    hidden_size=32,
    intermediate_size=32,
    num_heads=2,
    out_hidden_size=128,
    patch_size=4,
    num_position_embeddings=16,
)


def _qwen3_5():
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**COMMON, **GDN, rope_parameters=dict(MROPE)))


def _qwen3_5_conditional():
    text = dict(**COMMON, **GDN, rope_parameters=dict(MROPE))
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=dict(VISION)))


def _qwen3_next():
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **COMMON,
            **GDN,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            decoder_sparse_step=1,
        )
    )


def _gdn_only():
    options = {**COMMON, **GDN, "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**options, rope_parameters=dict(MROPE)))


FAMILIES = {
    "qwen3_5": _qwen3_5,
    "qwen3_5_conditional": _qwen3_5_conditional,
    "qwen3_next": _qwen3_next,
    "qwen2_5": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON, num_hidden_layers=3)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON, num_hidden_layers=3)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, num_hidden_layers=3)),
    "gdn_only": _gdn_only,
}


class Tokenizer:
    """What the engine asks of a tokenizer."""

    def __init__(self, pad: int | None = PAD, eos: int | list[int] | None = None):
        self.pad_token_id, self.eos_token_id = pad, eos


def tiny_model(family: str = "qwen3_5", seed: int = 0) -> torch.nn.Module:
    """fp32, evaluation mode. Weights x4 and slow decay, so that every fault of a state shows; the pad row is not 0."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "visual" not in name:
                parameter.mul_(4)
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.01, 0.5).log())
        model.get_input_embeddings().weight[PAD].normal_()
    return model.eval()


class LoraLinear(torch.nn.Module):
    """An adapter in place of a linear layer that shows the layer's attributes, as PEFT's do; it changes the output."""

    def __init__(self, base: torch.nn.Linear, rank: int = 4):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.base.weight

    @property
    def bias(self) -> torch.nn.Parameter | None:
        return self.base.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + 4 * self.up(self.down(inputs))


def engine_of(model: torch.nn.Module) -> SimpleNamespace:
    return SimpleNamespace(module=model)


def ragged_prompts(lengths: list[int], width: int | None = None, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded random prompts: ids [B, T] and mask [B, T], int64."""
    generator = torch.Generator().manual_seed(seed)
    width = width or max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(1, VOCAB, (length,), generator=generator)
        mask[row, width - length :] = 1
    return ids, mask


@contextmanager
def torch_scans(model: torch.nn.Module) -> Iterator[None]:
    """Inside, Hugging Face's GatedDeltaNet layers use torch functions: FLA's chunk kernels round fp32 to TF32."""
    modules = {sys.modules[type(module).__module__] for module in model.modules() if hasattr(module, "A_log")}
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    bound = [(module, name, getattr(module, name)) for module in modules for name in names]
    try:
        for module, name, function in bound:
            setattr(module, name, inspect.unwrap(function))
        yield
    finally:
        for module, name, function in bound:
            setattr(module, name, function)


@torch.no_grad()
def solo(
    model: torch.nn.Module, prompt: torch.Tensor, new_tokens: int, stops: set[int] = frozenset()
) -> SimpleNamespace:
    """The oracle: one unpadded prompt [T], plain Hugging Face eager with its own cache, greedy.

    A stack of GatedDeltaNet layers alone cannot continue from Hugging Face's cache; there every token is a full
    forward over all before it.

    Returns tokens [L] int64, logits [L, V] fp32 that they were chosen from, and logprobs [L] fp32.
    """
    tokens, logits, cache = [], [], {}
    fed = prompt[None, :]
    cacheless = set(getattr(model.config, "layer_types", None) or ()) == {"linear_attention"}
    for _ in range(new_tokens):
        with torch_scans(model):
            output = model(input_ids=fed, use_cache=not cacheless, **cache)
        row = output.logits[0, -1].float()
        token = row.argmax()[None, None]
        if cacheless:
            fed = torch.cat([fed, token], dim=1)
        else:
            name = "cache" if "cache" in output else "past_key_values"
            cache, fed = {name: output[name]}, token
        logits.append(row)
        tokens.append(int(token))
        if tokens[-1] in stops:
            break
    chosen, stacked = torch.tensor(tokens), torch.stack(logits).cpu()
    logprobs = stacked.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
    return SimpleNamespace(tokens=chosen, logits=stacked, logprobs=logprobs)
