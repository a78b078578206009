# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""bf16 rollouts of a model that has learned text, next to the training forward and to transformers' own decode."""

import json

import pytest
import torch

from deepspeed_hybrid.cli import main
from deepspeed_hybrid.tools.fidelity import DECODE, PATHS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("rows", [8, 64])
def test_rollouts_are_no_further_from_training_than_transformers_decode(rows, tmp_path):
    """Up to 16 rows norms are split around our products, which train_consistent does without; beyond they are not."""
    out = tmp_path / "rows.json"
    model = ["--model-config", "qwen3.5-small", "--train-seconds", "15", "--dtype", "bf16"]
    code = main(["fidelity", *model, "--rows", str(rows), "--new", "256", "--segki", "all", "--out", str(out)])
    means = {row["path"]: row["mean_abs"] for row in json.loads(out.read_text())["rows"]}
    print(means)
    assert code == 0
    assert means[PATHS["consistent"]] <= means[DECODE]
