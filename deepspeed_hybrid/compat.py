# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Every difference between versions of transformers and DeepSpeed, found by looking at features, never at numbers."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers.cache_utils import Cache, LinearAttentionLayer, StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deepspeed_hybrid.autotp import head_shard

__all__ = [
    "Cache", "GdnKernels", "LinearAttentionLayer", "ModelCall", "StaticLayer", "adapter_state",
    "attention_configs", "attention_function", "bind_torch_gdn_without_gpu", "causal_model",
    "own_attention", "gdn_kernels", "is_silu", "layer_kinds",
    "text_config", "text_model",
]  # fmt: skip

GDN_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
CHUNK_FUNCTION, RECURRENT_FUNCTION = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
ATTENTION_WITH_DENSE_MASKS = ("sdpa", "eager")


def causal_model(module: nn.Module) -> nn.Module:
    """The Hugging Face model itself: PEFT's adapters live inside its layers, its wrapper only hides the signature.

    Raises:
        ValueError: an adapter that changes the prompt instead of the layers.
    """
    if not hasattr(module, "get_base_model"):
        return module
    config = getattr(module, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"model has a {type(config).__name__} adapter, which adds to the prompt; that is not supported"
        )
    return module.get_base_model()


def adapter_state(module: nn.Module) -> tuple | None:
    """Of a PEFT layer: its active adapters, whether they are off, which are merged, and by what they are scaled."""
    if "merged_adapters" not in module.__dict__:
        return None
    scaling = module.__dict__.get("scaling")
    factors = tuple(scaling.items()) if isinstance(scaling, dict) else ()
    return tuple(module.active_adapters), bool(module.disable_adapters), tuple(module.merged_adapters), factors


def is_silu(activation: object) -> bool:
    """Whether an activation module is x * sigmoid(x)."""
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def attention_function(model: nn.Module) -> object:
    """What the model's attention implementation names at present."""
    return ALL_ATTENTION_FUNCTIONS.get(text_config(model)._attn_implementation)


def own_attention(implementation: str) -> bool:
    """Whether an attention implementation is transformers' own, and not one that somebody registered."""
    function = ALL_ATTENTION_FUNCTIONS.get(implementation)
    if function is None:  # as "eager" is
        return True
    code = getattr(function, "__code__", None)  # what a wrapper says of itself may be copied
    return code is not None and code.co_filename.startswith(os.path.join(os.path.dirname(transformers.__file__), ""))


def text_config(model: nn.Module):
    """The decoder's own configuration, also of a model that reads images."""
    return model.config.get_text_config(decoder=True)


def text_model(model: nn.Module) -> nn.Module:
    """The module that owns the decoder layers and the rotary embedding.

    Raises:
        ValueError: the model has no such module (learned positions, encoder-decoder, ...).
    """
    for module in model.modules():
        if (
            isinstance(getattr(module, "layers", None), nn.ModuleList)
            and hasattr(module, "rotary_emb")
            and hasattr(module, "embed_tokens")
        ):
            return module
    raise ValueError(
        f"model {type(model).__name__} is not supported: no decoder with layers, embed_tokens and "
        "rotary_emb was found (models with learned positions are not accepted)"
    )


