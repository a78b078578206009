# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Train a draft model, or an MTP head, for a model on disk, on its own answers or on a text, and save it."""

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file

from deepspeed_hybrid.compat import text_config
from deepspeed_hybrid.generation.batch import RolloutRequest, SamplingConfig
from deepspeed_hybrid.rollout import HybridEngineRollout
from deepspeed_hybrid.speculative.config import DraftConfig
from deepspeed_hybrid.speculative.draft import DFlashDraft
from deepspeed_hybrid.speculative.mtp import MtpDraft
from deepspeed_hybrid.speculative.mtp_config import MtpConfig
from deepspeed_hybrid.speculative.mtp_train import MtpTrainer
from deepspeed_hybrid.speculative.mtp_weights import has_mtp, load_mtp, save_mtp
from deepspeed_hybrid.speculative.rope import RopeSettings
from deepspeed_hybrid.speculative.train import Answered, DraftTrainer, FeatureTrainer
from deepspeed_hybrid.speculative.weights import save_draft
from deepspeed_hybrid.tools.device import has_cuda
from deepspeed_hybrid.tools.process import quiet

WARM_UP, LAST_RATE = 40, 0.05  # steps up to the learning rate; the share of it that the last step has
RATE, FOLLOWING_RATE = 6e-4, 1e-5  # from scratch, and of a head that the model brings
LAYERS, BLOCK, MTP_BLOCK = 5, 16, 4


def train_draft(
    kind: str,
    model: str,
    prompts: Path | None,
    text: Path | None,
    out: Path,
    steps: int,
    rows: int,
    tokens: int,
    reuse: int,
    layers: int | None,
    block: int | None,
    mask_token: int | None,
    anchors: int,
    rate: float | None,
    temperature: float,
    seed: int,
) -> int:
    """Returns the exit code.

    Args:
        kind: 'dflash', or 'mtp', which goes on from the head that the model brings where it has one.
        model: a folder or a name that transformers loads a causal model and its tokenizer from.
        prompts: a file with a prompt a line, to train on the model's own answers to them; or
        text: a file to train on as it is.
        out: the folder of the draft checkpoint.
        steps: optimizer steps.
        rows: of a step.
        tokens: of an answer, or of a row of text.
        reuse: steps on one batch of answers.
        layers: of a DFlash draft model; None: 5.
        block: tokens of a block; None: 16, and 4 for a head.
        mask_token: id of the token that stands for DFlash's guesses; None: the first that the tokenizer does not use.
        anchors: blocks a row.
        rate: AdamW's learning rate; None: 6e-4, and 1e-5 for a head that the model brings.
        temperature: of the answers.
        seed: of weights, the order of prompts, answers and anchors.

    Raises:
        ValueError: no such folder or file, a file with nothing to train on, no token to spare, an option of the other
            kind, or ``out`` is the model's own folder.
    """
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():  # transformers would take it for a name
        raise ValueError(f"--model must be a folder, or a name that transformers knows; got {model!r}")
    for option, file in (("--prompts", prompts), ("--text", text)):
        if file is not None and not file.is_file():
            raise ValueError(f"{option} must be a file; got {str(file)!r}")
    if kind == "mtp" and (layers, mask_token) != (None, None):
        raise ValueError("--layers and --mask-token are of a DFlash draft model: leave them out with --kind mtp")
    if out.exists() and Path(model).exists() and out.samefile(model):
        raise ValueError(f"--out must be another folder than the model's, whose files it would overwrite; got {out}")
    quiet()
    device = get_accelerator().current_device_name()
    tokenizer = AutoTokenizer.from_pretrained(model)
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16 if has_cuda() else torch.float32)
    target = target.to(device).eval().requires_grad_(False)
    torch.manual_seed(seed)
    trainer: FeatureTrainer
    if kind == "mtp":
        head, own_rate = mtp_head(target, model)
        rate = own_rate if rate is None else rate
        trainer = MtpTrainer(target, head.to(device), rate, MTP_BLOCK if block is None else block, anchors, seed=seed)
    else:
        rate = RATE if rate is None else rate
        sizes = LAYERS if layers is None else layers, BLOCK if block is None else block
        config = fresh_config(target, len(tokenizer), *sizes, mask_token)
        trainer = DraftTrainer(target, DFlashDraft(config).to(device), rate, anchors, seed=seed)
    if prompts is not None:
        batches = answers(target, tokenizer, prompts, rows, tokens, temperature, seed)
    elif text is not None:
        batches = passages(tokenizer, text, rows, tokens, seed, device)
    else:
        raise ValueError("give one of --prompts and --text")

    progress = tqdm(range(steps), desc="draft model", unit="step", disable=None)
    for step in progress:
        if step % reuse == 0:
            batch = next(batches)
            features = trainer.features(batch)
        set_rate(trainer.optimizer, rate, step, steps)
        outcome = trainer.update(batch, features)
        progress.set_postfix(loss=f"{outcome.loss:.2f}")
    shares = " ".join(f"{share:.2f}" for share in outcome.right.tolist())
    (save_mtp if kind == "mtp" else save_draft)(trainer.draft, out, target.dtype)
    print(f"loss {outcome.loss:.2f}; right by place in a block, on what it was trained on last: {shares}")
    print(f"wrote {out}; use it as HybridEngineRolloutConfig(speculative={kind!r}, draft_model={str(out)!r})")
    return 0


