# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton gdn_decode on a GPU against transformers' functions in float64 on the CPU, at the sizes of a model."""

import pytest
import torch
from decode_cases import same_bits
from gdn_decode_cases import (
    REAL,
    SHAPES,
    arguments_of,
    buffers_of,
    decoded,
    gates_of,
    layer_of,
    mixed_of,
    one_token_oracle,
    oracle,
    recurrent_rule,
    tokens_of,
)
from glue_cases import DTYPES, moved, poisoned_outputs
from tolerances import assert_close

from deepspeed_hybrid.ops.gdn_decode import gdn_decode, gdn_decode_op, gdn_decode_reference
from deepspeed_hybrid.ops.gdn_gates import gdn_gates_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = SHAPES[0]
PER_ROW = ("projected", "window", "state", "position", "parked")


def run(shape, arguments: dict) -> torch.Tensor:
    """One token on the GPU, over poison; it must agree with float64. ``arguments`` are on the CPU, and stay."""
    exact, exact_state = one_token_oracle(shape, arguments)
    on_gpu = moved(arguments, "cuda")
    with poisoned_outputs():
        out = gdn_decode(**on_gpu)
    assert out.dtype == arguments["projected"].dtype and out.is_contiguous()
    rows, parked = len(out), arguments["parked"]
    out, state, window = out.cpu(), on_gpu["state"].cpu(), on_gpu["window"].cpu()
    assert_close(out[~parked], exact[~parked])
    assert (out[parked] == 0).all()
    live = state[:rows][~parked]
    assert_close(live.to(out.dtype) if live.dtype == torch.float32 else live, exact_state[~parked])  # of rounded keys

    expected = arguments["window"].clone()
    for row in (~parked).nonzero().flatten().tolist():
        column = arguments["position"][row] % shape.kernel
        expected[row, :, column] = arguments["projected"][row, : shape.channels]
    assert same_bits(window, expected)
    assert same_bits(state[:rows][parked], arguments["state"][:rows][parked])
    assert same_bits(state[rows:], arguments["state"][rows:])
    return out


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_models_sizes(dtype, state_dtype, batch):
    run(REAL, arguments_of(REAL, batch, dtype=dtype, state_dtype=state_dtype, weights=dtype, bias=False))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_other_sizes(shape):
    run(shape, arguments_of(shape, 3, slots=5))


