# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""From a request to rows: everything is checked here, before any state changes."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from deepspeed_hybrid.config import is_integer
from deepspeed_hybrid.generation.batch import AUTO, LOGPROB_MODES, SamplingConfig
from deepspeed_hybrid.generation.sampling import SamplingKind

# A smaller one divides logits out of fp32's range; DeepSpeed has the same floor.
LOWEST_TEMPERATURE = 1e-8
SMALLEST, LARGEST = 1e-30, 1e30  # logits stay finite in fp32 when they are multiplied or divided by these
PENALTIES = f"a positive number, from {SMALLEST} to {LARGEST}"
MOST = 2**31 - 1  # new tokens of a row, and samples of a prompt
MOST_CELLS = 2**59  # of a tensor whose bytes int64 can count
READ_ON_HOST = 16384  # tokens whose reading takes less time than a dozen launches

# generation_config fields that change which tokens come out. temperature, top_k, top_p and min_p are SamplingConfig's
# business; what is listed here would be dropped in silence, so it is refused by name.
UNSUPPORTED_PROCESSORS = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "constraints": (),
    "diversity_penalty": (0.0,),
    "dola_layers": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_decoder_ids": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "sequence_bias": (),
    "stop_strings": (),
    "suppress_tokens": (),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1.0,),
    "watermarking_config": (),
}


@dataclass(frozen=True)
class Prompts:
    """Checked prompts on the model's device: ids [B, T] int64 left-padded with 0, and the real lengths."""

    ids: torch.Tensor
    lengths: list[int]


@dataclass(frozen=True)
class SamplingPlan:
    """Checked sampling options, with the generation_config's share filled in."""

    kind: SamplingKind
    max_new_tokens: int
    samples: int
    seed: int | None  # None: to be drawn
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    penalty: float
    stop_ids: tuple[int, ...]
    limits: tuple[int, ...] | None = None  # of each row, where they differ from max_new_tokens; that is the largest

    def limit(self, row: int) -> int:
        """Most new tokens of a row."""
        return self.max_new_tokens if self.limits is None else self.limits[row]


def check_prompts(prompt_ids: torch.Tensor, mask: torch.Tensor, vocab_size: int, device: torch.device) -> Prompts:
    """Validate left-padded prompts.

    Raises:
        ValueError: no tensors, no prompt or no token, a row that is all padding, a mask that is not 0/1, has holes or
            pads on the right, ids that are no integers or outside the vocabulary.
    """
    for name, given in (("prompt_ids", prompt_ids), ("prompt_attention_mask", mask)):
        if not isinstance(given, torch.Tensor):
            raise ValueError(f"{name} must be a tensor; got {type(given).__name__}")
    if prompt_ids.dim() != 2 or mask.shape != prompt_ids.shape:
        raise ValueError(
            f"prompt_ids and prompt_attention_mask must both be [B, T]; got {tuple(prompt_ids.shape)} "
            f"and {tuple(mask.shape)}"
        )
    if prompt_ids.numel() == 0:
        raise ValueError(f"prompt_ids must hold at least one row and one token; got shape {tuple(prompt_ids.shape)}")
    if prompt_ids.is_floating_point() or prompt_ids.is_complex() or prompt_ids.dtype == torch.bool:
        raise ValueError(f"prompt_ids must have an integer dtype; got {prompt_ids.dtype}")

    ids, padding = prompt_ids.long(), mask
    seen, mask = (ids.cpu(), mask.cpu()) if ids.numel() <= READ_ON_HOST else (ids, mask)
    outside = (seen < 0) | (seen >= vocab_size)
    if not torch.stack([(mask != 1).any(), outside.any()]).any():  # no padding, and nothing to name
        # A copy: the caller may write to prompts while rows wait.
        return Prompts(ids=ids.to(device, copy=True), lengths=[ids.shape[1]] * ids.shape[0])

    ids = ids.masked_fill(padding == 0, 0).to(device)
    real = mask != 0
    falls = (real[:, :-1] & ~real[:, 1:]).any(dim=1)
    rises = (~real[:, :-1] & real[:, 1:]).sum(dim=1) + real[:, 0].long() > 1
    odd = (real & (mask != 1)).any(dim=1)
    strange = (outside & real).any(dim=1)
    facts = torch.stack([real.sum(dim=1), falls.long(), rises.long(), odd.long(), strange.long()]).tolist()
    for row, (length, fall, rise, other, out) in enumerate(zip(*facts, strict=True)):
        if other:
            raise ValueError(f"prompt_attention_mask row {row} must hold only 0 and 1; got {mask[row].tolist()}")
        if length == 0:
            raise ValueError(f"prompt_attention_mask row {row} is all padding; every prompt needs a token")
        if fall:
            raise ValueError(
                f"prompt_attention_mask row {row} {'has holes' if rise else 'pads on the right'}; "
                "prompts must be left-padded: zeros, then ones"
            )
        if out:
            strangers = seen[row][(outside & real)[row]].tolist()
            raise ValueError(f"prompt_ids row {row} has ids outside the vocabulary [0, {vocab_size}): {strangers}")
    return Prompts(ids=ids, lengths=facts[0])


