# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""From a configuration to speculative decoding, or to the reason why there is none."""

from pathlib import Path

import torch
from torch import nn

from deepspeed_hybrid.compat import ModelCall, text_config, text_model
from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.ops.attention_streamed import LATEST
from deepspeed_hybrid.paths import Paths
from deepspeed_hybrid.speculative.controller import Controller, FixedBlock, PayingBlock
from deepspeed_hybrid.speculative.draft import DFlashDraft
from deepspeed_hybrid.speculative.drafter import DFlashDrafter
from deepspeed_hybrid.speculative.mtp import MtpDraft
from deepspeed_hybrid.speculative.mtp_drafter import MtpDrafter
from deepspeed_hybrid.speculative.mtp_weights import load_mtp
from deepspeed_hybrid.speculative.side_stream import SideStream
from deepspeed_hybrid.speculative.speculation import Speculation
from deepspeed_hybrid.speculative.weights import load_draft

FP8_CAPABILITY = (8, 9)
LENGTHS = (1, 4, 8, 16)  # to choose from with draft_block_size='auto'
MTP_LENGTHS = (1, 2, 3, 4)  # a pass for each token: their number is what costs
MOST_MTP_TOKENS = 16


def make_speculation(cfg: HybridEngineRolloutConfig, paths: Paths) -> Speculation | None:
    """Of a rollout; None where none is asked for.

    Raises:
        ValueError: ``draft_model`` is not supported, or was made for another model.
        RuntimeError: it cannot be had together with something else that is on.
    """
    if cfg.speculative is None:
        return None
    option = f"speculative={cfg.speculative!r}"
    obstacle = speculation_obstacle(paths)
    if obstacle:
        raise RuntimeError(f"{option} cannot be honoured: {obstacle}")
    paths.require_chains(option)
    make = {"dflash": dflash_speculation, "mtp": mtp_speculation}[cfg.speculative]
    return make(cfg, paths)


def dflash_speculation(cfg: HybridEngineRolloutConfig, paths: Paths) -> Speculation:
    draft, call = given_draft(cfg.draft_model), paths.call
    layers = len(text_model(call.model).layers)
    draft.config.check_target(call.embedding.weight.shape[1], layers, call.vocab_size, call.known_ids)
    drafter = DFlashDrafter(draft, call, draft_cache_dtype(cfg.draft_kv_cache_dtype, paths.device))
    side = SideStream() if cfg.draft_side_stream else None
    controller = block_controller(cfg.draft_block_size, draft.config.block_size)
    if cfg.batch_invariant and controller.most_tokens > LATEST:  # one launch a token, which read ahead of each other
        raise ValueError(
            f"draft_block_size must be at most {LATEST} with batch_invariant=True; got {controller.most_tokens}"
        )
    return Speculation(drafter, controller, side)


def mtp_speculation(cfg: HybridEngineRolloutConfig, paths: Paths) -> Speculation:
    draft, call = given_mtp(cfg.draft_model, paths.call), paths.call
    draft.config.check_target(call.embedding.weight.shape[1])
    controller = mtp_controller(cfg.draft_block_size)
    return Speculation(MtpDrafter(draft, call, controller.most_tokens), controller)


def draft_cache_dtype(asked: str | None, device: torch.device) -> torch.dtype | None:
    """Of a draft model's keys and values; None: the model's own.

    Raises:
        RuntimeError: the device does not have it.
    """
    if asked is None:
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        wanted, found = (".".join(map(str, one)) for one in (FP8_CAPABILITY, torch.cuda.get_device_capability(device)))
        raise RuntimeError(
            f"draft_kv_cache_dtype={asked!r} cannot be honoured: {torch.cuda.get_device_name(device)} has compute "
            f"capability {found}, and fp8 wants {wanted}"
        )
    return torch.float8_e4m3fn


def block_controller(asked: int | str | None, most: int) -> Controller:
    """Of blocks of at most ``most`` tokens."""
    if isinstance(asked, str):
        return PayingBlock((*(length for length in LENGTHS if length < most), most))
    block = asked or most
    if block > most:
        raise ValueError(f"draft_block_size must be at most the draft's own {most}; got {block}")
    return FixedBlock(block)


def mtp_controller(asked: int | str | None) -> Controller:
    """Of blocks that a head proposes, which has no length of its own."""
    if isinstance(asked, str):
        return PayingBlock(MTP_LENGTHS)
    block = asked or MTP_LENGTHS[-1]
    if block > MOST_MTP_TOKENS:
        raise ValueError(f"draft_block_size must be at most {MOST_MTP_TOKENS} with speculative='mtp'; got {block}")
    return FixedBlock(block)


def speculation_obstacle(paths: Paths) -> str | None:
    """What else is on that nobody has built it for."""
    if paths.injection.gathered is not None:
        return "weights are partitioned (ZeRO stage 3)"
    if paths.peers.group is not None:
        return f"{paths.peers.count} ranks share the model (tensor parallel)"
    if type(paths.call.embedding) is not nn.Embedding:
        return f"embed_tokens is a {type(paths.call.embedding).__name__}, not a plain embedding"
    head = paths.call.model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"the head is a {type(head).__name__}, not a plain linear layer"
    return None


def given_draft(draft_model: object) -> DFlashDraft:
    if isinstance(draft_model, DFlashDraft):
        return draft_model
    if isinstance(draft_model, (str, Path)):
        return load_draft(draft_model)
    raise ValueError(f"draft_model must be a folder or a DFlashDraft; got {type(draft_model).__name__}")


def given_mtp(draft_model: object, call: ModelCall) -> MtpDraft:
    if isinstance(draft_model, MtpDraft):
        return draft_model
    if isinstance(draft_model, (str, Path)):
        return load_mtp(draft_model, text_config(call.model).to_dict())
    raise ValueError(f"draft_model must be a folder, a file or an MtpDraft; got {type(draft_model).__name__}")
