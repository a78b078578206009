# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Find the segments of a model by what its modules have. Nothing is changed here.

A segment is a group of projections of one input that can be one product. Its modules must be plain: whatever does more
than a linear map (an adapter, a quantised or sharded layer, a hook) is left as it is, with the reason.
"""

from dataclasses import dataclass

from torch import nn

from deepspeed_hybrid.autotp import gathers, inputs_of, is_column_shard, is_plain, is_sharded
from deepspeed_hybrid.compat import is_silu, text_model
from deepspeed_hybrid.hung_on import global_hooks, hooks_of
from deepspeed_hybrid.segments.gdn import is_gdn
from deepspeed_hybrid.segments.known_forwards import MLP, has_known_forward

GLU, GDN, ATTENTION = "fused_glu", "fused_gdn", "fused_attention"


@dataclass(frozen=True)
class Segment:
    """One group of projections, ``names`` in the order of their rows in the fused weight."""

    layer: int
    kind: str
    path: str
    module: nn.Module
    names: tuple[str, ...]
    reason: str | None = None  # why it is left alone; None: it can be fused

    @property
    def projections(self) -> list[nn.Linear]:
        return [getattr(self.module, name) for name in self.names]


def plan_segments(model: nn.Module, kinds: str = "all") -> list[Segment]:
    """Every segment of the decoder layers, in order; ``kinds`` other than 'all' leaves the rest alone, saying so."""
    segments = []
    for index, layer in enumerate(text_model(model).layers):
        for path, module in layer.named_modules():
            kind, names = _classify(module)
            if kind is None:
                continue
            reason = _obstacle(module, kind, names)
            if reason is None and kinds not in ("all", kind):
                reason = f"segki_kernel is {kinds!r}"
            segments.append(Segment(index, kind, f"layers.{index}.{path}", module, names, reason))
    return segments


def _classify(module: nn.Module) -> tuple[str | None, tuple[str, ...]]:
    def has(*names: str) -> bool:
        return all(isinstance(getattr(module, name, None), nn.Module) for name in names)

    if is_gdn(module):
        split = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return GDN, split if has(*split) else ("in_proj_qkvz", "in_proj_ba")
    if has("q_proj", "k_proj", "v_proj", "o_proj"):
        return ATTENTION, ("q_proj", "k_proj", "v_proj")
    if has("gate_proj", "up_proj", "down_proj"):
        return GLU, ("gate_proj", "up_proj")
    return None, ()


def _obstacle(module: nn.Module, kind: str, names: tuple[str, ...]) -> str | None:
    projections = {name: getattr(module, name) for name in names}
    if global_hooks():
        return "forward hooks of all modules are registered"
    if kind == GLU and ("forward" in module.__dict__ or not has_known_forward(module, MLP)):
        return "it has a forward of its own"
    for name, projection in projections.items():
        obstacle = projection_obstacle(kind, name, projection)
        if obstacle:
            return obstacle
    if len(set(map(is_sharded, projections.values()))) != 1:
        return "ranks share some projections and not all"
    if len({projection.bias is None for projection in projections.values()}) != 1:
        return "some projections have a bias and some have none"
    if kind == GLU and any(projection.bias is not None for projection in projections.values()):
        return "gate and up projections have a bias"
    if kind == GLU and not is_silu(getattr(module, "act_fn", None)):
        return f"activation {type(getattr(module, 'act_fn', None)).__name__} is not SiLU"
    if kind == GLU and hooks_of(module.act_fn):
        return "its activation has forward hooks"
    if len({(projection.weight.dtype, inputs_of(projection)) for projection in projections.values()}) != 1:
        return "projections differ in dtype or input size"
    return None


def projection_obstacle(kind: str, name: str, projection: nn.Module) -> str | None:
    """Why a projection cannot be part of a segment of this kind, or None."""
    if not is_column_shard(projection):
        return linear_obstacle(name, projection)
    if gathers(projection) != (kind == GDN):
        return f"{name} {'gathers' if kind != GDN else 'does not gather'} what its ranks have"
    return None if is_plain(projection) else f"{name} has a forward or hooks of its own"


def linear_obstacle(name: str, projection: nn.Module) -> str | None:
    """Why a module is more than its weight and bias, or None."""
    if type(projection) is not nn.Linear:
        kind_of = f"{type(projection).__module__}.{type(projection).__name__}"
        return f"{name} is a {kind_of}, not a plain linear layer"
    if not projection.weight.is_floating_point():
        return f"{name} is quantised ({projection.weight.dtype})"
    if hooks_of(projection):
        return f"{name} has forward hooks"
    if "forward" in projection.__dict__:
        return f"{name} has a forward of its own"
    return None


def output_obstacle(name: str, projection: nn.Module) -> str | None:
    """The same of one whose own weight an op reads, which takes none that lies transposed."""
    obstacle = linear_obstacle(name, projection)
    if obstacle is None and not projection.weight.is_contiguous():
        obstacle = f"the weight of {name} is not contiguous"
    return obstacle
