# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Models made from a configuration alone, with random weights, directly on the accelerator."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen3_5TextConfig, Qwen3Config

from deepspeed_hybrid.tools.device import has_cuda

DEMO_SIZES = {"tiny": 64, "small": 128}  # hidden size


def demo_config(size: str, vocab_size: int, **special_ids: int | None) -> PretrainedConfig:
    """A four-layer Qwen3.5: three GatedDeltaNet layers, then full attention. Head dims are powers of two, as FLA asks.

    Transformers' scan on a CPU costs the same for 1 to 64 tokens, and in proportion to the GatedDeltaNet heads.
    """
    hidden = DEMO_SIZES[size]
    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=4,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        linear_num_key_heads=hidden // 64,
        linear_num_value_heads=hidden // 64,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        rope_parameters=_rope(1e4, [2, 1, 1]),
        **special_ids,
    )


@torch.no_grad()
def decay_slowly(model: nn.Module) -> None:
    """Start GatedDeltaNet layers with a memory of many tokens: as transformers draws A, most heads forget in one."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(0.01, 0.5).log_()


def _tiny() -> PretrainedConfig:
    return demo_config("small", 512, pad_token_id=0, bos_token_id=None, eos_token_id=None)


def _qwen3_5_small() -> PretrainedConfig:
    """27 million parameters in layers: enough to learn bytes of text in a minute."""
    return Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        rope_parameters=_rope(1e4, [6, 5, 5]),
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def _qwen3_5(
    hidden_size: int,
    intermediate_size: int,
    tied: bool,
    layers: int = 32,
    heads: tuple[int, int] = (16, 4),
    value_heads: int = 32,
) -> PretrainedConfig:
    """``heads``: of queries and of keys; ``value_heads``: of a GatedDeltaNet layer."""
    return Qwen3_5TextConfig(
        vocab_size=248320,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
        tie_word_embeddings=tied,
        rope_parameters=_rope(1e7, [11, 11, 10]),
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def _qwen3_4b() -> PretrainedConfig:
    """Attention alone."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e6),
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def _rope(theta: float, section: list[int]) -> dict:
    return dict(
        rope_type="default",
        rope_theta=theta,
        partial_rotary_factor=0.25,
        mrope_section=section,
        mrope_interleaved=True,
    )


PRESETS: dict[str, Callable[[], PretrainedConfig]] = {
    "tiny": _tiny,
    "qwen3.5-small": _qwen3_5_small,
    "qwen3.5-0.8b": partial(_qwen3_5, 1024, 3584, tied=True, layers=24, heads=(8, 2), value_heads=16),
    "qwen3.5-2b": partial(_qwen3_5, 2048, 6144, tied=True, layers=24, heads=(8, 2), value_heads=16),
    "qwen3.5-4b": partial(_qwen3_5, 2560, 9216, tied=True),
    "qwen3.5-9b": partial(_qwen3_5, 4096, 12288, tied=False),
    "qwen3-4b": _qwen3_4b,
}


def load_config(source: str | Path) -> PretrainedConfig:
    """The text configuration of a preset, a config.json, or a folder that holds one.

    Raises:
        ValueError: it is none of them, or transformers does not know the model type.
    """
    if str(source) in PRESETS:
        return PRESETS[str(source)]()
    path = Path(source)
    if not path.exists():
        raise ValueError(f"model config must be a config.json or one of {', '.join(PRESETS)}; got {source}")
    return AutoConfig.from_pretrained(path).get_text_config(decoder=True)


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The first ``layers`` of a configuration's layers.

    Raises:
        ValueError: it has fewer.
    """
    if layers > config.num_hidden_layers:
        raise ValueError(f"layers must be at most the configuration's {config.num_hidden_layers}; got {layers}")
    fewer = type(config).from_dict(config.to_dict())
    if getattr(config, "layer_types", None):
        fewer.layer_types = config.layer_types[:layers]
    fewer.num_hidden_layers = layers
    return fewer


def is_checkpoint(source: str | Path) -> bool:
    """Whether it is a folder with weights in it."""
    folder = Path(source)
    return folder.is_dir() and any(any(folder.glob(name)) for name in ("*.safetensors", "pytorch_model*.bin"))


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """The same layers, but only as many as hold every kind, on a small vocabulary."""
    kinds = getattr(config, "layer_types", None)
    layers = 1 + max(kinds.index(kind) for kind in set(kinds)) if kinds else 1
    small = type(config).from_dict(config.to_dict())
    if kinds:
        small.layer_types = kinds[:layers]
    small.num_hidden_layers, small.vocab_size = layers, 512
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    return small


def build_model(config: PretrainedConfig, seed: int, dtype: torch.dtype | None = None) -> nn.Module:
    """Random weights on the accelerator, in evaluation mode.

    Args:
        dtype: default bf16 on a CUDA device, fp32 elsewhere.
    """
    torch.manual_seed(seed)
    dtype = dtype or (torch.bfloat16 if has_cuda() else torch.float32)
    with torch.device(get_accelerator().current_device_name()):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