def check_sampling(sampling, vocab_size: int, generation_config, tokenizer) -> SamplingPlan:
    """Validate a SamplingConfig (ours or DeepSpeed's) and merge the generation_config's penalty and stop ids.

    Raises:
        ValueError: names the argument, what arrived and what is accepted; also for a generation_config that sets a
            processor that would otherwise be dropped.
    """
    defaults = SamplingConfig(max_new_tokens=1)
    if not hasattr(sampling, "max_new_tokens"):
        raise ValueError(f"sampling must be a SamplingConfig, with max_new_tokens; got {type(sampling).__name__}")
    options = {name: getattr(sampling, name, default) for name, default in vars(defaults).items()}
    _check_options(options, vocab_size)
    refuse_processors(generation_config)

    penalty = options["repetition_penalty"]
    if penalty is None:
        penalty = getattr(generation_config, "repetition_penalty", None)
        penalty = 1.0 if penalty is None else penalty
        _require("generation_config.repetition_penalty", penalty, _is_penalty(penalty), PENALTIES)
    sampled = options["temperature"] > 0
    top_k = options["top_k"] if 0 < options["top_k"] < vocab_size else 0
    return SamplingPlan(
        kind=SamplingKind(
            sampled=sampled,
            truncated=sampled and (top_k > 0 or options["top_p"] < 1 or options["min_p"] > 0),
            penalised=penalty != 1.0,
            raw_logprobs=options["logprobs_mode"] == "raw",
        ),
        max_new_tokens=options["max_new_tokens"],
        samples=options["n_samples_per_prompt"],
        seed=options["seed"],
        temperature=max(float(options["temperature"]), LOWEST_TEMPERATURE) if sampled else 0.0,
        top_k=top_k,
        top_p=float(options["top_p"]),
        min_p=float(options["min_p"]),
        penalty=float(penalty),
        stop_ids=stop_ids(tokenizer, generation_config, options["stop_token_ids"]),
    )


def _check_options(options: dict, vocab_size: int) -> None:
    def require(name: str, accepted: bool, what: str) -> None:
        _require(name, options[name], accepted, what)

    def number(name: str) -> bool:
        return isinstance(options[name], (int, float)) and not isinstance(options[name], bool)

    for name in ("max_new_tokens", "n_samples_per_prompt"):
        whole = is_integer(options[name], 1) and options[name] <= MOST
        require(name, whole, f"an integer of at least 1 and at most {MOST}")
    require(
        "temperature",
        number("temperature") and 0 <= options["temperature"] <= LARGEST,
        f"a number from 0 (greedy) to {LARGEST}",
    )
    require("top_p", number("top_p") and 0 < options["top_p"] <= 1, "a number in (0, 1]")
    require("min_p", number("min_p") and 0 <= options["min_p"] <= 1, "a number in [0, 1]")
    require(
        "top_k",
        isinstance(options["top_k"], int) and not isinstance(options["top_k"], bool),
        "an integer (0 or less: off)",
    )
    penalty = options["repetition_penalty"]
    require("repetition_penalty", penalty is None or _is_penalty(penalty), f"None or {PENALTIES}")
    seed = options["seed"]
    require("seed", seed is None or (isinstance(seed, int) and -(2**63) <= seed < 2**63), "None or a 64-bit integer")
    require("logprobs_mode", options["logprobs_mode"] in LOGPROB_MODES, f"one of {LOGPROB_MODES}")
    slots = options["continuous_batch_size"]
    sized = slots is None or slots == AUTO or is_integer(slots, 1)
    require("continuous_batch_size", sized, f"None, an integer of at least 1 or {AUTO!r}")
    stops = options["stop_token_ids"]
    require(
        "stop_token_ids",
        stops is None
        or (isinstance(stops, (list, tuple)) and all(is_integer(stop, 0) and stop < vocab_size for stop in stops)),
        f"None or a list of ids in [0, {vocab_size})",
    )


def _require(name: str, value: object, accepted: bool, what: str) -> None:
    if not accepted:
        raise ValueError(f"{name} must be {what}; got {value!r}")