def layer_kinds(model: nn.Module) -> list[str]:
    """'full_attention' or 'linear_attention' for every decoder layer.

    Raises:
        ValueError: a layer of another kind; the message names it.
    """
    config, decoder = text_config(model), text_model(model)
    declared = getattr(config, "layer_types", None)
    kinds = []
    for index, layer in enumerate(decoder.layers):
        kind = declared[index] if declared is not None else "full_attention"
        if declared is None and getattr(config, "sliding_window", None) is not None:
            kind = "sliding_attention"
        mixer = getattr(layer, "linear_attn" if kind == "linear_attention" else "self_attn", None)
        known = {
            "full_attention": all(hasattr(mixer, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
            "linear_attention": all(hasattr(mixer, name) for name in ("conv1d", "A_log", "dt_bias", "out_proj")),
        }
        if not known.get(kind, False):
            raise ValueError(
                f"layer {index} of {type(model).__name__} is not supported: kind {kind!r}, mixer "
                f"{type(mixer).__name__}; accepted are full_attention (q/k/v/o projections) and "
                "linear_attention (GatedDeltaNet)"
            )
        kinds.append(kind)
    return kinds


# ---------------------------------------------------------------------------------------------- GatedDeltaNet kernels


@dataclass(frozen=True)
class GdnKernels:
    """The two scans of a GatedDeltaNet layer, resolved once.

    ``grouped`` says that q and k may have fewer heads than v; otherwise the caller repeats them.
    """

    chunk: Callable
    recurrent: Callable
    grouped: bool
    source: str


def gdn_kernels(mixer: nn.Module) -> GdnKernels:
    """FLA's kernels for a layer on CUDA, transformers' torch functions elsewhere.

    FLA's chunk kernels round fp32 products to TF32. Where torch may not do so, fp32 layers are prefilled by the
    recurrent kernel, which has no such product: slower on long prompts, and exact.

    Raises:
        RuntimeError: the layer is on CUDA and FLA cannot be imported; the cause is named.
    """
    if mixer.out_proj.weight.device.type != "cuda":
        functions = sys.modules[type(mixer).__module__]
        return GdnKernels(
            chunk=torch_function(functions, CHUNK_FUNCTION),
            recurrent=torch_function(functions, RECURRENT_FUNCTION),
            grouped=False,
            source="transformers (torch)",
        )
    try:
        fla = importlib.import_module("fla.ops.gated_delta_rule")
    except Exception as cause:
        raise RuntimeError(
            "GatedDeltaNet layers on CUDA need flash-linear-attention, which cannot be imported: "
            f"{type(cause).__name__}: {cause}. Install it with: pip install flash-linear-attention"
        ) from cause
    recurrent = fla.fused_recurrent_gated_delta_rule
    exact = mixer.out_proj.weight.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return GdnKernels(
        chunk=recurrent if exact else fla.chunk_gated_delta_rule,
        recurrent=recurrent,
        grouped=True,
        source="flash-linear-attention" + (", prefill without TF32" if exact else ""),
    )


def bind_torch_gdn_without_gpu() -> list[str]:
    """On a machine without a GPU, make transformers' GatedDeltaNet use its torch functions; return what was rebound.

    transformers binds FLA's kernels when a modeling module is imported, GPU or not, and every forward then fails for
    want of a driver. The functions are looked up as module globals at each call, so that rebinding them helps
    whatever was imported first.
    """
    if get_accelerator().device_name() == "cuda" or importlib.util.find_spec("fla") is None:
        return []
    rebound = []
    for family in GDN_FAMILIES:
        name = f"transformers.models.{family}.modeling_{family}"
        if importlib.util.find_spec(name) is None:
            continue
        functions = importlib.import_module(name)
        for function in (CHUNK_FUNCTION, RECURRENT_FUNCTION):
            if not hasattr(functions, function):
                continue
            setattr(functions, function, torch_function(functions, function))
            rebound.append(f"{family}.{function}")
    return rebound


def torch_function(functions, name: str) -> Callable:
    """The torch function under transformers' kernel decorators."""
    function = getattr(functions, name)
    if isinstance(function, nn.Module):
        function = type(function).forward
    return inspect.unwrap(function)


# ------------------------------------------------------------------------------------------------------ model forward


class ModelCall:
    """A Hugging Face causal language model as a function from tokens to last-position logits.

    It picks the cache keyword, the form of the mask and of the logits option from the model's signature once, and
    checks on the first call that the cache was really used.
    """

    def __init__(self, model: nn.Module):
        decoder = text_model(model)
        parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
        if "logits_to_keep" not in parameters:
            raise ValueError(
                f"model {type(model).__name__} is not supported: its forward has no logits_to_keep, so "
                "that a prefill would compute [B, T, vocabulary] logits"
            )
        self.model = model
        self.config = text_config(model)
        self.cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        if (getattr(self.config, "n_recurrent_loops", None) or 1) > 1:
            raise ValueError(
                f"model {type(model).__name__} is not supported: it runs layers several times (n_recurrent_loops)"
            )
        if getattr(self.config, "is_causal", True) is False:
            raise ValueError(f"model {type(model).__name__} is not supported: its attention is not causal (is_causal)")
        if not own_attention(self.config._attn_implementation) and not self.takes_dense_masks:
            raise ValueError(
                f"model {type(model).__name__} is not supported: attention {self.config._attn_implementation!r} was "
                "registered by somebody else, and cannot be exchanged for one that takes the masks of slots"
            )
        rope = getattr(self.config, "rope_parameters", None) or {}
        self.rope_type = rope.get("rope_type", "default")
        if self.rope_type == "longrope":
            raise ValueError(
                f"model {type(model).__name__} is not supported: rope type 'longrope' chooses its factors by "
                "the longest row of a batch, so that a row would depend on its batch mates"
            )
        self.takes_mask_dict = "causal_mask_mapping" in inspect.unwrap(type(decoder).forward).__code__.co_varnames
        # The auxiliary loss of a mixture of experts is training's; it would read the mask, which here is a dict.
        self.quiet_options = {"output_router_logits": False} if "output_router_logits" in parameters else {}
        self.shard = head_shard(model)
        self.token_budget: int | None = None  # of a prefill forward, where somebody has decided it
        self.forwards = 0
        self.kept_mask: torch.Tensor | None = None
        self._cache_checked = False

    @property
    def vocab_size(self) -> int:
        """Columns of all logits; more than the configuration says where the embedding was padded."""
        head = self.model.get_output_embeddings()
        return self.shard.total if self.shard else getattr(head, "out_features", self.config.vocab_size)

    @property
    def embedding(self) -> nn.Module:
        return text_model(self.model).embed_tokens

    @property
    def known_ids(self) -> int:
        """Rows of the embedding: ids that the model can read. It may be padded, as the head may."""
        return getattr(self.embedding, "num_embeddings", self.config.vocab_size)

    @property
    def takes_dense_masks(self) -> bool:
        return self.config._attn_implementation in ATTENTION_WITH_DENSE_MASKS

    @property
    def additive_mask(self) -> bool:
        return self.config._attn_implementation == "eager"

    def logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | None, cache: Cache
    ) -> torch.Tensor:
        """Logits of the last position.

        Args:
            input_ids, position_ids: [B, T] int64.
            mask: [B, 1, T, K] bool, True where a query sees a key; None for plain causal from position 0.
            cache: holds what came before, and is updated.

        Returns:
            [B, V] in the model's dtype.
        """
        self.forwards += 1
        layers = len(cache.layers)
        output = self.model(
            input_ids=input_ids,
            attention_mask=self._mask_argument(mask, input_ids),
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_keyword: cache},
            **self.quiet_options,
        )
        if not self._cache_checked:
            if len(cache.layers) != layers:
                raise RuntimeError(
                    f"{type(self.model).__name__} is not supported: it adds layers to its cache while it runs"
                )
            self._check(output, cache)
        return output.logits[:, -1]

    def _mask_argument(self, mask: torch.Tensor | None, input_ids: torch.Tensor):
        if mask is None and (self.additive_mask or not self.takes_mask_dict):
            mask = self._causal_mask(input_ids.shape[1], input_ids.device).expand(input_ids.shape[0], -1, -1, -1)
        if mask is not None and self.additive_mask:
            dtype = self.embedding.weight.dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
        return {"full_attention": mask, "linear_attention": None} if self.takes_mask_dict else mask

    def _causal_mask(self, length: int, device: torch.device) -> torch.Tensor:
        """[1, 1, length, length] bool. A decode step of chains, which reads none, has one of a single token: kept."""
        mask = self.kept_mask
        if length > 1 or mask is None or mask.device != device:
            mask = torch.ones(length, length, dtype=torch.bool, device=device).tril_()[None, None]
            self.kept_mask = mask if length == 1 else self.kept_mask
        return mask

    def _check(self, output, cache: Cache) -> None:
        returned = getattr(output, self.cache_keyword, None)
        if returned is not cache:
            raise RuntimeError(f"{type(self.model).__name__} ignored the cache passed as {self.cache_keyword!r}")
        logits, expected = output.logits.shape[-1], self.shard.size if self.shard else self.config.vocab_size
        if logits < expected:
            raise RuntimeError(f"{type(self.model).__name__} returned {logits} logits for a vocabulary of {expected}")
        self._cache_checked = True

    def graph_obstacle(self) -> str | None:
        """Why this model's forward cannot be captured in a CUDA graph, or None."""
        if self.rope_type == "dynamic":
            return "rope type 'dynamic' reads positions on the host at every step"
        return None


def attention_configs(model: nn.Module) -> list:
    """The configurations, each once, in which the decoder's modules read their attention implementation."""
    held = [module.config for module in text_model(model).modules() if hasattr(module, "config")]
    return list({id(config): config for config in (text_config(model), *held)}.values())


@contextmanager
def dense_mask_attention(configs: list) -> Iterator[None]:
    """Run attention through sdpa where a configuration's own implementation takes no dense mask (flash, flex, ...)."""
    named = [(config, config._attn_implementation) for config in configs]
    replaced = [(config, name) for config, name in named if name not in ATTENTION_WITH_DENSE_MASKS]
    for config, _ in replaced:
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        for config, implementation in replaced:
            config._attn_implementation = implementation
