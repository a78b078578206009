# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What serves is a copy of a draft model, which follows the one that trains."""

from torch import nn


def copy_weights(copy: nn.Module, source: nn.Module) -> None:
    """Weights of the source, in place: every address stays.

    Raises:
        RuntimeError: the source has other weights than when it was copied; nothing is written then.
    """
    mine, theirs = dict(copy.named_parameters()), dict(source.named_parameters())
    for name in sorted(mine.keys() | theirs.keys()):
        had, has = (tuple(some[name].shape) if name in some else None for some in (mine, theirs))
        if had != has:
            raise RuntimeError(
                f"draft_model was changed: the shape of {name} was {had} when the rollout was made, and is {has} now; "
                "make a new rollout"
            )
    for name, weight in mine.items():
        weight.copy_(theirs[name])