def _is_penalty(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and SMALLEST <= value <= LARGEST


def refuse_processors(generation_config) -> None:
    """Raise ValueError naming a set field of ``generation_config`` that generation here would not honour."""
    for name, neutral in UNSUPPORTED_PROCESSORS.items():
        value = getattr(generation_config, name, None)
        empty = isinstance(value, (list, tuple, dict)) and not value
        if value is not None and not empty and value not in neutral:
            raise ValueError(
                f"generation_config.{name}={value!r} is not supported; unset it on the model "
                "(temperature, top_k, top_p and min_p there are overruled by SamplingConfig)"
            )


def stop_ids(tokenizer, generation_config, extra: list[int] | None) -> tuple[int, ...]:
    """The tokenizer's, the generation_config's and the call's own ids, sorted."""
    sources = {
        "tokenizer.eos_token_id": getattr(tokenizer, "eos_token_id", None),
        "generation_config.eos_token_id": getattr(generation_config, "eos_token_id", None),
        "stop_token_ids": extra,
    }
    return tuple(sorted({token for name, source in sources.items() for token in _ids(name, source)}))


def _ids(name: str, source) -> list[int]:
    """Token ids as a tokenizer or a configuration gives them: None, an integer of any library's, or several."""
    if source is None:
        return []
    try:
        ids = [operator.index(token) for token in (source if isinstance(source, (list, tuple, set)) else [source])]
    except TypeError:
        ids = [-1]
    if any(token < 0 for token in ids):
        raise ValueError(f"{name} must be an id of at least 0, or a list of them; got {source!r}")
    return ids


def pad_id(tokenizer) -> int:
    """The id written after a row's end: the tokenizer's (first) pad id, else its (first) EOS id.

    Raises:
        ValueError: the tokenizer defines neither, or something that is no id.
    """
    for name in ("pad_token_id", "eos_token_id"):
        ids = _ids(f"tokenizer.{name}", getattr(tokenizer, name, None))
        if ids:
            return ids[0]
    raise ValueError("tokenizer must define pad_token_id or eos_token_id")


def with_limits(plan: SamplingPlan, limits, prompts: int) -> SamplingPlan:
    """``plan`` with a limit of its own for each row.

    Args:
        limits: of every row or of every prompt, or None.

    Raises:
        ValueError: as many as there are neither rows nor prompts, or something that is no limit.
    """
    if limits is None:
        return plan
    rows = prompts * plan.samples
    listed = isinstance(limits, (list, tuple))
    _require(
        "max_new_tokens_per_row",
        limits,
        listed and all(is_integer(limit, 1) and limit <= plan.max_new_tokens for limit in limits),
        f"None or a list of integers from 1 to max_new_tokens={plan.max_new_tokens}",
    )
    if len(limits) not in (rows, prompts):
        raise ValueError(
            f"max_new_tokens_per_row must have one for each of {rows} rows or {prompts} prompts; got {len(limits)}"
        )
    each = plan.samples if len(limits) == prompts else 1
    spread = tuple(limit for limit in limits for _ in range(each))
    return replace(plan, max_new_tokens=max(spread), limits=spread)


def needed_tokens(lengths: list[int], plan: SamplingPlan) -> int:
    """Of the longest row: its prompt and as many new ones as it may have."""
    return max(length + plan.limit(row) for row, length in _rows(lengths, plan))


def _rows(lengths: list[int], plan: SamplingPlan) -> Iterator[tuple[int, int]]:
    """A row and its prompt's length; of rows that are all as long, one a prompt: nobody knows yet whether all fit."""
    step = plan.samples if plan.limits is None else 1
    return ((row, lengths[row // plan.samples]) for row in range(0, len(lengths) * plan.samples, step))


def check_positions(lengths: list[int], plan: SamplingPlan, max_positions: int | None) -> None:
    """Raise ValueError where a row's real tokens and its answer do not fit the model's positions."""
    row, length = max(_rows(lengths, plan), key=lambda one: one[1] + plan.limit(one[0]))
    needed = length + plan.limit(row)
    if max_positions is not None and needed > max_positions:
        option = "max_new_tokens" if plan.limits is None else "a max_new_tokens_per_row"
        raise ValueError(
            f"prompt_ids of {length} tokens plus {option}={plan.limit(row)} need {needed} "
            f"positions; the model has {max_positions}"
        )


def check_size(rows: int, tokens: int, plan: SamplingPlan) -> None:
    """Raise ValueError where so many rows of so many tokens are beyond any address."""
    if rows * tokens > MOST_CELLS:
        raise ValueError(
            f"{rows} rows of up to {tokens} tokens are too many (n_samples_per_prompt={plan.samples}, max_new_tokens="
            f"{plan.max_new_tokens}); accepted are {MOST_CELLS} tokens in all"
        )


def fresh_seed() -> int:
    """A 63-bit seed from torch's default generator, so that torch.manual_seed reproduces a whole run."""
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
