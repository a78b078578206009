# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which path each part of generation takes, decided once, with a reason for everything that is off."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_hybrid.autotp import check_head, check_shards, sharing_group
from deepspeed_hybrid.compat import ModelCall, causal_model, gdn_kernels, layer_kinds, text_model
from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.generation.peers import Peers
from deepspeed_hybrid.generation.prefill import token_budget_of
from deepspeed_hybrid.ops.collectives import capture_obstacle
from deepspeed_hybrid.ops.decode_step import decode_step, decode_step_reference
from deepspeed_hybrid.ops.fused_silu_mul_halves import fused_silu_mul_halves, fused_silu_mul_halves_reference
from deepspeed_hybrid.ops.gdn_gates import gdn_gates, gdn_gates_reference
from deepspeed_hybrid.ops.loader import op_obstacle
from deepspeed_hybrid.ops.sharded_choice import decode_step_on_shards
from deepspeed_hybrid.ops.sharded_truncate import truncate_scores_on_shards
from deepspeed_hybrid.ops.truncate_scores import truncate_scores, truncate_scores_reference
from deepspeed_hybrid.segments.apply import refuse_kernelized
from deepspeed_hybrid.segments.chains import chain_ops, ops_off, prompt_ops, slot_copy, triton_off
from deepspeed_hybrid.segments.decoder_layer import DecodeOps
from deepspeed_hybrid.segments.gathered import GatheredWeights, is_partitioned, partition_obstacle
from deepspeed_hybrid.segments.gdn import check_scans
from deepspeed_hybrid.segments.injection import HEAD, Injection
from deepspeed_hybrid.segments.plan import Segment, plan_segments

OPS: dict[str, tuple[Callable, Callable]] = {
    "decode_step": (decode_step, decode_step_reference),
    "fused_silu_mul_halves": (fused_silu_mul_halves, fused_silu_mul_halves_reference),
    "gdn_gates": (gdn_gates, gdn_gates_reference),
    "truncate_scores": (truncate_scores, truncate_scores_reference),
}


@dataclass
class Paths:
    """The decisions for one model and configuration."""

    call: ModelCall
    device: torch.device
    graph: bool
    choose: Callable
    truncate: Callable
    copy: Callable
    injection: Injection
    peers: Peers
    layers: list[tuple[str, str, str]] = field(default_factory=list)  # layer, kind, path
    off: dict[str, str] = field(default_factory=dict)  # feature -> why it is off

    @property
    def all_off(self) -> dict[str, str]:
        """``off``, and what the model as it is now adds."""
        sums, prompts = self.injection.sums, self.injection.prompt_obstacle if self.graph else None
        found = {"direct sums": None if sums is None else sums.obstacle, "prompt capture": prompts}
        return {**self.off, **{feature: obstacle for feature, obstacle in found.items() if obstacle is not None}}

    @property
    def notes(self) -> list[str]:
        return [f"{feature} is off: {reason}" for feature, reason in self.all_off.items()]

    def reasons(self) -> dict[str, str]:
        """For the profile: '<feature>_off' -> why."""
        return {f"{feature}_off": reason for feature, reason in self.all_off.items()}

    def require_chains(self, option: str = "batch_invariant=True") -> None:
        """What ``batch_invariant`` and speculative steps rest on, for the model as it is now.

        Raises:
            RuntimeError: a layer, or the head, is no decode chain.
        """
        for index, reason in self.injection.unchained.items():
            if reason is not None:
                where = "the head" if index == HEAD else f"layer {index}"
                raise RuntimeError(f"{option} cannot be honoured: {where} is no decode chain: {reason}")

    def check_model(self, engine) -> None:
        """What of the model may not change between calls.

        Raises:
            ValueError: its weights have a dtype or a place now that they may not have.
            RuntimeError: as of :func:`~deepspeed_hybrid.autotp.check_head`.
        """
        with self.injection.bare():  # an engine's own hooks say nothing
            device = check_weights(engine, self.call.model)
            check_head(self.call.model, self.call.shard)
        if device != self.device:
            raise ValueError(
                f"model is on {device} and was on {self.device} when this rollout was made: move it back, or make a "
                "new HybridEngineRollout"
            )

    def describe(self) -> str:
        lines = _table([("layer", "kind", "path"), *self.layers])
        if self.injection.segments:
            heads = ("layer", "segment", "kernel", "weights", "left alone because")
            lines += ["", *_table([heads, *self.injection.rows()])]
        if self.injection.gathered is not None:
            lines += ["", "weights: packed copies, gathered from ZeRO stage 3 by sync_segki_weights()"]
        if self.peers.group is not None:
            shard = self.call.shard
            ids = "whole on every rank" if shard is None else f"{shard.size} of {shard.total} here"
            lines += ["", f"tensor parallel: {self.peers.count} ranks share the layers; logits {ids}"]
        lines += ["", f"graph capture: {'on' if self.graph else 'off'}"]
        if self.graph and self.injection.prompt_obstacle is None:
            longest, first = self.call.token_budget, "a shape's first forward"
            lines.append(f"prompt capture: on; {first}, and prompts of over {longest} tokens, run eagerly")
        return "\n".join([*lines, *self.notes])

    def empty_cache(self) -> None:
        if self.device.type != "cpu":
            get_accelerator().empty_cache()