@pytest.mark.parametrize("shape", [*SHAPES, REAL], ids=lambda shape: "-".join(map(str, shape)))
def test_sequences_from_their_first_token(shape):
    layer, tokens = layer_of(shape), tokens_of(shape, 3, 12)
    exact, exact_state = oracle(shape, layer, tokens)
    buffers = moved(buffers_of(shape, 3), "cuda")
    assert_close(decoded(gdn_decode, moved(layer, "cuda"), tokens.cuda(), buffers, starts=[0, 2, 1]), exact)
    assert_close(buffers["state"], exact_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_rounds_like_its_reference(dtype):
    arguments = arguments_of(REAL, 4, dtype=dtype, weights=dtype)
    on_gpu = moved(arguments, "cuda")
    same = gdn_decode(**on_gpu).cpu() == gdn_decode_reference(**arguments)
    assert same.double().mean() > 0.98


def test_parked_rows_keep_their_bits_whatever_they_hold():
    arguments = arguments_of(REAL, 4, dtype=torch.bfloat16, slots=5)
    arguments["parked"] = torch.tensor([True, False, True, False])
    arguments["projected"][0], arguments["projected"][2] = float("nan"), float("inf")
    arguments["state"][0], arguments["window"][2] = float("nan"), float("nan")
    arguments["position"][0], arguments["position"][2] = -7, 2**62
    run(REAL, arguments)


@pytest.mark.parametrize("extreme", [-1e4, -90.0, -30.0, 19.9, 20.1, 90.0, 1e4])
def test_extreme_gates(extreme):
    arguments = arguments_of(SMALL, 2)
    arguments["projected"][:, -2 * SMALL.value_heads :] = extreme
    run(SMALL, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(dtype):
    arguments = arguments_of(REAL, 64, dtype=dtype)
    arguments["parked"][:] = False
    together = moved(arguments, "cuda")
    out = gdn_decode(**together)
    for first, last in ((0, 1), (5, 6), (63, 64), (7, 10), (16, 48)):
        few = {name: value[first:last] if name in PER_ROW else value for name, value in arguments.items()}
        few = moved(few, "cuda")
        assert same_bits(gdn_decode(**few), out[first:last])
        for name in ("window", "state"):
            assert same_bits(few[name], together[name][first:last])


def test_the_state_drifts_no_more_than_with_fla():
    """2,000 tokens. FLA's scan gets what the layer gives it otherwise: conv and gates of torch in fp32."""
    fla = pytest.importorskip("fla.ops.gated_delta_rule")
    layer, tokens = layer_of(REAL), tokens_of(REAL, 1, 2000)
    query, key, value = (part.cuda() for part in mixed_of(REAL, layer, tokens))
    beta, g = (gate.cuda() for gate in gates_of(REAL, layer, tokens))
    _, exact = recurrent_rule(query, key, value, g, beta, None, True, True)

    _, _, b, a = tokens.cuda().split(REAL.columns, dim=-1)
    beta, g = gdn_gates_reference(b, a, layer["A_log"].cuda(), layer["dt_bias"].cuda(), None)
    _, of_fla = fla.fused_recurrent_gated_delta_rule(
        query.float(),
        key.float(),
        value.float(),
        g=g,
        beta=beta,
        initial_state=torch.zeros(exact.shape, device="cuda"),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    buffers = moved(buffers_of(REAL, 1), "cuda")
    decoded(gdn_decode, moved(layer, "cuda"), tokens.cuda(), buffers)

    def drift(state: torch.Tensor) -> float:
        return ((state.double() - exact).norm() / exact.norm()).item()

    # The two round in a different order; half as much again is chance, a worse algorithm is more than that.
    assert drift(buffers["state"]) < 1.5 * drift(of_fla)
    assert drift(buffers["state"]) < 1e-5


def test_replays_of_a_graph():
    shape, rows, length = REAL, 3, 9
    layer, tokens = layer_of(shape), tokens_of(shape, rows, length)
    exact, exact_state = oracle(shape, layer, tokens)
    on_gpu, buffers = moved(layer, "cuda"), moved(buffers_of(shape, rows), "cuda")
    step = {
        "projected": torch.zeros_like(tokens[:, 0], device="cuda"),
        "position": torch.zeros(rows, dtype=torch.int64, device="cuda"),
        "parked": torch.ones(rows, dtype=torch.bool, device="cuda"),
    }
    gdn_decode(**step, **on_gpu, **buffers)  # compiles; all rows are parked
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gdn_decode(**step, **on_gpu, **buffers)
    step["parked"].fill_(False)
    for position in range(length):
        step["projected"].copy_(tokens[:, position])
        step["position"].fill_(position)
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, exact[:, position])
    assert_close(buffers["state"], exact_state)
    before = {name: value.clone() for name, value in buffers.items()}
    step["parked"].fill_(True)
    graph.replay()
    assert (out == 0).all() and all(same_bits(value, before[name]) for name, value in buffers.items())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_sync_is_needed():
    arguments = moved(arguments_of(SMALL, 3), "cuda")
    gdn_decode(**arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gdn_decode(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_reference_agrees_on_the_gpu():
    arguments = arguments_of(REAL, 16)
    one, other = moved(arguments, "cuda"), moved(arguments, "cuda")
    assert_close(gdn_decode_reference(**one), gdn_decode(**other))
    assert_close(one["state"], other["state"])
    assert same_bits(one["window"], other["window"])


def test_a_gradient_is_refused():
    arguments = moved(arguments_of(SMALL, 2), "cuda")
    arguments["A_log"].requires_grad_()
    with pytest.raises(RuntimeError, match="gdn_decode is for inference and has no gradient"):
        gdn_decode(**arguments)


def test_bad_arguments_are_refused():
    arguments = moved(arguments_of(SMALL, 2), "cuda")
    with pytest.raises(RuntimeError, match="dt_bias is on cpu, projected on cuda:0"):
        gdn_decode(**arguments | {"dt_bias": arguments["dt_bias"].cpu()})
    with pytest.raises(RuntimeError, match="state must be float32 or bfloat16 or float16"):
        gdn_decode(**arguments | {"state": arguments["state"].double()})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    torch.library.opcheck(gdn_decode_op, (), moved(arguments_of(SMALL, 3, dtype=dtype), "cuda"))
