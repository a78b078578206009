# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a prompt's forward runs in place of many small kernels of torch, layer by layer in the model's own order."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.ops.shared_sum import SharedSum
from deepspeed_hybrid.segments.apply import Binding
from deepspeed_hybrid.segments.norm import Norm, as_rms_norm, rms_norm


@dataclass(frozen=True)
class PromptOps:
    """The ops of a prompt's forward, by the names of deepspeed_hybrid.ops; None: the model's own code runs."""

    gdn_conv: Callable | None = None
    gdn_chunks: Callable | None = None
    normed_rows: Callable | None = None
    gated_norm: Callable | None = None
    rotary_tables: Callable | None = None
    prompt_heads: Callable | None = None
    gated_heads: Callable | None = None
    keep_tokens: Callable | None = None
    normed_linear: Callable | None = None
    residual_linear: Callable | None = None
    shared_sum: SharedSum | None = None


MODELS_OWN = PromptOps()


def prompt_norms(model: nn.Module) -> list[nn.Module]:
    """The decoder's RMSNorms, at the layers' beginnings and of heads, without hooks or forwards of their own."""
    return [module for module in text_model(model).modules() if as_rms_norm(module) is not None]


def norm_binding(module: nn.Module, normed_rows: Callable) -> Binding:
    """Our forward for an RMSNorm; decode steps of layers that are no chains go through it too."""
    return Binding(module, partial(norm_forward, module, normed_rows, rms_norm(module)))


def norm_forward(module: nn.Module, normed_rows: Callable, norm: Norm, hidden_states: torch.Tensor) -> torch.Tensor:
    """[..., K] -> [..., K] in one launch. Rows at an even distance are read where they lie.

    Where weight and input differ in dtype, families differ in the dtype of the result: theirs then runs.
    """
    if hidden_states.dtype != module.weight.dtype:
        return type(module).forward(module, hidden_states)
    rows = hidden_states.reshape(-1, norm.size)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return normed_rows(rows, module.weight, norm.offset, norm.eps)[0].view(hidden_states.shape)
