# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Files of a draft checkpoint: what cannot be read as what it should be is refused by its name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Model = TypeVar("Model", bound=nn.Module)


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


def read_tensors(files: list[Path], plain_name: Callable[[str], str | None]) -> dict[str, torch.Tensor]:
    """The tensors of files by their plain names.

    Args:
        plain_name: of a stored name, as the draft's module has it; None: of something else, which is not read.

    Raises:
        ValueError: two tensors have one name.
    """
    found: dict[str, torch.Tensor] = {}
    for file in files:
        names = {stored: plain_name(stored) for stored in tensor_names(file)}
        with safe_open(file, "pt") as tensors:
            for stored, name in names.items():
                if name is None:
                    continue
                if name in found:
                    raise ValueError(f"draft_model has weights {name} twice; the second are {stored} in {file.name}")
                found[name] = tensors.get_tensor(stored)
    return found


def with_weights(draft: Model, weights: dict[str, torch.Tensor], prefix: str = "") -> Model:
    """The draft with these weights, in their dtype where all have the same.

    Args:
        weights: by the names of its parameters.
        prefix: of these names in messages.

    Raises:
        ValueError: weights that are missing, not known, of another shape or dtype; named.
    """
    for name, weight in weights.items():  # first: quantised ones have scales, which are not known either
        if weight.dtype not in DTYPES:
            raise ValueError(
                f"draft_model's weights {prefix}{name} are {weight.dtype}; accepted are float32, bfloat16, float16"
            )
    expected = draft.state_dict()
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unknown:
        what = [f"{has} {_listed(names, prefix)}" for has, names in (("lacks", missing), ("has", unknown)) if names]
        raise ValueError(f"draft_model's weights do not fit its configuration: it {' and '.join(what)}")
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            raise ValueError(
                f"draft_model's weights {prefix}{name} must have shape {tuple(expected[name].shape)} by its "
                f"configuration; got {tuple(weight.shape)}"
            )
    draft.load_state_dict(weights)
    dtypes = {weight.dtype for weight in weights.values()}
    return draft.to(dtypes.pop()) if len(dtypes) == 1 else draft


def _listed(names: list[str], prefix: str) -> str:
    return ", ".join(prefix + name for name in names[:4]) + (", ..." if len(names) > 4 else "")


def save(draft: nn.Module, config: dict, folder: str | Path, dtype: torch.dtype | None, prefix: str = "") -> None:
    """Write model.safetensors and config.json.

    Args:
        folder: made if needed; both files are overwritten.
        dtype: of the weights in the file; None: the draft's own.
        prefix: of their names there.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        prefix + name: weight.detach().to("cpu", dtype or weight.dtype).contiguous()
        for name, weight in draft.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
