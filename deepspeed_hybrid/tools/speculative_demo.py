# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Speculative decoding from nothing: a tiny model learns a language, a draft model learns from its rollouts, and both
generate together what the model generates alone, in fewer steps."""

import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from deepspeed_hybrid.compat import bind_torch_gdn_without_gpu, text_config
from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.generation.batch import RolloutBatch, RolloutRequest, SamplingConfig
from deepspeed_hybrid.rollout import HybridEngineRollout
from deepspeed_hybrid.speculative.config import DraftConfig
from deepspeed_hybrid.speculative.draft import DFlashDraft
from deepspeed_hybrid.speculative.rope import RopeSettings
from deepspeed_hybrid.speculative.train import Answered, DraftTrainer
from deepspeed_hybrid.tools import results
from deepspeed_hybrid.tools.models import build_model, decay_slowly, demo_config
from deepspeed_hybrid.tools.process import quiet
from deepspeed_hybrid.tools.strides import MASK, PAD, VOCAB, sentences
from deepspeed_hybrid.tools.train_draft import set_rate

BLOCK = 8
PROMPT, ANSWER = 8, 56
TARGET_STEPS, TARGET_BATCH, TARGET_RATE = 300, 16, 3e-3
ROLLOUTS, ROLLOUT_ROWS = 12, 64
DRAFT_STEPS, DRAFT_BATCH, DRAFT_RATE, ANCHORS = 1000, 8, 2e-3, 12
PROMPTS = 8  # of the comparison
WANTED = 4.0  # tokens of a row a step, greedy


def speculative_demo(steps: int | None, out: Path, seed: int, model_size: str) -> int:
    """Train both, compare, write ``speculative.json`` in ``out``; returns the exit code.

    Args:
        steps: optimizer steps of the draft model; None takes ``DRAFT_STEPS``. With fewer, its guesses are not judged.
        out: a folder, made if needed.
        seed: of weights, prompts and sampling.
        model_size: a key of ``DEMO_SIZES``.
    """
    quiet()
    torch.set_num_threads(1)  # the tensors are small: more threads would only wait for each other
    bind_torch_gdn_without_gpu()
    chance = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    target = trained_target(seed, model_size, chance)
    taught = time.perf_counter()
    draft = trained_draft(target, seed, DRAFT_STEPS if steps is None else steps, chance)
    drafted = time.perf_counter()
    rows = compare(target, draft, sentences(PROMPTS, PROMPT, chance).to(target.device), seed)
    facts = {"target_seconds": taught - start, "draft_seconds": drafted - taught, "block": BLOCK, "seed": seed}
    results.write_json(
        out / "speculative.json",
        results.measurement("speculative decoding on a tiny Qwen3.5", [{**row, **facts} for row in rows]),
    )
    print(
        f"the model took {facts['target_seconds']:.0f} s, the draft model {facts['draft_seconds']:.0f} s; "
        f"wrote {out / 'speculative.json'}"
    )
    return verdict(rows, judged=steps is None or steps >= DRAFT_STEPS)


def trained_target(seed: int, size: str, chance: torch.Generator) -> nn.Module:
    """A Qwen3.5 that speaks the language."""
    config = demo_config(size, VOCAB, pad_token_id=PAD, bos_token_id=None, eos_token_id=None)
    model = build_model(config, seed, dtype=torch.float32).train()
    decay_slowly(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TARGET_RATE)
    for step in tqdm(range(TARGET_STEPS), desc="model", unit="step"):
        set_rate(optimizer, TARGET_RATE, step, TARGET_STEPS)
        ids = sentences(TARGET_BATCH, 48, chance).to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"the model's loss is {loss.item():.2f}")
    return model.eval()


def trained_draft(target: nn.Module, seed: int, steps: int, chance: torch.Generator) -> DFlashDraft:
    """A draft model that has seen what the target says, and what it thinks while it says it."""
    rollout = HybridEngineRollout(SimpleNamespace(module=target), _tokenizer())
    sampling = SamplingConfig(max_new_tokens=ANSWER, temperature=1.0)
    heard = []
    for index in range(ROLLOUTS):
        sampling.seed = seed * 1000003 + index
        heard.append(Answered.of(_answers(rollout, sentences(ROLLOUT_ROWS, PROMPT, chance), sampling)))
    rollout.shutdown()

    torch.manual_seed(seed)
    draft = DFlashDraft(draft_config(target)).to(target.device)
    trainer = DraftTrainer(target, draft, DRAFT_RATE, ANCHORS, seed=seed)
    features = [trainer.features(rows) for rows in heard]
    for step in tqdm(range(steps), desc="draft model", unit="step"):
        set_rate(trainer.optimizer, DRAFT_RATE, step, steps)
        rows, known = heard[step % ROLLOUTS], features[step % ROLLOUTS]
        some = torch.randint(0, ROLLOUT_ROWS, (DRAFT_BATCH,), generator=chance).to(target.device)
        outcome = trainer.update(Answered(rows.ids[some], rows.answered[some]), known[some])
    shares = " ".join(f"{share:.2f}" for share in outcome.right.tolist())
    print(f"the draft model's loss is {outcome.loss:.2f}; right by place in a block: {shares}")
    return draft


def draft_config(target: nn.Module) -> DraftConfig:
    config = text_config(target)
    return DraftConfig(
        hidden_size=config.hidden_size,
        intermediate_size=2 * config.hidden_size,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=32,
        block_size=BLOCK,
        target_layer_ids=(0, 1, 2),
        mask_token_id=MASK,
        vocab_size=VOCAB,
        rope=RopeSettings(32),
        num_target_layers=config.num_hidden_layers,
    )


def compare(target: nn.Module, draft: DFlashDraft, prompts: torch.Tensor, seed: int) -> list[dict]:
    """The same calls, plain and speculative; a row for each kind of sampling."""
    rows = []
    engine = SimpleNamespace(module=target)
    speculative = HybridEngineRolloutConfig(enable_profiling=True, speculative="dflash", draft_model=draft)
    plain = HybridEngineRollout(engine, _tokenizer(), HybridEngineRolloutConfig(enable_profiling=True))
    faster = HybridEngineRollout(engine, _tokenizer(), speculative)
    for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        sampling = SamplingConfig(max_new_tokens=ANSWER, temperature=temperature, seed=seed)
        expected, batch = (_answers(one, prompts, sampling) for one in (plain, faster))
        profile, figures = plain.get_last_profile(), faster.get_last_profile()
        assert profile is not None and figures is not None
        row = {
            "sampling": kind,
            "identical": bool(torch.equal(expected.input_ids, batch.input_ids)),
            "plain_steps": profile["num_decode_forwards"],
            "steps": figures["num_decode_forwards"],
            "tokens_per_step": figures["speculation"]["tokens_per_step"],
            "acceptance": figures["speculation"]["acceptance"][BLOCK],
        }
        shares = " ".join("-" if share is None else f"{share:.2f}" for share in row["acceptance"])
        print(
            f"{kind:8s} {'identical' if row['identical'] else 'DIFFERENT'}  {row['steps']} steps, plain "
            f"{row['plain_steps']}  {row['tokens_per_step']:.2f} of {BLOCK} tokens a step  accepted by place: {shares}"
        )
        rows.append(row)
    plain.shutdown()
    faster.shutdown()
    return rows


def verdict(rows: list[dict], judged: bool) -> int:
    """The exit code; prints what is wrong."""
    different = [row["sampling"] for row in rows if not row["identical"]]
    if different:
        print(f"speculative answers differ from plain ones: {', '.join(different)}")
        return 1
    if not judged:
        print(f"fewer than {DRAFT_STEPS} steps: the guesses are not judged")
        return 0
    if rows[0]["tokens_per_step"] < WANTED:
        print(f"the draft model was not learned: under {WANTED} tokens a step")
        return 1
    return 0


def _answers(rollout: HybridEngineRollout, prompts: torch.Tensor, sampling: SamplingConfig) -> RolloutBatch:
    return rollout.generate(RolloutRequest(prompts, torch.ones_like(prompts)), sampling)


def _tokenizer() -> SimpleNamespace:
    return SimpleNamespace(pad_token_id=PAD, eos_token_id=None)
