# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A draft's rotary embedding, from whichever of its spellings a checkpoint has. The target's is never inherited."""

import math
from dataclasses import dataclass

import torch

from deepspeed_hybrid.speculative.settings import is_amount, is_count, of_kind, require

DEFAULT_THETA = 10000.0
KINDS = ("default", "linear", "yarn")
NEVER = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class RopeSettings:
    """Frequencies of a rotary embedding over whole heads, first half against second."""

    head_dim: int
    theta: float = DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    original_positions: int | None = None  # for yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: yarn's own
    truncate: bool = True

    def to_json(self) -> dict:
        """What :func:`rope_settings` reads as these settings, under ``rope_parameters``."""
        settings: dict = {"rope_type": self.kind, "rope_theta": self.theta}
        if self.kind != "default":
            settings["factor"] = self.factor
        if self.kind == "yarn":
            settings |= {
                "original_max_position_embeddings": self.original_positions,
                "beta_fast": self.beta_fast,
                "beta_slow": self.beta_slow,
                "attention_factor": self.attention_factor,
                "truncate": self.truncate,
            }
        return settings

    def inv_freq(self) -> torch.Tensor:
        """[head_dim / 2] fp32."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        plain = 1.0 / self.theta**exponents
        if self.kind == "default":
            return plain
        if self.kind == "linear":
            return plain / self.factor
        low, high = self._turns_dim(self.beta_fast), self._turns_dim(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        ramp = (torch.arange(self.head_dim // 2).float() - low) / max(high - low, 0.001)
        slow = ramp.clamp(0, 1)  # 1: turns so slowly that positions are interpolated
        return plain / self.factor * slow + plain * (1 - slow)

    @property
    def scaling(self) -> float:
        """Of cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.kind == "yarn" and self.factor > 1 else 1.0

    def _turns_dim(self, turns: float) -> float:
        """The dimension that makes so many turns over the positions trained on."""
        positions = self.original_positions or 0
        return self.head_dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


class Rotary:
    """A rotary embedding's tables. It is no module: a cast of the model to 16 bits must not round frequencies.

    Args:
        settings: ``head_dim`` of them is how many dimensions of a head turn, the first ones.
    """

    def __init__(self, settings: RopeSettings):
        self._scaling, self._inv_freq = settings.scaling, settings.inv_freq()

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [..., 1, turned dimensions] of positions [...]."""
        if self._inv_freq.device != positions.device:
            self._inv_freq = self._inv_freq.to(positions.device)
        angles = positions[..., None].float() * self._inv_freq
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._scaling).to(dtype)


def rotated(heads: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """[B, T, H, E], of which as many dimensions turn as the tables have, the first half of them against the second."""
    cos, sin = tables
    turning, still = heads.split([cos.shape[-1], heads.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    return torch.cat([turning * cos + torch.cat([-second, first], dim=-1) * sin, still], dim=-1)


def rope_settings(raw: dict, head_dim: int) -> RopeSettings:
    """From ``rope_parameters``, or ``rope_scaling`` with its theta or without, or ``rope_theta`` alone.

    Raises:
        ValueError: a kind of rotary embedding that is not supported, or settings that it lacks.
    """
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    settings = of_kind(name, raw.get(name), dict, "an object") or {}
    by_type = [value for value in settings.values() if isinstance(value, dict)]
    if by_type:
        if any(value != by_type[0] for value in by_type):
            raise ValueError("draft_model has other rope settings for each layer type, which is not supported")
        settings = by_type[0]
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in KINDS:
        raise ValueError(f"draft_model has rope type {kind!r}, which is not supported; {', '.join(KINDS)} are")
    for name in NEVER:
        if settings.get(name) or raw.get(name):
            raise ValueError(f"draft_model sets {name} for rope, which is not supported")
    partial = settings.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"draft_model sets partial_rotary_factor={partial}, which is not supported")
    theta = settings.get("rope_theta") or raw.get("rope_theta") or DEFAULT_THETA
    require("rope_theta", theta, is_amount(theta, above=1), "a number above 1")
    if kind == "default":
        return RopeSettings(head_dim, float(theta))
    factor = settings.get("factor")
    if factor is None:
        raise ValueError(f"draft_model has rope type {kind!r} without its factor")
    require("rope factor", factor, is_amount(factor), "a number above 0")
    if kind == "linear":
        return RopeSettings(head_dim, float(theta), kind, float(factor))
    if settings.get("mscale") or settings.get("mscale_all_dim"):
        raise ValueError("draft_model sets mscale for rope, which is not supported")
    positions = settings.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
    if positions is None:
        raise ValueError("draft_model has rope type 'yarn' without original_max_position_embeddings")
    require("original_max_position_embeddings", positions, is_count(positions), "an integer of at least 1")
    fast, slow = settings.get("beta_fast") or 32, settings.get("beta_slow") or 1
    scaling, truncate = settings.get("attention_factor"), settings.get("truncate", True)
    for name, value in (("beta_fast", fast), ("beta_slow", slow)):
        require(f"rope {name}", value, is_amount(value), "a number above 0")
    require("rope attention_factor", scaling, scaling is None or is_amount(scaling), "a number above 0")
    require("rope truncate", truncate, isinstance(truncate, bool), "true or false")
    betas = float(fast), float(slow)
    return RopeSettings(head_dim, float(theta), kind, float(factor), positions, *betas, scaling, truncate)
