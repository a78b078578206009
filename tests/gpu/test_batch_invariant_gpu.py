# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""batch_invariant=True on a GPU: the same bits alone, in a few slots and in one batch; its products likewise."""

import pytest
import torch
from decode_cases import same_bits
from fused_linear_cases import normed_arguments, residual_arguments
from glue_cases import moved
from harness import rollout_of
from models import ragged_prompts, tiny_model

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.ops.batch_invariant import normed_linear_in_groups, residual_linear_in_groups
from deepspeed_hybrid.ops.fused_linear import normed_linear, residual_linear
from deepspeed_hybrid.tools.models import build_model, load_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = [3, 40, 1, 17, 9, 66, 128, 5, 30, 31, 32, 33, 2, 64, 7, 90, 11, 50, 4, 22]  # more than one group of rows
NEW_TOKENS = 32
KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "truncated": {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "model_of", [lambda: build_model(load_config("tiny"), 0), lambda: tiny_model().cuda()], ids=["bf16", "fp32"]
)
def test_one_slot_and_many(model_of, kind):
    rollout = rollout_of(model_of(), batch_invariant=True, use_graph_capture=True)
    prompts = ragged_prompts(LENGTHS)

    def answer(slots: int | None):
        sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, seed=7, continuous_batch_size=slots, **kind)
        return rollout.generate(RolloutRequest(*prompts), sampling)

    together = answer(None)
    for slots in (1, 3, 17, None):
        apart = answer(slots)
        assert torch.equal(apart.input_ids, together.input_ids), slots
        assert same_bits(apart.logprobs, together.logprobs), slots


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
def test_products_of_rows_anywhere(glu, dtype):
    rows, n, k = 41, 400, 2560
    normed = moved(normed_arguments(rows, n, k, dtype=dtype, parts=70, glu=glu), "cuda")
    residual = moved(residual_arguments(rows, n, k, dtype=dtype, bias=not glu), "cuda")
    out = normed_linear_in_groups(normed_linear, **normed)
    added = residual_linear_in_groups(residual_linear, *residual.values())
    for row in (0, 1, 7, 8, 15, 16, 17, 31, 40):
        one = slice(row, row + 1)
        alone = normed | {"scaled": normed["scaled"][one], "squares": normed["squares"][:, one].contiguous()}
        assert same_bits(normed_linear(**alone), out[one])
        alone = residual | {"x": residual["x"][one], "residual": residual["residual"][one]}
        hidden, scaled, squares = residual_linear(**alone)
        assert same_bits(hidden, added[0][one]) and same_bits(scaled, added[1][one])
        assert same_bits(squares, added[2][:, one])
