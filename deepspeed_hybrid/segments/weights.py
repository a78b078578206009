# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a weight sync did."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class WeightSyncReport:
    """Modes of the derived weights and what refreshing them cost.

    Weights that generation reads in place need no sync and are in no mode.
    """

    modes: dict[str, str] = field(default_factory=dict)  # segment name -> 'aliased' | 'packed'
    bytes_copied: int = 0
    seconds: float = 0.0
