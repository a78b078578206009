# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""From a configuration to speculative decoding, or to the reason why there is none."""

from pathlib import Path

from torch import nn

from deepspeed_hybrid.compat import ModelCall, text_config, text_model
from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.paths import Paths
from deepspeed_hybrid.speculative.controller import Controller, FixedBlock, PayingBlock
from deepspeed_hybrid.speculative.draft import DFlashDraft
from deepspeed_hybrid.speculative.drafter import DFlashDrafter
from deepspeed_hybrid.speculative.mtp import MtpDraft
from deepspeed_hybrid.speculative.mtp_drafter import MtpDrafter
from deepspeed_hybrid.speculative.mtp_weights import load_mtp
from deepspeed_hybrid.speculative.speculation import Speculation
from deepspeed_hybrid.speculative.weights import load_draft

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
    return make(cfg.draft_model, cfg.draft_block_size, paths.call)


def dflash_speculation(draft_model: object, block: int | str | None, call: ModelCall) -> Speculation:
    draft = given_draft(draft_model)
    layers = len(text_model(call.model).layers)
    draft.config.check_target(call.embedding.weight.shape[1], layers, call.vocab_size, call.known_ids)
    return Speculation(DFlashDrafter(draft, call), block_controller(block, draft.config.block_size))


def mtp_speculation(draft_model: object, block: int | str | None, call: ModelCall) -> Speculation:
    draft = given_mtp(draft_model, call)
    draft.config.check_target(call.embedding.weight.shape[1])
    controller = mtp_controller(block)
    return Speculation(MtpDrafter(draft, call, controller.most_tokens), controller)


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
