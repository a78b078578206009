# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How long is a speculative step of blocks of 4, 8 and 16 tokens, next to a plain one, and what would that pay?

Random weights: of a preset, and of a draft model of the published geometry (5 layers). The draft proposes for real,
and then a script takes its place, which is right as often as a published draft: every answer is forced to one token,
and a row's drafts are that token up to a place drawn anew for each position. So what has to be committed has the size
that it would have. One prompt is shared by all rows.

"ms_step" is the mean over steps, from the end of one to the end of the next, on the device's clock; "ratio_to_plain"
is over the row of block 1, which is a rollout without a draft. "ms_context" in that row is a step of one token in a
rollout with a draft, whose context follows. "tokens_step" is what came out for a row. "tok_s_A" and "gain_A" are
tokens a second of all rows, and over plain, if drafts in blocks of 16 gave A tokens a step, with one chance for all
places: 5.97 and 3.84 are published for Qwen3.5-4B's draft, in general and on open questions.

"chosen" is the length that the controller of a rollout has settled on, from its own measurements of plain steps and
these blocks, with a draft as right as 5.97; "best" is the fastest one of the table. It is "of_best" as fast there: the
controller does not change for less than a fiftieth.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_hybrid.compat import text_config
from deepspeed_hybrid.config import DRAFT_KV_CACHE_DTYPES, HybridEngineRolloutConfig
from deepspeed_hybrid.generation.batch import SamplingConfig
from deepspeed_hybrid.rollout import HybridEngineRollout
from deepspeed_hybrid.speculative.config import DraftConfig
from deepspeed_hybrid.speculative.controller import FixedBlock, PayingBlock
from deepspeed_hybrid.speculative.draft import DFlashDraft
from deepspeed_hybrid.speculative.drafter import DFlashDrafter
from deepspeed_hybrid.tools import results
from deepspeed_hybrid.tools.bench import random_request
from deepspeed_hybrid.tools.models import PRESETS, build_model, load_config
from deepspeed_hybrid.tools.process import quiet
from deepspeed_hybrid.tools.step_marks import StepMarks

LONGEST = 16
PUBLISHED = (5.97, 3.84)  # tokens a step in blocks of LONGEST
ANSWER, OTHER = 7, 8  # the token that all answers consist of, and a wrong one
TABLE = 4093  # places at which scripts stop to be right, drawn once
SKIPPED = 3  # steps before the first that counts
SETTLING = 600  # tokens of a call in which a controller tries every length, and stays with one
SETTLING_ROWS = 8  # at least, in calls one after another: a row by itself says little of drafts


def draft_config(config) -> DraftConfig:
    """The published draft of Qwen3.5-4B for its hidden size; something like it for another."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    published = hidden == 2560
    raw = dict(
        hidden_size=hidden,
        intermediate_size=9728 if published else 4 * hidden,
        num_hidden_layers=5,
        num_attention_heads=32 if published else 4,
        num_key_value_heads=8 if published else 1,
        head_dim=128 if published else 32,
        vocab_size=config.vocab_size,
        num_target_layers=layers,
        rope_theta=1e7,
        block_size=LONGEST,
        mask_token_id=config.vocab_size - 250 if published else config.vocab_size - 1,
    )
    if layers < 9:  # too few to spread five over them
        raw["target_layer_ids"] = list(range(min(5, layers)))
    return DraftConfig.from_json(raw)


def tokens_of(rate: float, block: int) -> float:
    """Of a row a step, where each draft is right at that rate, given those before it."""
    return sum(rate**place for place in range(block))


def rate_for(tokens: float, block: int = LONGEST) -> float:
    """The rate at which blocks give so many tokens a step."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_of(middle, block) < tokens else (low, middle)
    return low


class Scripted:
    """A drafter that computes its own proposals, and makes others."""

    def __init__(self, drafter: DFlashDrafter, rate: float):
        self.drafter = drafter
        chance = torch.rand(TABLE, LONGEST - 1, generator=torch.Generator().manual_seed(0))
        right = (chance < rate).long().cumprod(dim=1).bool()
        self.drafts = torch.where(right, ANSWER, OTHER).to(drafter.device)
        self.start = torch.zeros((), dtype=torch.int64, device=drafter.device)  # another one is another script

    def __getattr__(self, name: str):
        return getattr(self.drafter, name)

    def propose(self, state, tokens: int, kv_length: int) -> torch.Tensor:
        drafts = self.drafter.propose(state, tokens, kv_length)
        place = (7 * state.length + 101 * state.sample + self.start) % TABLE
        return drafts.copy_(self.drafts[:, : tokens - 1].index_select(0, place))


def forced(choose: Callable) -> Callable:
    """Choose, and then have another token."""

    def run(*arguments) -> None:
        choose(*arguments)
        arguments[8].fill_(ANSWER)

    return run