def mtp_head(target: nn.Module, model: str) -> tuple[MtpDraft, float]:
    """The head that the model's checkpoint has, or a new one, in fp32; and the rate that suits it."""
    folder = Path(cached_file(model, "config.json")).parent
    if has_mtp(folder):
        print("training goes on from the model's own MTP head")
        return load_mtp(folder).float(), FOLLOWING_RATE
    print("the model has no MTP head: training starts from random weights")
    return MtpDraft(MtpConfig.from_json(text_config(target).to_dict(), "the model")), RATE


def fresh_config(target: nn.Module, used: int, layers: int, block: int, mask_token: int | None) -> DraftConfig:
    """For a draft model of a target, in the proportions of those that are published.

    Args:
        used: ids that the tokenizer uses, from 0 on.
    """
    config = text_config(target)
    hidden, depth = config.hidden_size, config.num_hidden_layers
    known = target.get_input_embeddings().num_embeddings
    if mask_token is None:
        if used >= known:
            raise ValueError(f"all {known} embeddings of the model belong to tokens; name one with --mask-token")
        mask_token = used
    head_dim = 128 if hidden >= 1024 else 32
    kv_heads = max(1, hidden // (320 if hidden >= 1024 else 128))
    rope = getattr(config, "rope_parameters", None) or {}
    theta = float(rope.get("rope_theta") or 1e6)
    vocab_size = target.get_output_embeddings().out_features
    draft = DraftConfig(
        hidden_size=hidden,
        intermediate_size=max(1, round(3.8 * hidden / 128)) * 128,
        num_layers=layers,
        num_heads=4 * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block,
        target_layer_ids=spread_layers(depth, layers),
        mask_token_id=mask_token,
        vocab_size=vocab_size,
        rope=RopeSettings(head_dim, theta),
        num_target_layers=depth,
    )
    draft.check_target(hidden, depth, vocab_size, known)
    return draft


def spread_layers(depth: int, count: int) -> tuple[int, ...]:
    """As published drafts have them: from the second layer to the third last; of a flat model from first to last."""
    first, last = (1, depth - 3) if depth - 3 >= count else (0, depth - 1)
    if count == 1:
        return (depth // 2,)
    return tuple(sorted({round(first + index * (last - first) / (count - 1)) for index in range(count)}))


def answers(
    target: nn.Module, tokenizer, file: Path, rows: int, tokens: int, temperature: float, seed: int
) -> Iterator[Answered]:
    """The model's answers to ``rows`` prompts at a time, in a new order each time round, for ever.

    Prompts that are all answered by one token, as by an end, are passed over: there is nothing to guess behind it.

    Raises:
        ValueError: there is no prompt, or none has a longer answer.
    """
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{file} has no prompt")
    encoded = [tokenizer(line)["input_ids"] for line in lines]
    chance, pad = random.Random(seed), tokenizer.pad_token_id
    if pad is None:
        pad = 0  # of what is masked
    speaks = SimpleNamespace(pad_token_id=pad, eos_token_id=tokenizer.eos_token_id)
    rollout = HybridEngineRollout(SimpleNamespace(module=target), speaks)
    waiting: list[list[int]] = []
    call, longer = 0, False
    while True:
        while len(waiting) < rows:
            waiting += chance.sample(encoded, len(encoded))
        some, waiting = waiting[:rows], waiting[rows:]
        width = max(map(len, some))
        ids = torch.tensor([[pad] * (width - len(one)) + one for one in some])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in some])
        sampling = SamplingConfig(max_new_tokens=tokens, temperature=temperature, seed=seed * 1000003 + call)
        batch = rollout.generate(RolloutRequest(ids.to(target.device), mask.to(target.device)), sampling)
        call += 1
        if int(batch.response_lengths.max()) > 1:
            longer = True
            yield Answered.of(batch)
        elif not longer and call * rows >= len(encoded):
            raise ValueError(f"the model answers no prompt of {file} with more than one token")


def passages(
    tokenizer, file: Path, rows: int, tokens: int, seed: int, device: str | torch.device
) -> Iterator[Answered]:
    """``rows`` pieces of the text from anywhere in it, all of which counts as an answer, for ever."""
    ids = torch.tensor(tokenizer(file.read_text(), add_special_tokens=False)["input_ids"], dtype=torch.int64)
    if len(ids) < 2:
        raise ValueError(f"{file} has fewer than two tokens")
    length, chance = min(tokens, len(ids)), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(ids) - length + 1, (rows,), generator=chance)
        pieces = ids[starts[:, None] + torch.arange(length)].to(device)
        yield Answered(pieces, torch.ones_like(pieces, dtype=torch.bool))


def set_rate(optimizer: torch.optim.Optimizer, rate: float, step: int, steps: int) -> None:
    """Warm up, then come down in a line."""
    for group in optimizer.param_groups:
        group["lr"] = rate * min(1.0, (step + 1) / WARM_UP) * max(LAST_RATE, 1 - step / steps)
