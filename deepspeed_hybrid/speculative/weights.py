# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Draft checkpoints as folders: weights under whichever names they were saved, and saved under the published ones."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from deepspeed_hybrid.speculative.config import DraftConfig
from deepspeed_hybrid.speculative.draft import DFlashDraft
from deepspeed_hybrid.speculative.files import read_tensor, tensor_files, tensor_names

PREFIXES = ("model.", "draft_model.")
ALIASES = (("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."), ("midlayer.", "layers.0."))
# What a draft that brings its own vocabulary has: the target's own embedding and head would be wrong for it.
FOREIGN = ("embed_tokens.", "lm_head.", "d2t", "t2d", "mask_embedding", "markov", "selector", "confidence_head")


def load_draft(folder: str | Path) -> DFlashDraft:
    """A draft model from a folder with config.json and safetensors, in fp32 or the dtype that was saved.

    Raises:
        ValueError: an unsupported variant, or weights that are missing, of another shape or not known; named.
    """
    folder = Path(folder)
    config = DraftConfig.read(folder)
    if (folder / "mask_embedding.pt").exists():
        raise ValueError("draft_model has a mask_embedding.pt, which is not supported")
    weights: dict[str, torch.Tensor] = {}
    for file in tensor_files(folder):
        for stored in tensor_names(file):
            name = plain_name(stored)
            if name in weights:
                raise ValueError(f"draft_model has weights {name} twice; the second are {stored} in {file.name}")
            weights[name] = read_tensor(file, stored)
    return draft_from(config, weights)


def save_draft(draft: DFlashDraft, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write config.json and model.safetensors in the published format, which :func:`load_draft` reads.

    Args:
        folder: made if needed; both files are overwritten.
        dtype: of the weights in the file; None: the draft's own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(draft.config.to_json(), indent=2)
    weights = {
        name: weight.detach().to("cpu", dtype or weight.dtype).contiguous()
        for name, weight in draft.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(config + "\n")


def draft_from(config: DraftConfig, weights: dict[str, torch.Tensor]) -> DFlashDraft:
    """A draft model with these weights, whatever their names' spelling."""
    named = {plain_name(name): weight for name, weight in weights.items()}
    dtypes = {weight.dtype for weight in named.values()}
    strange = [str(dtype) for dtype in dtypes if dtype not in (torch.float32, torch.bfloat16, torch.float16)]
    if strange:
        raise ValueError(f"draft_model has weights of {', '.join(strange)}; accepted are float32, bfloat16, float16")
    draft = DFlashDraft(config)
    expected = draft.state_dict()
    missing, unknown = sorted(expected.keys() - named.keys()), sorted(named.keys() - expected.keys())
    if missing or unknown:
        what = [f"lacks {', '.join(missing[:4])}"] if missing else []
        what += [f"has {', '.join(unknown[:4])}"] if unknown else []
        raise ValueError(f"draft_model's weights do not fit its config.json: it {' and '.join(what)}")
    for name, weight in named.items():
        if weight.shape != expected[name].shape:
            raise ValueError(
                f"draft_model's weight {name} must have shape {tuple(expected[name].shape)} by its config.json; "
                f"got {tuple(weight.shape)}"
            )
    draft.load_state_dict(named)
    return draft.to(dtypes.pop()) if len(dtypes) == 1 else draft


def plain_name(name: str) -> str:
    """Of a checkpoint's tensor, as :class:`DFlashDraft` has it."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    for foreign in FOREIGN:
        if name.startswith(foreign):
            raise ValueError(f"draft_model has weights {name} of its own, which is not supported")
    for alias, plain in ALIASES:
        if name.startswith(alias):
            name = plain + name.removeprefix(alias)
    return name
