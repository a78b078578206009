# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""MTP heads as files: the ``mtp.*`` tensors of a whole checkpoint, or of a file that has nothing else."""

from pathlib import Path

import torch

from deepspeed_hybrid.speculative.files import read_tensors, save, tensor_files, tensor_names, with_weights
from deepspeed_hybrid.speculative.mtp import MtpDraft
from deepspeed_hybrid.speculative.mtp_config import MtpConfig

HEAD = "mtp."
PREFIXES = ("", "model.", "model.language_model.")


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
        config, files = MtpConfig.from_json(target or {}, "the model"), [path]
    elif path.is_dir():
        config, files = MtpConfig.read(path), tensor_files(path)
    else:
        raise ValueError(f"draft_model must be a folder, a .safetensors file or an MtpDraft; got {str(path)!r}")
    weights = read_tensors(files, head_name)
    if not weights:
        spellings = ", ".join(prefix + HEAD for prefix in PREFIXES)
        raise ValueError(f"draft_model has no MTP head: no tensor's name begins with {spellings}")
    return with_weights(MtpDraft(config), weights, HEAD)


def save_mtp(draft: MtpDraft, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write model.safetensors, with names as in published checkpoints, and a config.json for :func:`load_mtp`.

    Args:
        folder: made if needed; both files are overwritten.
        dtype: of the weights in the file; None: the head's own.
    """
    save(draft, draft.config.to_json(), folder, dtype, HEAD)


def has_mtp(path: str | Path) -> bool:
    """Whether a folder's safetensors have a head."""
    return any(head_name(name) for file in Path(path).glob("*.safetensors") for name in tensor_names(file))


def head_name(stored: str) -> str | None:
    """Of a checkpoint's tensor, as :class:`MtpDraft` has it; None: it is not a head's."""
    for prefix in PREFIXES:
        if stored.startswith(prefix + HEAD):
            return stored.removeprefix(prefix + HEAD)
    return None
