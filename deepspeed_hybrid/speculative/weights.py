# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Draft checkpoints as folders: weights under whichever names they were saved, and saved under the published ones."""

from pathlib import Path

import torch

from deepspeed_hybrid.speculative.config import DraftConfig
from deepspeed_hybrid.speculative.draft import DFlashDraft
from deepspeed_hybrid.speculative.files import read_tensors, save, tensor_files, with_weights

PREFIXES = ("model.", "draft_model.")
ALIASES = (("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."), ("midlayer.", "layers.0."))


def load_draft(folder: str | Path) -> DFlashDraft:
    """A draft model from a folder with config.json and safetensors, in fp32 or the dtype that was saved.

    Raises:
        ValueError: an unsupported variant, or weights that are missing, of another shape or not known; named.
    """
    folder = Path(folder)
    config = DraftConfig.read(folder)
    if (folder / "mask_embedding.pt").exists():
        raise ValueError("draft_model has a mask_embedding.pt, which is not supported")
    return with_weights(DFlashDraft(config), read_tensors(tensor_files(folder), plain_name))


def save_draft(draft: DFlashDraft, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write config.json and model.safetensors in the published format, which :func:`load_draft` reads.

    Args:
        folder: made if needed; both files are overwritten.
        dtype: of the weights in the file; None: the draft's own.
    """
    save(draft, draft.config.to_json(), folder, dtype)


def plain_name(name: str) -> str:
    """Of a checkpoint's tensor, as :class:`DFlashDraft` has it."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    for alias, plain in ALIASES:
        if name.startswith(alias):
            name = plain + name.removeprefix(alias)
    return name