class Measured:
    """A rollout whose steps leave marks.

    Args:
        draft: None: a plain one.
        settings: of the rollout, beside these.
    """

    def __init__(self, model: nn.Module, draft: DFlashDraft | None, tokens: int, rate: float, **settings):
        speculative = {} if draft is None else {"speculative": "dflash", "draft_model": draft}
        settings |= dict(continuous_cache_capacity=tokens, shrink_tail=False, **speculative)
        # Without a profile, which would wait for the device between steps.
        options = HybridEngineRolloutConfig(**settings)
        engine, tokenizer = SimpleNamespace(module=model), SimpleNamespace(pad_token_id=0, eos_token_id=None)
        self.rollout = HybridEngineRollout(engine, tokenizer, options)
        self.marks = StepMarks(self.rollout)
        arena = self.rollout._arena
        arena.choose = forced(arena.choose)
        if draft is not None:
            self.rollout._speculation.drafter = Scripted(self.rollout._speculation.drafter, rate)

    def step(self, request, batch: int, block: int, steps: int, tokens: float) -> tuple[float, float]:
        """ms of a step, and tokens of a row a step.

        Args:
            tokens: that a step is expected to give.
        """
        if self.rollout._speculation is not None:
            self.rollout._speculation.controller = FixedBlock(block)
        new = round(tokens * (SKIPPED + steps)) + LONGEST
        sampling = SamplingConfig(max_new_tokens=new, temperature=0.0, n_samples_per_prompt=batch)
        for _ in range(2):  # the first captures
            self.marks.clear()
            self.rollout.generate(request, sampling)
        speculation = self.rollout._speculation
        tokens_step = 1.0 if speculation is None else speculation.stats.summary()["tokens_per_step"]
        return self.marks.mean_ms(SKIPPED, steps), tokens_step

    def settles(self, request, batch: int, lengths: tuple[int, ...]) -> tuple[int, dict[int, float]]:
        """The length on which a controller settles that has seen nothing yet, and ms of steps as it finds them."""
        controller = self.rollout._speculation.controller = PayingBlock(lengths)
        sampling = SamplingConfig(max_new_tokens=SETTLING, temperature=0.0, n_samples_per_prompt=batch)
        start = self.rollout._speculation.drafter.start
        for call in range(max(1, SETTLING_ROWS // batch)):
            start.fill_(977 * call)
            self.rollout.generate(request, sampling)
        start.zero_()
        found = {length: round(1000 * controller.seconds[batch, length], 3) for length in lengths}
        return controller.settled(batch), found


def row_of(batch: int, block: int, ms: float, plain: float, tokens: float) -> dict:
    row = {
        "batch": batch,
        "block": block,
        "ms_step": round(ms, 4),
        "ratio_to_plain": round(ms / plain, 3),
        "tokens_step": round(tokens, 2),
    }
    for published in PUBLISHED:
        expected = tokens_of(rate_for(published), block)
        row[f"tok_s_{published}"] = round(1000 * batch * expected / ms)
        row[f"gain_{published}"] = round(expected * plain / ms, 2)
    return row


def show(row: dict, heading: bool) -> None:
    names = [*row_of(1, 1, 1.0, 1.0, 1.0), "ms_context"]
    if heading:
        print("  ".join(names))
    print("  ".join(str(row.get(name, "-")).rjust(len(name)) for name in names), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen3.5-4b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 8, 16], choices=range(2, LONGEST + 1))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--capacity", type=int, default=0, help="tokens a slot has room for, at the least")
    parser.add_argument("--draft-kv-cache-dtype", choices=DRAFT_KV_CACHE_DTYPES)
    parser.add_argument("--draft-side-stream", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file to write, after every row")
    parser.add_argument("--plot", type=Path, help="PNG of the gain by rows")
    options = parser.parse_args()

    quiet()
    start = time.perf_counter()
    config = load_config(options.preset)
    config.eos_token_id = None
    model = build_model(config, seed=0)
    with torch.device(get_accelerator().current_device_name()):
        draft = DFlashDraft(draft_config(text_config(model))).to(next(model.parameters()).dtype).requires_grad_(False)
    rate = rate_for(PUBLISHED[0])
    capacity = options.prompt + round(PUBLISHED[0] * (SKIPPED + options.steps)) + 2 * LONGEST
    capacity = max(capacity, options.prompt + SETTLING + LONGEST, options.capacity)
    settings = {name: getattr(options, name) for name in ("draft_kv_cache_dtype", "draft_side_stream")}
    plain, speculative = Measured(model, None, capacity, rate), Measured(model, draft, capacity, rate, **settings)
    request = random_request(1, options.prompt, model, seed=0)
    rows: list[dict] = []

    def add(row: dict) -> None:
        rows.append(row)
        show(row, heading=len(rows) == 1)
        write()

    def write() -> None:
        if options.out:
            what = f"steps of speculative decoding, {options.preset}, blocks of a draft model of 5 layers"
            results.write_json(options.out, results.measurement(what, rows))

    for batch in options.batches:
        usual, _ = plain.step(request, batch, 1, options.steps, 1.0)
        plain.rollout.release_memory()
        context, _ = speculative.step(request, batch, 1, options.steps, 1.0)
        add(row_of(batch, 1, usual, usual, 1.0) | {"ms_context": round(context, 4)})
        for block in options.blocks:
            ms, tokens = speculative.step(request, batch, block, options.steps, tokens_of(rate, block))
            add(row_of(batch, block, ms, usual, tokens))
        speed = {row["block"]: row[f"tok_s_{PUBLISHED[0]}"] for row in rows if row["batch"] == batch}
        best = max(speed, key=speed.__getitem__)
        chosen, found = speculative.settles(request, batch, (1, *options.blocks))
        rows[-1] |= {
            "chosen": chosen,
            "best": best,
            "of_best": round(speed[chosen] / speed[best], 3),
            "found_ms": found,
        }
        print(f"the controller chooses {chosen}, the fastest is {best}; it found {found} ms", flush=True)
        write()
        speculative.rollout.release_memory()
    print(f"{time.perf_counter() - start:.0f} s")
    if options.plot:
        lines = {
            f"blocks of {block}, {published} tokens a step in blocks of {LONGEST}": [
                row[f"gain_{published}"] for row in rows if row["block"] == block
            ]
            for block in options.blocks
            for published in PUBLISHED
        }
        results.draw(options.plot, options.batches, lines, "rows", "times plain tokens/s", log=True)


if __name__ == "__main__":
    main()
