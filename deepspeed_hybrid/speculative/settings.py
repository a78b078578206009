# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Settings of a draft, checked one by one: anything may stand in a config.json."""

import math
from typing import Any


def is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_amount(value: object, above: float = 0) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and above < value < math.inf


def require(name: str, value: object, accepted: bool, what: str) -> None:
    if not accepted:
        raise ValueError(f"the draft's {name} must be {what}; got {value!r}")


def needed(raw: dict, name: str, whose: str = "draft_model") -> int:
    """A count that a configuration has to have."""
    if raw.get(name) is None:
        raise ValueError(f"the config.json of {whose} must have {name}")
    require(name, raw[name], is_count(raw[name]), "an integer of at least 1")
    return raw[name]


def of_kind(name: str, value: Any, kind: type, what: str) -> Any:
    """A setting as it is, which may be null."""
    require(name, value, value is None or isinstance(value, kind), what)
    return value
