# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Files of a draft checkpoint: what cannot be read as what it should be is refused by its name."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open


def read_json(path: Path) -> dict:
    """A config.json.

    Raises:
        ValueError: the file is no JSON object.
    """
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:  # of JSON, and of text that is not UTF-8
        raise ValueError(f"draft_model's {path.name} is no JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"draft_model's {path.name} must be a JSON object; got {type(raw).__name__}")
    return raw


def tensor_files(folder: Path) -> list[Path]:
    """
    Raises:
        ValueError: there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"draft_model {str(folder)!r} has no .safetensors file")
    return files


def tensor_names(file: Path) -> list[str]:
    """
    Raises:
        ValueError: the file is not in this format, or has been cut off.
    """
    try:
        with safe_open(file, "pt") as tensors:
            return list(tensors.keys())
    except SafetensorError as error:
        raise ValueError(f"draft_model's {file.name} is no whole .safetensors file: {error}") from error


def read_tensor(file: Path, name: str) -> torch.Tensor:
    """Of a file that :func:`tensor_names` has read."""
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name)
