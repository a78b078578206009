# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""draft_attention on a CPU, and its Triton kernels in the interpreter, against an oracle, over poisoned caches."""

import os

import pytest
import torch
from decode_cases import same_bits
from draft_cases import FP8, draft_attention_arguments, draft_attention_oracle
from glue_cases import moved, poisoned_outputs
from tolerances import assert_close

from deepspeed_hybrid.ops.draft_attention import draft_attention

INTERPRETED = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


def kernels(splits: int):
    """The Triton kernels on CPU tensors."""

    def run(**arguments) -> torch.Tensor:
        from deepspeed_hybrid.ops.triton.draft_attention import launch

        return launch(**arguments, splits=splits, block=16)

    return run


REFERENCE = pytest.param(draft_attention, id="reference")
ALONE, SHARED = (pytest.param(kernels(splits), marks=INTERPRETED, id=f"kernels, {splits} splits") for splits in (1, 3))


def check(run, arguments: dict) -> None:
    before = moved(arguments, "cpu")
    with poisoned_outputs():
        out = run(**arguments)
    assert out.dtype == arguments["projected"].dtype and out.is_contiguous()
    assert_close(out, draft_attention_oracle(**before))
    for name, tensor in before.items():
        if isinstance(tensor, torch.Tensor):
            assert same_bits(arguments[name], tensor), f"{name} was written to"


@pytest.mark.parametrize("run", [REFERENCE, SHARED])
@pytest.mark.parametrize("causal, window", [(False, 0), (True, 0), (False, 5), (True, 40)])
def test_lanes_of_all_lengths(run, causal, window):
    """None, less than a block of places, and all there are; and a parked lane among them."""
    check(run, draft_attention_arguments([0, 7, 33, 48], 2, causal=causal, window=window, parked=(1,)))


@pytest.mark.parametrize("run", [REFERENCE, SHARED])
@pytest.mark.parametrize(
    "options",
    [
        dict(query_heads=3, kv_heads=1, head_dim=24, rotary=10, window=9),
        dict(dtype=torch.float16),
        dict(cache_dtype=FP8, causal=True),
    ],
    ids=str,
)
def test_heads_and_caches_of_all_kinds(run, options):
    check(run, draft_attention_arguments([17, 3], 3, **options))


@pytest.mark.parametrize("run", [REFERENCE, ALONE])
def test_more_queries_than_a_program_takes(run):
    check(run, draft_attention_arguments([40, 1], 8, query_heads=10, kv_heads=1, head_dim=16, rotary=16))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=str)
def test_bf16(cache_dtype):
    """The reference alone: Triton's interpreter has no products of bf16, which tests on a GPU cover."""
    check(draft_attention, draft_attention_arguments([17, 3], 3, dtype=torch.bfloat16, cache_dtype=cache_dtype))


@pytest.mark.parametrize("run", [REFERENCE, ALONE, SHARED])
def test_nothing_to_do(run):
    arguments = draft_attention_arguments([4, 5], 2, parked=(0, 1))
    check(run, arguments)
    nobody = {name: arguments[name][:0] for name in ("projected", "cos", "sin", "start", "parked")}
    assert run(**{**arguments, **nobody}).shape == (0, 128)


@pytest.mark.interpreter
@INTERPRETED[1]
def test_what_the_kernel_before_stores_is_waited_for(monkeypatch):
    """Products are there when a kernel waits for its predecessor, and no earlier."""
    from deepspeed_hybrid.ops.triton import dependent
    from deepspeed_hybrid.ops.triton import draft_attention as module

    arguments = draft_attention_arguments([3, 20], 2)
    expected, stored = draft_attention_oracle(**arguments), arguments["projected"].clone()
    arguments["projected"].fill_(7.0)
    monkeypatch.setattr(module, "pdl", lambda tensor: {"PDL": True, "launch_pdl": True})
    monkeypatch.setattr(dependent, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(dependent, "gdc_wait", lambda: arguments["projected"].copy_(stored))
    assert_close(kernels(3)(**arguments), expected)


def test_opcheck():
    torch.library.opcheck(draft_attention, (), draft_attention_arguments([3, 9], 2))


def test_there_is_no_gradient():
    arguments = draft_attention_arguments([3], 2)
    arguments["projected"].requires_grad_()
    with pytest.raises(RuntimeError, match="draft_attention is for inference and has no gradient"):
        draft_attention(**arguments)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("projected", lambda tensor: tensor[:, :-1], "projected must be"),
        ("projected", lambda tensor: tensor[:3], "3 rows, which 2 lanes do not share"),
        ("keys", lambda tensor: tensor.double(), "keys must be torch.float32 as projected or float8_e4m3fn"),
        ("values", lambda tensor: tensor[:, :-1], "values must be"),
        ("keys", lambda tensor: tensor[..., :16], "values must be|contiguous"),
        ("start", lambda tensor: tensor.int(), "start must be int64"),
        ("parked", lambda tensor: tensor[:1], "parked must be contiguous bool"),
        ("cos", lambda tensor: tensor[:, :7], "cos must be"),
        ("k_norm", lambda tensor: tensor[:-1], "k_norm must be"),
        ("query_heads", lambda heads: 3, "must be a multiple of the 2 heads"),
        ("window", lambda window: -1, "window must be 0 or more"),
    ],
)
def test_arguments_that_do_not_fit_are_named(name, change, message):
    arguments = draft_attention_arguments([3, 9], 2)
    with pytest.raises(RuntimeError, match=message):
        draft_attention(**{**arguments, name: change(arguments[name])})
