# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a DFlash draft checkpoint says of itself: its raw config.json, in every spelling there is.

transformers' own configuration classes re-derive window and layer types on reading, so that they are not asked.
"""

from dataclasses import dataclass
from pathlib import Path

from deepspeed_hybrid.speculative.files import read_json
from deepspeed_hybrid.speculative.rope import RopeSettings, rope_settings
from deepspeed_hybrid.speculative.settings import is_amount, is_count, needed, of_kind, require

FULL, SLIDING = "full_attention", "sliding_attention"
# Settings of relatives of DFlash, whose drafts this forward would compute wrongly. Unset they do no harm.
OTHER_SETTINGS = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "top_k_selector",
    "markov_rank",
    "sample_from_anchor",
    "confidence_head",
    "draft_vocab_size",
    "quantization_config",
    "embed_scale",
    "final_logit_softcapping",
    "attn_logit_softcapping",
)


@dataclass(frozen=True)
class DraftConfig:
    """A draft model's shape, and how it is tied to its target."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # the anchor and the tokens drafted behind it
    target_layer_ids: tuple[int, ...]  # in the order of fc's columns
    mask_token_id: int
    vocab_size: int
    rope: RopeSettings
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    num_target_layers: int | None = None
    layer_types: tuple[str, ...] = ()  # () is all full
    sliding_window: int | None = None  # keys that a query of a sliding layer sees, itself among them
    causal: tuple[bool, ...] = ()  # within the block, a layer; () is by layer type

    def __post_init__(self) -> None:
        types = self.layer_types or (FULL,) * self.num_layers
        object.__setattr__(self, "layer_types", types)
        object.__setattr__(self, "causal", self.causal or tuple(kind == SLIDING for kind in types))
        sizes = (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
        )
        for name in sizes:
            require(name, getattr(self, name), is_count(getattr(self, name)), "an integer of at least 1")
        require("block_size", self.block_size, is_count(self.block_size, 2), "an integer of at least 2")
        require(
            "num_attention_heads", self.num_heads, self.num_heads % self.num_kv_heads == 0, "a multiple of kv heads"
        )
        require("head_dim", self.head_dim, self.head_dim % 2 == 0, "even")
        require("rms_norm_eps", self.rms_norm_eps, is_amount(self.rms_norm_eps), "a number above 0")
        ids = self.target_layer_ids
        require(
            "target_layer_ids",
            ids,
            len(ids) > 0 and len(set(ids)) == len(ids) and all(is_count(index, 0) for index in ids),
            "different layer numbers from 0",
        )
        require("mask_token_id", self.mask_token_id, is_count(self.mask_token_id, 0), "a token id")
        known = len(types) == self.num_layers and all(kind in (FULL, SLIDING) for kind in types)
        require("layer_types", types, known, "one full_attention or sliding_attention for each layer")
        require("causal", self.causal, len(self.causal) == self.num_layers, "one True or False for each layer")
        if SLIDING in types:
            require(
                "sliding_window", self.sliding_window, is_count(self.sliding_window), "an integer where layers slide"
            )

    @classmethod
    def from_json(cls, raw: dict) -> "DraftConfig":
        """Read a checkpoint's config.json.

        Raises:
            ValueError: a relative of DFlash that is not supported, a setting that is missing or makes no sense; named.
        """
        nested = of_kind("dflash_config", raw.get("dflash_config"), dict, "an object") or {}
        _refuse_relatives(raw, nested)

        layers, heads = needed(raw, "num_hidden_layers"), needed(raw, "num_attention_heads")
        targets = of_kind("num_target_layers", _either(raw, nested, "num_target_layers"), int, "an integer")
        mask = _either(raw, nested, "mask_token_id")
        if mask is None:
            raise ValueError("the config.json of draft_model must have mask_token_id, on top or in dflash_config")
        block = _either(raw, nested, "block_size")
        if block is None:
            raise ValueError("the config.json of draft_model must have block_size, on top or in dflash_config")
        types, window = _layer_types(raw, nested, layers)
        causal = nested.get("causal") if raw.get("is_causal") is None else raw["is_causal"]
        of_kind("is_causal", causal, bool, "true or false")
        head_dim = raw.get("head_dim") or needed(raw, "hidden_size") // heads
        require("head_dim", head_dim, is_count(head_dim), "an integer of at least 1")
        return cls(
            hidden_size=needed(raw, "hidden_size"),
            intermediate_size=needed(raw, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            block_size=block,
            target_layer_ids=_target_layers(_either(raw, nested, "target_layer_ids"), targets, layers),
            mask_token_id=mask,
            vocab_size=needed(raw, "vocab_size"),
            rope=rope_settings(raw, head_dim),
            rms_norm_eps=1e-6 if raw.get("rms_norm_eps") is None else raw["rms_norm_eps"],
            attention_bias=bool(of_kind("attention_bias", raw.get("attention_bias"), bool, "true or false")),
            num_target_layers=targets,
            layer_types=types,
            sliding_window=window,
            causal=() if causal is None else (causal,) * layers,
        )

    def to_json(self) -> dict:
        """A config.json in the published format, which :meth:`from_json` reads as this very configuration.

        Raises:
            ValueError: what is causal is neither the same in all layers nor by layer type, which has no spelling.
        """
        raw = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": self.attention_bias,
            "vocab_size": self.vocab_size,
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "rope_parameters": self.rope.to_json(),
            "dflash_config": {
                "target_layer_ids": list(self.target_layer_ids),
                "mask_token_id": self.mask_token_id,
            },
        }
        if self.causal != tuple(kind == SLIDING for kind in self.layer_types):
            if len(set(self.causal)) > 1:
                raise ValueError(f"a config.json cannot say which layers are causal: {self.causal}")
            raw["is_causal"] = self.causal[0]
        return raw

    @classmethod
    def read(cls, folder: str | Path) -> "DraftConfig":
        """Of a checkpoint's folder."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"draft_model must be a folder with a config.json, or a DFlashDraft; got {str(folder)!r}")
        return cls.from_json(read_json(path))

    def check_target(self, hidden_size: int, layers: int, vocab_size: int, known_ids: int) -> None:
        """
        Raises:
            ValueError: the draft was made for another target.
        """
        mine = {
            "hidden_size": (self.hidden_size, hidden_size),
            "vocab_size": (self.vocab_size, vocab_size),
            "num_target_layers": (self.num_target_layers, layers),
        }
        for name, (value, wanted) in mine.items():
            if value is not None and value != wanted:
                raise ValueError(f"draft_model is for another model: its {name} is {value}, the model has {wanted}")
        if max(self.target_layer_ids) >= layers:
            raise ValueError(
                f"draft_model is for another model: its target_layer_ids are {list(self.target_layer_ids)}, the model "
                f"has {layers} layers"
            )
        if self.mask_token_id >= known_ids:
            raise ValueError(
                f"draft_model is for another model: its mask_token_id is {self.mask_token_id}, the model has "
                f"{known_ids} embeddings"
            )


def _either(raw: dict, nested: dict, name: str):
    """Of the nested settings first; null is as good as nothing."""
    return raw.get(name) if nested.get(name) is None else nested[name]


def _refuse_relatives(raw: dict, nested: dict) -> None:
    for name in of_kind("architectures", raw.get("architectures"), list, "a list") or ():
        if name != "DFlashDraftModel":
            raise ValueError(f"draft_model has architecture {name}, which is not supported; DFlashDraftModel is")
    projector = _either(raw, nested, "projector_type")
    if projector not in (None, "dflash"):
        raise ValueError(f"draft_model has projector_type {projector!r}, which is not supported")
    for name in OTHER_SETTINGS:
        value = _either(raw, nested, name)
        neutral = {"embed_scale": 1, "draft_vocab_size": raw.get("vocab_size")}.get(name)
        if value is True or value not in (None, False, 0, neutral):
            raise ValueError(f"draft_model sets {name}={value!r}, which is not supported")
    for name, wanted in (("hidden_act", "silu"), ("is_neox_style", True), ("rope_is_neox_style", True)):
        value = _either(raw, nested, name)
        if value not in (None, wanted):
            raise ValueError(f"draft_model sets {name}={value!r}, which is not supported; {wanted!r} is")


def _target_layers(ids, targets: int | None, count: int) -> tuple[int, ...]:
    """As configured, in that order; spread over the target where there is no configuration."""
    if ids is not None:
        return tuple(of_kind("target_layer_ids", ids, list, "a list"))
    if targets is None:
        raise ValueError(
            "the config.json of draft_model must have target_layer_ids, or num_target_layers to derive them from"
        )
    if count == 1:
        return (targets // 2,)
    return tuple(round(1 + index * (targets - 4) / (count - 1)) for index in range(count))


def _layer_types(raw: dict, nested: dict, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Of each layer, and the window. What is written for each layer counts more than flags over all of them."""
    window = nested.get("swa_window_size") or raw.get("sliding_window")
    types = of_kind("layer_types", raw.get("layer_types"), list, "a list")
    if types is not None:
        return tuple(types), window
    if nested.get("use_swa"):
        return (SLIDING,) * layers, window
    if raw.get("use_sliding_window") and window is not None:
        first = raw.get("max_window_layers") or 0
        return tuple(SLIDING if index >= first else FULL for index in range(layers)), window
    return (FULL,) * layers, window
