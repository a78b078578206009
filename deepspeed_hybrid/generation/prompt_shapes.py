# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The shapes that prompt forwards are padded to, so that a few graphs serve prompts of any number and length."""

from dataclasses import dataclass

ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WIDTH_STEP = 32  # of widths up to 256; wider ones have four steps an octave
SMALL_FORWARD = 1024  # tokens: a forward of fewer takes about as long, for it waits for weights and launches
MOST_PADDING = 1.25  # tokens of a larger forward, over those of as many rows of its longest prompt
LARGE_FORWARD = 8192  # tokens: from there on rows of padding cost more than a forward of its own for some rows
LITTLE_PADDING = 1.0625


@dataclass(frozen=True)
class PromptShape:
    """A forward of ``rows`` prompts of ``width`` columns; not ``padded``: every column of it is a prompt's token."""

    rows: int
    width: int
    padded: bool


def width_bucket(length: int) -> int:
    """Columns for prompts of up to ``length`` tokens: fewer than 32 of them padding, or a quarter of the length."""
    step = max(WIDTH_STEP, 2 ** ((length - 1).bit_length() - 3)) if length > 1 else WIDTH_STEP
    return -(-length // step) * step


def next_shape(lengths: list[int], token_budget: int) -> tuple[int, PromptShape | None]:
    """How many of the first prompts go into one forward, and its shape; None where the first alone is too long.

    Prompts that fill no row bucket are rounded up to one with rows of padding where that costs little, and else down
    to one, so that the last of them wait for the next forward.

    Args:
        lengths: tokens of each prompt that is left.
        token_budget: most tokens of one forward, padding counted.
    """
    count = longest = 0
    for length in lengths[: ROW_BUCKETS[-1]]:
        if width_bucket(max(longest, length)) * (count + 1) > token_budget:
            break
        count, longest = count + 1, max(longest, length)
    if not count:
        return 1, None
    width = width_bucket(longest)
    rows = next(bucket for bucket in ROW_BUCKETS if bucket >= count)
    most = MOST_PADDING if count * longest <= LARGE_FORWARD else LITTLE_PADDING
    if rows * width > min(token_budget, max(SMALL_FORWARD, most * count * longest)):
        count = rows = max(bucket for bucket in ROW_BUCKETS if bucket <= count)
        width = width_bucket(max(lengths[:count]))
    return count, PromptShape(rows, width, padded=rows != count or min(lengths[:count]) != width)
