# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gdn_deferred on a GPU, by Triton's kernels and by gdn_streamed, at the sizes of a model: what as many launches of
gdn_decode do."""

import pytest
import torch
from decode_cases import same_bits
from gdn_block_cases import step_by_step
from gdn_decode_cases import REAL, SHAPES, Shape
from gdn_deferred_cases import aligned, deferred_block, one_by_one, settled, without_rings
from glue_cases import moved, poisoned_outputs
from tolerances import assert_close, assert_close_but_for_roundings

from deepspeed_hybrid.ops import gdn_streamed
from deepspeed_hybrid.ops.gdn_decode import gdn_decode_reference
from deepspeed_hybrid.ops.gdn_deferred import BLOCK, PLACES, gdn_deferred

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def cuda_block(shape, counts: list[int], tokens: int, **options) -> dict:
    return moved(deferred_block(shape, counts, tokens, bias=False, **options), "cuda")


def run(arguments: dict) -> None:
    """Layer behind layer without waiting, next to the reference of decode steps over fp32 states."""
    wide = without_rings(arguments) | {"state": arguments["state"].float()}
    out, window, state = step_by_step(gdn_decode_reference, wide)
    live = (torch.arange(len(out) // len(arguments["counts"]), device="cuda")[:, None] < arguments["counts"]).flatten()
    with poisoned_outputs():
        mine = one_by_one(gdn_deferred, arguments)
    assert (mine[~live] == 0).all()
    assert_close_but_for_roundings(mine[live], out[live])
    assert same_bits(arguments["window"], window)
    if arguments["state"].dtype == torch.float32:
        near = assert_close if mine.dtype == torch.float32 else assert_close_but_for_roundings  # of keys
        near(settled(arguments)[:-1].to(mine.dtype), state[:-1])


@pytest.fixture(params=["streamed", "triton"])
def kernel(request, monkeypatch):
    """By which of them; what the first one takes is made sure of."""
    if request.param == "triton":
        monkeypatch.setattr(gdn_streamed, "takes", lambda *arguments: False)
    launched, launch = [], gdn_streamed.launch
    monkeypatch.setattr(gdn_streamed, "launch", lambda *arguments: launched.append(1) or launch(*arguments))
    yield request.param
    assert bool(launched) == (request.param == "streamed")


def models_block(counts: list[int], tokens: int, shape: Shape = REAL, dtype=torch.bfloat16, **options) -> dict:
    """Of a layer that both take."""
    options = {"weights": dtype, "rounded": True} | options
    return moved(aligned(deferred_block(shape, counts, tokens, bias=False, dtype=dtype, **options)), "cuda")


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[6]], ids=lambda shape: "-".join(map(str, shape)))
def test_other_sizes(shape):
    run(cuda_block(shape, [19, 0, 1, 16], 19))


@pytest.mark.parametrize("batch", [1, 24])
def test_fp32(batch):
    counts = [(5 * row + 20) % 21 for row in range(batch)]
    run(cuda_block(REAL, counts, 20, rounded=True))


@pytest.mark.parametrize("batch", [1, 2, 9, 24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_models_sizes(kernel, dtype, batch):
    """From every place of the rings, past two blocks; rows end at their own times."""
    counts = [(5 * row + 33) % 34 for row in range(batch)]
    arguments = models_block(counts, 33, dtype=dtype)
    arguments["position"] = torch.arange(batch, device="cuda") * 7 + 12
    run(arguments)


@pytest.mark.parametrize("shape", [Shape(3, 3, 128, 128), Shape(2, 6, 128, 128), Shape(1, 1, 128, 128)], ids=str)
def test_other_numbers_of_heads(kernel, shape):
    run(models_block([17, 0, 3, 16, 1], 17, shape))


def test_weights_in_fp32(kernel):
    """Of the gates and the norm, which then rounds once less."""
    arguments = models_block([18, 2], 18)
    for name in ("norm_weight", "dt_bias", "A_log"):
        arguments[name] = arguments[name].float()
    run(arguments)


def test_more_states_than_a_blocks_rings_hold(kernel):
    """Several turns of each group, rows that are none among them, first and last."""
    counts = [0 if row % 5 in (0, 3) else 16 for row in range(36)]
    arguments = models_block(counts, 16)
    arguments["position"] = torch.arange(36, device="cuda") % 15 + 1
    run(arguments)


def test_rows_that_are_none_keep_their_bits_whatever_they_hold(kernel):
    arguments = models_block([3, 0, 0, 2] * 3, 3)
    none = arguments["counts"] == 0
    for name in ("window", "state"):
        arguments[name][:-1][none] = float("nan")
    arguments["position"][none] = -7
    names = "window", "state", "keys", "deltas", "decays"
    before = {name: arguments[name][:-1][none].clone() for name in names}
    out = one_by_one(gdn_deferred, arguments).view(3, 12, -1)
    assert (out[:, none] == 0).all() and bool(out.isfinite().all())
    assert all(same_bits(arguments[name][:-1][none], old) for name, old in before.items())


def test_a_state_of_16_bits_is_rounded_once_in_15_tokens():
    arguments = cuda_block(REAL, [14, 12], 14, dtype=torch.bfloat16, state_dtype=torch.bfloat16, rounded=True)
    arguments["position"] = torch.tensor([31, 62], device="cuda")
    run(arguments)


def test_a_row_has_the_same_bits_among_any_number_of_rows(kernel):
    many = models_block([18] * 65, 18)
    slots = {name: many[name][:2].clone() for name in ("window", "state", "keys", "deltas", "decays")}
    rows = {name: many[name][:1] for name in ("counts", "position")}
    one = many | slots | rows | {"projected": many["projected"][::65]}
    assert same_bits(one_by_one(gdn_deferred, one), one_by_one(gdn_deferred, many)[::65])
    assert same_bits(one["state"][:1], many["state"][:1])


@pytest.mark.parametrize("rows", [4, 40])
def test_replays_of_a_graph(kernel, rows):
    """Positions go on between replays, over more than a ring, and what every replay leaves is what a step leaves."""
    eager = models_block([1] * rows, 1)
    eager["answered"] = torch.ones_like(eager["counts"])
    captured = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in eager.items()}

    def step(arguments: dict) -> torch.Tensor:
        def counted(*args, **named):
            return gdn_deferred(*args, **named | {"answered": arguments["answered"]})

        out = one_by_one(counted, arguments)
        arguments["position"].add_(1)
        arguments["answered"].add_(1)
        return out

    step({name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in eager.items()})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(captured)
    for _ in range(2 * PLACES + 3):
        expected = step(eager)
        graph.replay()
        assert same_bits(out, expected)
    assert all(same_bits(captured[name], eager[name]) for name in ("window", "state", "keys", "deltas", "decays"))


def test_states_drift_no_further_than_those_of_decode_steps():
    """Over as many tokens as an answer has, written once in a block."""
    tokens = 40 * BLOCK
    arguments = models_block([tokens] * 2, tokens, Shape(1, 2, 128, 128))
    wide = without_rings(arguments) | {"state": arguments["state"].float()}
    _, _, state = step_by_step(gdn_decode_reference, wide)
    one_by_one(gdn_deferred, arguments)
    assert_close_but_for_roundings(settled(arguments)[:-1].bfloat16(), state[:-1].bfloat16())
