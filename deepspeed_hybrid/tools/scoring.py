# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Logprobs of tokens that were said already: by one forward over whole rows, and step by step as transformers does."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from deepspeed_hybrid.compat import ModelCall, layer_kinds

LOGITS_BYTES = 2**30  # of fp32 logits at once
FIELDS = ("engine", "prompt_ids", "tokens", "logprobs")


@dataclass(frozen=True)
class Said:
    """What an engine answered, and what it believed of its tokens: R rows, N tokens in all.

    ``logprobs`` is [N] float64, row after row.
    """

    engine: str
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: torch.Tensor

    @classmethod
    def read(cls, path: Path) -> "Said":
        """From JSON: ``engine`` (a name), and a list a row in each of ``prompt_ids``, ``tokens`` and ``logprobs``.

        Raises:
            ValueError: another form; the message says what.
        """
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not set(FIELDS) <= content.keys():
            raise ValueError(f"{path} must hold an object with {', '.join(FIELDS)}")
        prompts, tokens, logprobs = (content[name] for name in FIELDS[1:])
        lengths = [[len(row) for row in rows] for rows in (tokens, logprobs)]
        if len(prompts) != len(tokens) or lengths[0] != lengths[1]:
            raise ValueError(f"{path} must hold as many prompts as answers, and a logprob for each token")
        if not tokens or not all(map(len, prompts)) or not all(lengths[0]):
            raise ValueError(f"{path} must hold a row, and a token in every prompt and answer")
        flat = [value for row in logprobs for value in row]
        return cls(str(content["engine"]), prompts, tokens, torch.tensor(flat, dtype=torch.float64))

    def write(self, path: Path) -> None:
        """In the form that :meth:`read` takes."""
        lengths = [len(row) for row in self.tokens]
        logprobs = [part.tolist() for part in self.logprobs.split(lengths)]
        values = (self.engine, self.prompts, self.tokens, logprobs)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict(zip(FIELDS, values, strict=True))))

    def parts(self, rows: int) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
        """Prompts and tokens of so many rows at a time."""
        for first in range(0, len(self.tokens), rows):
            yield self.prompts[first : first + rows], self.tokens[first : first + rows]


@torch.no_grad()
def forward_logprobs(model: nn.Module, said: Said, temperature: float) -> torch.Tensor:
    """[N] float64 by the model's own forward over whole rows, as training has it. Rows are padded on the right."""
    device = next(model.parameters()).device
    columns = max(map(len, said.tokens)) + max(map(len, said.prompts)) - min(map(len, said.prompts))
    at_once = max(1, LOGITS_BYTES // (4 * (columns + 1) * model.get_output_embeddings().weight.shape[0]))
    found = []
    for prompts, tokens in said.parts(at_once):
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, tokens, strict=True)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        before = min(map(len, prompts)) - 1  # columns without a logit that anybody wants
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=width - before).logits
        for row, (prompt, answer) in enumerate(zip(prompts, tokens, strict=True)):
            start = len(prompt) - 1 - before
            of_answer = logits[row, start : start + len(answer)]
            found.append(_chosen(of_answer, torch.tensor(answer, device=device), temperature))
    return torch.cat(found)


def decode_obstacle(model: nn.Module) -> str | None:
    """Why transformers cannot decode step by step with a cache of its own, or None."""
    if "full_attention" not in layer_kinds(model):
        return "transformers cannot continue a stack of GatedDeltaNet layers alone from its cache"
    return None


@torch.no_grad()
def decode_logprobs(model: nn.Module, said: Said, temperature: float) -> torch.Tensor:
    """[N] float64 by transformers' own decode: a prefill, then a token a step over its dynamic cache.

    Rows must have prompts of one length, and answers of one.
    """
    device, keyword = next(model.parameters()).device, ModelCall(model).cache_keyword
    tokens = torch.tensor(said.tokens, device=device)
    fed, found = torch.tensor(said.prompts, device=device), []
    cache: dict = {}
    for column in tokens.T:
        output = model(input_ids=fed, use_cache=True, logits_to_keep=1, **cache)
        found.append(_chosen(output.logits[:, -1], column, temperature))
        fed, cache = column[:, None], {keyword: output[keyword]}
    return torch.stack(found, dim=1).flatten()


def _chosen(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logprobs [N] of tokens [N] from logits [N, V]; the softmax is in fp32, as in ``generate()``."""
    logprobs = (logits.float() / temperature).log_softmax(dim=-1)
    return logprobs.gather(1, tokens[:, None])[:, 0].double().cpu()
