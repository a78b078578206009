# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""attention_block on a CPU, and its Triton kernels in the interpreter: attention_decode, token by token."""

import os

import pytest
import torch
from attention_cases import attention_arguments
from decode_cases import same_bits
from glue_cases import moved, poisoned_outputs, slice_of_poison
from tolerances import assert_close

from deepspeed_hybrid.ops.attention_block import attention_block, attention_block_op, token_by_token
from deepspeed_hybrid.ops.attention_decode import attention_decode_reference

INTERPRETED = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


def kernels(splits: int):
    """The Triton kernels on CPU tensors."""

    def run(**arguments) -> torch.Tensor:
        from deepspeed_hybrid.ops.triton.attention_block import launch

        return launch(**arguments, splits=splits, block=16)

    return run


KERNELS = [pytest.param(kernels(splits), marks=INTERPRETED, id=f"kernels, {splits} splits") for splits in (1, 3)]
RUNS = [pytest.param(attention_block, id="reference"), *KERNELS]


def block_of(lengths: list[int], counts: list[int], tokens: int, **options) -> dict:
    """Keyword arguments of a block behind rows of so many tokens; of each row the first ``counts`` are some."""
    arguments = attention_arguments([length + 1 for length in lengths], **options)
    lanes = len(lengths)
    more = attention_arguments([1] * (tokens * lanes), **options, seed=1)
    steps = torch.arange(tokens)[:, None]
    parked = steps >= torch.tensor(counts)
    projected = more["projected"].clone()
    projected[parked.flatten()] = float("nan")
    return arguments | {
        "projected": slice_of_poison(projected, projected.shape[1] + 16, skipped=8),
        "cos": more["cos"],
        "sin": more["sin"],
        "position": (arguments["position"] + steps).masked_fill(parked, -7).flatten(),
        "parked": parked.flatten(),
        "lanes": lanes,
    }


def run_block(run, arguments: dict) -> torch.Tensor:
    """Over poison; outputs and the cache are those of attention_decode, token by token."""
    twin = moved(arguments, "cpu")
    expected = token_by_token(attention_decode_reference, **twin)
    with poisoned_outputs():
        out = run(**arguments)
    assert_close(out, expected)
    assert (out[arguments["parked"]] == 0).all()
    for name in ("keys", "values"):
        other = ~same_elements(arguments[name], twin[name])
        assert_close(arguments[name][other], twin[name][other])
    return out


def same_elements(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one == other) | (one.isnan() & other.isnan())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_a_block_is_token_by_token(run, gated):
    """Around blocks of 16 positions, from a row's first token on, and where tokens are none."""
    run_block(run, block_of([0, 15, 40, 13], [3, 2, 3, 0], 3, gated=gated))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "options",
    [
        dict(kv_heads=1, head_dim=24, rotary=10),
        dict(normed=False, rotary=0),
        dict(dtype=torch.float16, cos_dtype=torch.float16),
        dict(query_heads=20, kv_heads=1, head_dim=16, norm_offset=0.0),
    ],
    ids=str,
)
def test_heads_of_all_kinds(run, options):
    run_block(run, block_of([17, 3], [2, 3], 3, **options))


@pytest.mark.parametrize("run", RUNS)
def test_the_last_positions(run):
    run_block(run, block_of([44, 47], [4, 1], 4, capacity=48))


@pytest.mark.parametrize("run", RUNS)
def test_nothing_to_do(run):
    assert run_block(run, block_of([3, 4], [0, 0], 2)).shape == (4, 128)


def test_the_cpu_runs_the_reference():
    arguments = block_of([3, 9], [2, 1], 2)
    twin = moved(arguments, "cpu")
    assert same_bits(attention_block(**arguments), token_by_token(attention_decode_reference, **twin))


@pytest.mark.interpreter
@INTERPRETED[1]
@pytest.mark.parametrize("splits", [1, 3])
def test_what_the_kernel_before_stores_is_waited_for(monkeypatch, splits):
    """Products are there when a kernel waits for its predecessor, and no earlier."""
    from deepspeed_hybrid.ops.triton import attention_block as block
    from deepspeed_hybrid.ops.triton import attention_decode, dependent

    arguments = block_of([3, 20], [3, 1], 3, poison=False)
    twin = moved(arguments, "cpu")
    stored = arguments["projected"].clone()
    arguments["projected"].fill_(7.0)
    for module in (block, attention_decode):
        monkeypatch.setattr(module, "pdl", lambda tensor: {"PDL": True, "launch_pdl": True})
    monkeypatch.setattr(dependent, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(dependent, "gdc_wait", lambda: arguments["projected"].copy_(stored))
    assert_close(kernels(splits)(**arguments), token_by_token(attention_decode_reference, **twin))


def test_opcheck():
    torch.library.opcheck(attention_block_op, (), block_of([3, 9], [2, 1], 2, poison=False))


def test_there_is_no_gradient():
    arguments = block_of([3], [1], 1, poison=False)
    arguments["projected"].requires_grad_()
    with pytest.raises(RuntimeError, match="attention_block is for inference and has no gradient"):
        attention_block(**arguments)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("position", lambda tensor: tensor[:-1], "must have the 3 rows of position"),
        ("lanes", lambda lanes: 3, "some for each of 3 lanes"),
        ("parked", lambda tensor: tensor[:2], "parked must have the 4 rows"),
        ("cos", lambda tensor: tensor[:, :7], "attention_block: cos must be"),
        ("keys", lambda tensor: tensor[:1], "attention_block: keys must have a slot"),
    ],
)
def test_arguments_that_do_not_fit_are_named(name, change, message):
    arguments = block_of([3, 9], [2, 1], 2)
    with pytest.raises(RuntimeError, match=message):
        attention_block(**{**arguments, name: change(arguments[name])})
