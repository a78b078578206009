# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The demo's task: write the letters of a prompt in reverse order. A byte-level tokenizer, prompts, and the reward."""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

LETTERS = "abcd"
LENGTH = 3
FORMAT_POINTS = 0.1  # of a position's point: for any letter where a letter belongs


class ByteTokenizer:
    """UTF-8 bytes after three special ids; nothing to download."""

    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2
    first_byte = 3
    vocab_size = first_byte + 256

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, without special ids."""
        return [byte + self.first_byte for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; special ids are left out, bytes that are no UTF-8 become U+FFFD."""
        data = bytes(token - self.first_byte for token in ids if token >= self.first_byte)
        return data.decode(errors="replace")

    def pad(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts, each after a BOS and padded on the left: ids and mask, both [B, T] int64."""
        rows = [[self.bos_token_id, *self.encode(text)] for text in texts]
        width = max(map(len, rows))
        ids = [[self.pad_token_id] * (width - len(row)) + row for row in rows]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        return torch.tensor(ids), torch.tensor(mask)


def transformers_tokenizer() -> PreTrainedTokenizerFast:
    """:class:`ByteTokenizer` for trainers that want one of transformers'; a prompt begins with a BOS there too."""
    special = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    letters = {letter: byte + ByteTokenizer.first_byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab={**special, **letters}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", special["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


class ReverseTask:
    """'abd=' asks for 'dba' and then the end of the text.

    A position of the answer, the end included, is worth a point if it is right. A wrong letter where a letter belongs
    is worth ``FORMAT_POINTS`` of one. The reward is the mean over the positions: about 0.01 for random bytes, 0.49
    for random letters, and 1 for the answer only.
    """

    def __init__(self, tokenizer: ByteTokenizer):
        self.tokenizer = tokenizer
        self.answer_width = LENGTH + 1

    def prompts(self, count: int, generator: torch.Generator) -> list[str]:
        choices = torch.randint(len(LETTERS), (count, LENGTH), generator=generator).tolist()
        return ["".join(LETTERS[index] for index in row) + "=" for row in choices]

    def answer(self, prompt: str) -> str:
        return prompt.removesuffix("=")[::-1]

    def points(self, prompts: Sequence[str], answers: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """What every position of every answer is worth.

        Args:
            prompts: R of them.
            answers: [R, answer_width] int64; what stands behind an answer's end is not looked at.
            lengths: [R] int64, the end id counted.

        Returns:
            [R, answer_width] fp32, each in [0, 1].
        """
        end = self.tokenizer.eos_token_id
        wanted = torch.tensor([[*self.tokenizer.encode(self.answer(prompt)), end] for prompt in prompts])
        letters = torch.tensor(self.tokenizer.encode(LETTERS))
        right = answers == wanted
        well_formed = torch.isin(answers, letters)
        well_formed[:, -1] = right[:, -1]
        points = (1 - FORMAT_POINTS) * right.float() + FORMAT_POINTS * well_formed.float()
        return points * (torch.arange(self.answer_width) < lengths[:, None])