def resolve_paths(engine, cfg: HybridEngineRolloutConfig) -> Paths:
    """Check the model and decide.

    Raises:
        ValueError: the model is not supported.
        RuntimeError: the configuration asks for a path that cannot run here.
    """
    model = causal_model(engine.module)
    refuse_kernelized(model)
    device = check_weights(engine, model)
    gathered = GatheredWeights(model, engine, device) if partitions_weights(engine, model) else None
    with gathered.bare() if gathered is not None else nullcontext():
        call = ModelCall(model)
        kinds = layer_kinds(model)
        check_shards(text_model(model).layers, kinds)
        check_scans(model)
        layers = _layer_paths(model, kinds, call)
        segments = plan_segments(model, cfg.segki_kernel)

    obstacle = backend_obstacle(cfg.segki_backend, device)
    if obstacle:
        raise RuntimeError(f"segki_backend={cfg.segki_backend!r} cannot be honoured: {obstacle}")

    off: dict[str, str] = {}
    for name in ("align_decode_fronts", "enable_cache_trimming"):
        if getattr(cfg, name):
            off[name] = "every row has a slot and positions of its own"
    group = sharing_group(model)
    call.token_budget = token_budget_of(device, shared=group is not None)
    graph_obstacle = "there is no CUDA device" if device.type != "cuda" else call.graph_obstacle()
    if graph_obstacle is None and group is not None:
        graph_obstacle = capture_obstacle(group, device)
    graph = _decide("use_graph_capture", cfg.use_graph_capture, graph_obstacle, off)
    obstacle = segments_obstacle(segments)
    fused_kinds = cfg.segki_kernel if _decide("use_segki", cfg.use_segki, obstacle, off) else None
    may_move = zero_stage(engine) == 0
    ops = {name: _op(name, op, reference, device, cfg, off) for name, (op, reference) in OPS.items()}
    chain = chain_ops(device, cfg.segki_backend, cfg.batch_invariant, cfg.train_consistent)
    if device.type == "cuda" and isinstance(chain, DecodeOps):
        off |= ops_off(device.index, chain, cfg.train_consistent)
    if fused_kinds is not None and isinstance(chain, str):
        if cfg.segki_backend == "triton":
            raise RuntimeError(f"segki_backend='triton' cannot be honoured: {chain}")
        off["decode chains"] = chain
    if call.shard is not None:
        fused = device.type == "cuda" and triton_off(cfg.segki_backend) is None
        ops["decode_step"] = partial(decode_step_on_shards, call.shard, fused=fused)
        ops["truncate_scores"] = partial(truncate_scores_on_shards, call.shard)
    paths = Paths(
        call=call,
        device=device,
        graph=graph,
        choose=ops["decode_step"],
        truncate=ops["truncate_scores"],
        copy=slot_copy(device, cfg.segki_backend),
        injection=Injection(
            model,
            fused_kinds,
            may_move,
            ops["fused_silu_mul_halves"],
            ops["gdn_gates"],
            chain,
            gathered,
            prompt_ops(device, cfg.segki_backend, off, cfg.train_consistent),
        ),
        peers=Peers(group, device, replica_of(engine)),
        layers=layers,
        off=off,
    )
    if cfg.batch_invariant:
        paths.require_chains()
    return paths


