# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""MTP heads as files: the ``mtp.*`` tensors of a whole checkpoint, or of a file that has nothing else."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from deepspeed_hybrid.speculative.files import read_tensor, tensor_files, tensor_names
from deepspeed_hybrid.speculative.mtp import MtpDraft
from deepspeed_hybrid.speculative.mtp_config import MtpConfig

HEAD = "mtp."
PREFIXES = ("", "model.", "model.language_model.")
FOREIGN = ("embed_tokens.", "lm_head.", "shared_head.")  # of a head with a vocabulary of its own
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_mtp(path: str | Path, target: dict | None = None) -> MtpDraft:
    """An MTP head, in the dtype that was saved. Other tensors of a checkpoint are not read.

    Args:
        path: a checkpoint's folder with config.json, or one .safetensors file.
        target: the configuration of the model that it is for, as its config.json has it; a file has no other.

    Raises:
        ValueError: what is not supported, and weights that are missing, not known, of another shape or dtype; named.
    """
    path = Path(path)
    if path.is_file():
        return mtp_from(MtpConfig.from_json(target or {}, "the model"), read_tensors([path]))
    if not path.is_dir():
        raise ValueError(f"draft_model must be a folder, a .safetensors file or an MtpDraft; got {str(path)!r}")
    return mtp_from(MtpConfig.read(path), read_tensors(tensor_files(path)))


def has_mtp(path: str | Path) -> bool:
    """Whether a folder's safetensors have a head."""
    return any(True for file in sorted(Path(path).glob("*.safetensors")) for _ in _names(file))


def read_tensors(files: list[Path]) -> dict[str, torch.Tensor]:
    """The tensors of a head, by their names behind ``mtp.``."""
    found: dict[str, torch.Tensor] = {}
    for file in files:
        for name, stored in _names(file):
            if name in found:
                raise ValueError(f"draft_model has weights mtp.{name} twice; the second are {stored} in {file.name}")
            found[name] = read_tensor(file, stored)
    if not found:
        spellings = ", ".join(prefix + HEAD for prefix in PREFIXES)
        raise ValueError(f"draft_model has no MTP head: no tensor's name begins with {spellings}")
    return found


def _names(file: Path) -> Iterator[tuple[str, str]]:
    """Of a head's tensors in a file: behind ``mtp.``, and whole."""
    for name in tensor_names(file):
        for prefix in PREFIXES:
            if name.startswith(prefix + HEAD):
                yield name.removeprefix(prefix + HEAD), name


def mtp_from(config: MtpConfig, weights: dict[str, torch.Tensor]) -> MtpDraft:
    """A head with these weights, by names without ``mtp.``."""
    for name, weight in weights.items():
        if name.startswith(FOREIGN):
            raise ValueError(f"draft_model has weights mtp.{name} of its own, which is not supported")
        if weight.dtype not in DTYPES:
            raise ValueError(
                f"draft_model's weights mtp.{name} are {weight.dtype}; accepted are float32, bfloat16, float16"
            )
    draft = MtpDraft(config)
    expected = draft.state_dict()
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unknown:
        what = [f"lacks {_listed(missing)}"] if missing else []
        what += [f"has {_listed(unknown)}, which no head of one dense layer has"] if unknown else []
        raise ValueError(f"draft_model's MTP head does not fit: it {' and '.join(what)}")
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            raise ValueError(
                f"draft_model's weights mtp.{name} must have shape {tuple(expected[name].shape)} by the "
                f"configuration; got {tuple(weight.shape)}"
            )
    dtypes = {weight.dtype for weight in weights.values()}
    draft.load_state_dict(weights)
    return draft.to(dtypes.pop()) if len(dtypes) == 1 else draft


def _listed(names: list[str]) -> str:
    return ", ".join(HEAD + name for name in names[:4]) + (", ..." if len(names) > 4 else "")


def save_mtp(draft: MtpDraft, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write model.safetensors, with names as in published checkpoints, and a config.json for :func:`load_mtp`.

    Args:
        folder: made if needed; both files are overwritten.
        dtype: of the weights in the file; None: the head's own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        HEAD + name: weight.detach().to("cpu", dtype or weight.dtype).contiguous()
        for name, weight in draft.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(draft.config.to_json(), indent=2) + "\n")
