# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What DeepSpeed's AutoTP has made of a model's layers; its classes are looked at nowhere else."""

from collections.abc import Iterable

import deepspeed
from deepspeed.module_inject.layers import (
    LinearAllreduce,
    LinearLayer,
    TensorParallel_Layer,
    VocabParallelEmbedding,
    VocabParallelLinear,
)
from torch import nn

from deepspeed_hybrid.ops.vocab_shard import VocabShard

COLUMN_LAYERS = (LinearLayer, VocabParallelLinear)
# Whose forwards compute and communicate on the device alone.
DEVICE_LAYERS = (*COLUMN_LAYERS, LinearAllreduce, VocabParallelEmbedding)


def is_sharded(module: nn.Module) -> bool:
    """Whether a layer holds a share of its weight, and its forward may wait for other ranks."""
    return isinstance(module, TensorParallel_Layer) and module.is_tp_parallel


def sharing_group(model: nn.Module):
    """The ranks that share the model's layers, or None where no layer is shared."""
    return next((module.mp_group for module in model.modules() if is_sharded(module)), None)


def holds_shards(module: nn.Module) -> bool:
    return any(map(is_sharded, module.modules()))


def is_column_shard(module: nn.Module) -> bool:
    """Whether a layer has some of the outputs of a linear layer, and nothing else about it is unusual."""
    return is_sharded(module) and type(module) in COLUMN_LAYERS and not module.defer_collectives_to_compiler


def is_row_shard(module: nn.Module) -> bool:
    """Whether a layer has some of the inputs of a linear layer, adds its product to the others', and nothing else."""
    known = is_sharded(module) and type(module) is LinearAllreduce and not module.defer_collectives_to_compiler
    return known and is_plain(module)


def stays_on_device(module: nn.Module) -> bool:
    """Whether a layer is of a class of AutoTP whose forward never waits for the device."""
    return type(module) in DEVICE_LAYERS and not module.defer_collectives_to_compiler


def gathers(module: nn.Module) -> bool:
    """Whether a column shard hands out the whole output, after a gather."""
    return module.gather_output


def shard_sizes(module: nn.Module) -> list[int]:
    """Outputs of a column shard, or inputs of a row shard, on each rank, in the order of ranks."""
    return list(module._partition_sizes)


def inputs_of(module: nn.Module) -> int:
    """Inputs of a linear layer or column shard."""
    return module._orig_weight_shape[1] if is_sharded(module) else module.in_features


def inputs_here(module: nn.Module) -> int:
    """Inputs that a linear layer, or this rank's row shard, reads."""
    if is_row_shard(module):
        return shard_sizes(module)[deepspeed.comm.get_rank(group=module.mp_group)]
    return module.in_features


def outputs_of(module: nn.Module) -> int | None:
    """Outputs that a projection has on this rank, before any gather; None where it does not say."""
    if is_column_shard(module):
        return shard_sizes(module)[deepspeed.comm.get_rank(group=module.mp_group)]
    return getattr(module, "out_features", None)


def head_shard(model: nn.Module) -> VocabShard | None:
    """The share of the vocabulary that this rank's logits are of; None where they are whole."""
    head = model.get_output_embeddings()
    if not is_column_shard(head) or (gathers(head) and not is_plain(head)):
        return None
    return VocabShard(head.mp_group, shard_sizes(head))


def check_head(model: nn.Module, shard: VocabShard | None) -> None:
    """
    Args:
        shard: what ``head_shard()`` gave when the ways of choosing tokens were decided.

    Raises:
        RuntimeError: logits are whole now and were a rank's share, or the other way round.
    """
    if (head_shard(model) is None) != (shard is None):
        raise RuntimeError(
            "a hook or a forward of the head, whose logits ranks share, was added or removed since this rollout was "
            "made: undo that, or make a new HybridEngineRollout"
        )


def is_plain(module: nn.Module) -> bool:
    """Whether a layer is called as its class has it."""
    hooks = module.__dict__["_forward_pre_hooks"] or module.__dict__["_forward_hooks"]
    return "forward" not in module.__dict__ and not hooks


def check_shards(layers: Iterable[nn.Module], kinds: list[str]) -> None:
    """
    Args:
        layers: the decoder's.
        kinds: 'full_attention' or 'linear_attention' for each.

    Raises:
        ValueError: a rank has no head of some attention layer, or what a GatedDeltaNet layer has is cut across heads.
            Every rank finds the same.
    """
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        mixer = layer.self_attn if kind == "full_attention" else layer.linear_attn
        obstacle = _heads_obstacle(mixer) if kind == "full_attention" else _gdn_obstacle(mixer)
        obstacle = obstacle or _output_obstacle(getattr(layer.mlp, "down_proj", None))
        if obstacle is not None:
            raise ValueError(f"layer {index} is not supported: {obstacle}")


def _heads_obstacle(mixer: nn.Module) -> str | None:
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = getattr(mixer, name)
        if is_column_shard(projection) and 0 in shard_sizes(projection):
            sizes = shard_sizes(projection)
            return (
                f"its heads cannot be shared by {len(sizes)} ranks, as some rank would have nothing of {name} (rows "
                f"of the ranks: {sizes}); choose an autotp_size of at most the number of key-value heads"
            )
    return _output_obstacle(mixer.o_proj)


def _gdn_obstacle(mixer: nn.Module) -> str | None:
    for name, module in mixer.named_modules():
        if is_sharded(module) and not (is_column_shard(module) and gathers(module)):
            return (
                f"{name} of {type(mixer).__name__} is a {type(module).__name__} that cuts across heads; shard the "
                "model by its own plan, with tensor_parallel.autotp_size and deepspeed.initialize()"
            )
    return None


def _output_obstacle(projection: nn.Module | None) -> str | None:
    if projection is not None and is_column_shard(projection) and not gathers(projection):
        return f"ranks have parts of what {projection.name} gives, and neither gather nor add them"
    return None