def zero_stage(engine) -> int:
    """The ZeRO stage of a DeepSpeed engine; 0 for anything else."""
    return engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else 0


def replica_of(engine) -> int:
    """Which of the models that are trained on data of their own a DeepSpeed engine has; 0 for anything else."""
    group = getattr(engine, "data_parallel_group", None)
    return 0 if group is None else deepspeed.comm.get_rank(group=group)


def partitions_weights(engine, model: nn.Module) -> bool:
    """Whether ZeRO-3 has taken the parameters."""
    return zero_stage(engine) == 3 or any(map(is_partitioned, model.parameters()))


def check_weights(engine, model: nn.Module) -> torch.device:
    """The device that the weights are generated with on.

    Raises:
        ValueError: meta, quantised or scattered weights, or partitioned ones that cannot be gathered.
    """
    parameters = dict(model.named_parameters())
    partitioned = partitions_weights(engine, model)
    if partitioned and not hasattr(engine, "global_steps"):
        raise ValueError(
            "model parameters are partitioned (ZeRO stage 3), and engine has no global_steps to tell when copies of "
            "them are stale; pass the engine that deepspeed.initialize() returned"
        )
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ValueError(f"model parameter {name} is on the meta device; load the weights first")
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            what = (
                "quantised" if parameter.element_size() < 2 or not parameter.is_floating_point() else "of another kind"
            )
            raise ValueError(f"model parameter {name} is {what} ({parameter.dtype}); accepted are fp32, bf16, fp16")
        obstacle = partition_obstacle(parameter) if is_partitioned(parameter) else None
        if obstacle:
            raise ValueError(f"model parameter {name} cannot be gathered from ZeRO stage 3: {obstacle}")
    if partitioned:  # parts may be offloaded
        return torch.device(get_accelerator().current_device_name())
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) != 1:
        raise ValueError(f"model must be on one device; its parameters are on {sorted(map(str, devices))}")
    return devices.pop()


def _decide(name: str, asked: bool | None, obstacle: str | None, off: dict[str, str]) -> bool:
    if asked and obstacle:
        raise RuntimeError(f"{name}=True cannot be honoured: {obstacle}")
    reason = "it was set to False" if asked is False else obstacle
    if reason:
        off[name] = reason
    return reason is None


def backend_obstacle(backend: str, device: torch.device) -> str | None:
    """Why ``segki_backend`` cannot be had on a device, before any op is looked at."""
    if backend in ("cuda", "triton") and device.type != "cuda":
        return "there is no CUDA device"
    return None


def segments_obstacle(segments: list[Segment]) -> str | None:
    """Why nothing of a plan can be fused, or None."""
    if any(segment.reason is None for segment in segments):
        return None
    reasons = sorted({segment.reason for segment in segments if segment.reason})
    return "no segment can be injected" + (": " + "; ".join(reasons) if reasons else "")


def _op(
    name: str,
    op: Callable,
    reference: Callable,
    device: torch.device,
    cfg: HybridEngineRolloutConfig,
    off: dict[str, str],
) -> Callable:
    """The CUDA op where it can be built, its torch reference elsewhere."""
    if device.type != "cuda":
        return reference
    if cfg.segki_backend == "torch":
        off[f"{name} op"] = f"segki_backend is {cfg.segki_backend!r}"
        return reference
    obstacle = op_obstacle(name)
    if obstacle is None:
        return op
    if cfg.segki_backend == "cuda":
        raise RuntimeError(f"segki_backend='cuda' cannot be honoured: {obstacle}")
    off[f"{name} op"] = obstacle
    return reference


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _layer_paths(model: nn.Module, kinds: list[str], call: ModelCall) -> list[tuple[str, str, str]]:
    attention = call.config._attn_implementation
    rows = []
    for index, (layer, kind) in enumerate(zip(text_model(model).layers, kinds, strict=True)):
        if kind == "linear_attention":
            path = f"own forward over slots; scan by {gdn_kernels(layer.linear_attn).source}"
        else:
            path = f"transformers forward ({attention}) over KV slots"
        rows.append((str(index), kind, path))
    return rows
