# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The shape of Qwen3.5's native MTP head, which has no configuration but the model's own."""

from dataclasses import dataclass
from pathlib import Path

from deepspeed_hybrid.speculative.files import read_json
from deepspeed_hybrid.speculative.rope import RopeSettings, rope_settings
from deepspeed_hybrid.speculative.settings import is_amount, is_count, needed, of_kind, require

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
PARTIAL_ROTARY = 0.25  # of a head, where a configuration does not say
# The only values of settings that this forward computes; unset is as good.
SUPPORTED = {
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "hidden_act": "silu",
    "attn_output_gate": True,
}
AXES = ("mrope_section", "mrope_interleaved")  # of images: all the same for text


@dataclass(frozen=True)
class MtpConfig:
    """An MTP head's shape. ``rope.head_dim`` is how many dimensions of a head turn, the first ones."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSettings
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            require(name, getattr(self, name), is_count(getattr(self, name)), "an integer of at least 1")
        require(
            "num_attention_heads", self.num_heads, self.num_heads % self.num_kv_heads == 0, "a multiple of kv heads"
        )
        require("rms_norm_eps", self.rms_norm_eps, is_amount(self.rms_norm_eps), "a number above 0")
        turned = self.rope.head_dim
        require(
            "partial_rotary_factor",
            turned / self.head_dim,
            turned % 2 == 0 and 0 < turned <= self.head_dim,
            "an even number of a head's dimensions",
        )

    @classmethod
    def from_json(cls, raw: dict, whose: str = "draft_model") -> "MtpConfig":
        """From the config.json of a Qwen3.5 checkpoint, with images or without.

        Args:
            whose: the configuration is, for messages.

        Raises:
            ValueError: another kind of model, a setting that is not supported or missing; named.
        """
        own = {**raw, **(of_kind("text_config", raw.get("text_config"), dict, "an object") or {})}
        if own.get("model_type") not in MODEL_TYPES:
            raise ValueError(
                f"{whose} has model_type {own.get('model_type')!r}, whose MTP head is not supported; accepted are "
                f"{', '.join(MODEL_TYPES)}"
            )
        for name, supported in SUPPORTED.items():
            if own.get(name) not in (None, supported):
                raise ValueError(f"{whose} sets {name}={own[name]!r}, which is not supported; {supported!r} is")

        names = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
        hidden_size, intermediate_size, heads, head_dim = (needed(own, name, whose) for name in names)
        return cls(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_heads=heads,
            num_kv_heads=own.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            rope=_partial_rope(own, head_dim),
            rms_norm_eps=1e-6 if own.get("rms_norm_eps") is None else own["rms_norm_eps"],
            attention_bias=bool(of_kind("attention_bias", own.get("attention_bias"), bool, "true or false")),
        )

    @classmethod
    def read(cls, folder: str | Path) -> "MtpConfig":
        """Of a checkpoint's folder."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"draft_model must be a folder with a config.json, or an MtpDraft; got {str(folder)!r}")
        return cls.from_json(read_json(path))

    def to_json(self) -> dict:
        """A config.json that :meth:`from_json` reads as this very configuration."""
        rope = self.rope.to_json()
        return {
            "model_type": "qwen3_5_text",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_parameters": {**rope, "partial_rotary_factor": self.rope.head_dim / self.head_dim},
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": self.attention_bias,
            **SUPPORTED,
        }

    def check_target(self, hidden_size: int) -> None:
        """
        Raises:
            ValueError: the head was made for another target.
        """
        if self.hidden_size != hidden_size:
            raise ValueError(
                f"draft_model is for another model: its hidden_size is {self.hidden_size}, the model has {hidden_size}"
            )


def _partial_rope(own: dict, head_dim: int) -> RopeSettings:
    name = "rope_parameters" if own.get("rope_parameters") else "rope_scaling"
    settings = dict(of_kind(name, own.get(name), dict, "an object") or {})
    partial = settings.pop("partial_rotary_factor", None) or own.get("partial_rotary_factor") or PARTIAL_ROTARY
    require("partial_rotary_factor", partial, is_amount(partial), "a number above 0")
    for name in AXES:
        settings.pop(name, None)
    others = {name: own.get(name) for name in ("rope_theta", "max_position_embeddings")}
    return rope_settings({"rope_parameters": settings, **others}, int(head_dim * partial + 1e-6))
