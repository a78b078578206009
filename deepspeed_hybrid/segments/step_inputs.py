# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a decode step does before its first layer: embeddings in one launch with the first norm, and the rotary
embedding's cos and sin in another. The model's own modules are some fifteen small kernels of torch."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from deepspeed_hybrid.hung_on import hooks_of
from deepspeed_hybrid.ops.rotary_tables import DTYPES as FREQUENCY_DTYPES
from deepspeed_hybrid.ops.rotary_tables import rotary_tables_reference
from deepspeed_hybrid.segments.apply import Binding
from deepspeed_hybrid.segments.decoder_layer import PreparedNorm
from deepspeed_hybrid.segments.known_forwards import CAUSAL_MODEL, DECODER, ROTARY, has_known_forward, is_torchs_own
from deepspeed_hybrid.segments.norm import Norm, as_rms_norm

# ---------------------------------------------------------------------------------------------------------- embedding


def embedding_obstacle(model: nn.Module, decoder: nn.Module, first_layer: str | None) -> str | None:
    """Why the embedding and the first norm cannot be one launch, or None.

    Args:
        first_layer: why the first layer is no chain; None where it is, and takes a norm that somebody has prepared.
    """
    if first_layer is not None:
        return f"the first layer is no chain: {first_layer}"
    module = decoder.embed_tokens
    if type(module) is not nn.Embedding:
        return f"embed_tokens is a {type(module).__module__}.{type(module).__name__}, not a plain embedding"
    if "forward" in module.__dict__ or hooks_of(module) or not is_torchs_own(type(module).forward):
        return "embed_tokens has a forward or hooks of its own"
    if not module.weight.is_contiguous():
        return "the weight of embed_tokens is not contiguous"
    if module.max_norm is not None:
        return "embed_tokens renormalises its rows"
    norm = as_rms_norm(decoder.layers[0].input_layernorm)
    if norm is None or norm.weight.dtype != module.weight.dtype:
        return "embed_tokens and the first norm differ in dtype"
    # What lies between the two must not write into the embeddings.
    for outer, kind in ((decoder, DECODER), (model, CAUSAL_MODEL)):
        if not has_known_forward(outer, kind):
            return f"the forward of {type(outer).__name__} is not known to hand the embeddings on"
    for module in model.modules():
        if any(part is decoder for part in module.modules()):
            # Engines hook the model itself.
            if "forward" in module.__dict__ or (module is not model and hooks_of(module)):
                return f"{type(module).__name__} has a forward or hooks of its own"
    return None


def embedding_binding(module: nn.Embedding, first_norm: Norm, op: Callable, prepared: PreparedNorm) -> Binding:
    """``op`` is ``embedded_rows`` or its reference; ``prepared`` is that of the layers."""
    return Binding(module, partial(embedding_forward, module, first_norm, op, prepared), prepared.forget)


def embedding_forward(
    module: nn.Embedding, first_norm: Norm, op: Callable, prepared: PreparedNorm, input_ids: torch.Tensor
) -> torch.Tensor:
    """[B, T] int64 -> [B, T, D]: ours for one token a row, the module's own for a prompt."""
    if input_ids.shape[-1] != 1:
        return type(module).forward(module, input_ids)
    ids = input_ids.reshape(-1).contiguous()  # those of a prompt of one token may be a column of a wider tensor
    hidden, scaled, squares = op(ids, module.weight, first_norm.weight, first_norm.offset, first_norm.eps)
    if not hidden.is_inference():  # where nobody could tell that the model writes into it
        prepared.put(hidden, first_norm, scaled, squares)
    return hidden.view(*input_ids.shape, hidden.shape[1])


# ------------------------------------------------------------------------------------------------------------- rotary


def rotary_obstacle(module: nn.Module) -> str | None:
    """Why a rotary embedding's tables cannot be one launch, or None."""
    kind = getattr(module, "rope_type", None)
    if not isinstance(kind, str) or "dynamic" in kind or kind == "longrope":
        return f"rope type {kind!r} may change its frequencies with the positions"
    if "forward" in module.__dict__ or hooks_of(module):
        return "the rotary embedding has a forward or hooks of its own"
    inv_freq = module._buffers.get("inv_freq")
    if inv_freq is None or inv_freq.dtype not in FREQUENCY_DTYPES or not inv_freq.is_contiguous():
        return "inv_freq is no contiguous buffer of 16 or 32 bits"
    if not has_known_forward(module, ROTARY):
        return f"the forward of {type(module).__name__} is not that of a known rotary embedding"
    if not _gives_plain_tables(module):
        return f"{type(module).__name__} gives more than the cos and sin of position times inv_freq"
    return None


def _gives_plain_tables(module: nn.Module) -> bool:
    """Found by asking its forward, on frequencies of a probe: the helpers that it calls may be anybody's."""
    inv_freq, scaling = module._buffers.get("inv_freq"), getattr(module, "attention_scaling", None)
    if inv_freq is None or inv_freq.dim() != 1 or not isinstance(scaling, (int, float)):
        return False
    probe = torch.linspace(0.01, 1.0, inv_freq.shape[0], dtype=torch.float32, device="cpu")
    positions = torch.tensor([[0, 1, 7, 1000]], device="cpu")  # far apart, and within fp32 of any way to multiply
    axes = positions[None].expand(3, -1, -1) if hasattr(module, "mrope_section") else positions
    expected = rotary_tables_reference(positions, probe, float(scaling), torch.float32)
    shell = object.__new__(type(module))
    shell.__dict__.update(module.__dict__)
    shell.__dict__["_buffers"] = {**module._buffers, "inv_freq": probe}
    try:
        with torch.no_grad():
            actual = type(module).forward(shell, probe, axes)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return False
    return all(
        one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=1e-6)
        for one, other in zip(actual, expected, strict=True)
    )


def rotary_binding(module: nn.Module, op: Callable, prompt_op: Callable | None) -> Binding:
    """Our forward for a rotary embedding without an obstacle.

    Args:
        op: ``rotary_tables`` or its reference, for one token a row.
        prompt_op: the same for prompts; None: the module's own forward.
    """
    return Binding(module, partial(rotary_forward, module, op, prompt_op))


def rotary_forward(
    module: nn.Module, op: Callable, prompt_op: Callable | None, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [B, T, R] in x's dtype, for positions [B, T] or [axes, B, T] int64.

    Axes are of time, height and width. Where they are one tensor expanded, as a text's are, they are equal, and which
    of them a frequency belongs to does not matter; others are left to the module.
    """
    tables = op if position_ids.shape[-1] == 1 else prompt_op
    one_axis = position_ids.dim() == 2 or position_ids.stride(0) == 0 or position_ids.shape[0] == 1
    if tables is None or not one_axis or module.inv_freq.device != position_ids.device:
        return type(module).forward(module, x, position_ids)
    positions = position_ids if position_ids.dim() == 2 else position_ids[0]
    return tables(positions.contiguous(), module.inv_freq, float(module.attention_scaling), x.dtype)
