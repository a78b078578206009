# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The CUDA decode_step against its torch reference on the CPU, and its logprobs against float64."""

import pytest
import torch
from decode_cases import MUTATED, copied, decode_arguments, rows_of, same_bits
from tolerances import assert_close

from deepspeed_hybrid.ops.decode_step import decode_step, decode_step_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCABULARIES = [1, 3, 127, 1024, 1025, 2500, 4097, 248320]


def assert_same_buffers(actual: dict, expected: dict) -> None:
    for name in MUTATED:
        if name == "logprobs":
            assert_close(actual[name], expected[name])
        else:
            torch.testing.assert_close(
                actual[name].cpu(), expected[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
            )


def run_both(arguments: dict, steps: int = 2) -> dict:
    """Steps on the GPU and on the CPU; everything must agree after each. Returns the GPU's."""
    actual, expected = copied(arguments, "cuda"), copied(arguments)
    for _ in range(steps):
        decode_step(**actual)
        decode_step_reference(**expected)
        assert_same_buffers(actual, expected)
    return actual


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_against_the_reference(vocab, rows, dtype, sampled):
    run_both(
        decode_arguments(rows, vocab, dtype=dtype, sampled=sampled, stop_ids=(0, 2, 5, -1)),
        steps=1 if rows * vocab > 10**6 else 2,
    )


@pytest.mark.parametrize("vocab", [3, 4097, 248320])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("raw", [None, *DTYPES], ids=str)
def test_logprobs_against_float64(vocab, dtype, raw):
    arguments = decode_arguments(3, vocab, dtype=dtype, raw=raw)
    actual = copied(arguments, "cuda")
    decode_step(**actual)
    final = arguments["scores"].float() / arguments["temperature"][:, None]
    source = (final if raw is None else arguments["raw_logits"]).double().log_softmax(dim=-1)
    for row in (~arguments["parked"]).nonzero()[:, 0]:
        logprob = actual["logprobs"][row, arguments["length"][row]]
        assert_close(logprob, source[row, actual["token"][row]])


@pytest.mark.parametrize("vocab", [127, 4097])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("raw", DTYPES, ids=str)
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_raw_logits_of_every_dtype(vocab, dtype, raw, sampled):
    run_both(decode_arguments(5, vocab, dtype=dtype, raw=raw, sampled=sampled))


@pytest.mark.parametrize("vocab, row_stride", [(127, 128), (127, 131), (4096, 4097), (4097, 4104), (20000, 20001)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_strided_rows(vocab, row_stride, dtype, sampled):
    arguments = decode_arguments(5, vocab, dtype=dtype, raw=dtype, sampled=sampled, row_stride=row_stride)
    run_both(arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_start_anywhere(dtype):
    arguments = decode_arguments(3, 9000, dtype=dtype)
    for skipped in range(1, 9):
        shifted = copied(arguments, "cuda")
        shifted["scores"] = shifted["scores"][:, skipped:]
        packed = copied(shifted, "cuda") | {"scores": shifted["scores"].contiguous()}
        decode_step(**shifted)
        decode_step(**packed)
        assert all(same_bits(shifted[name], packed[name]) for name in MUTATED)


@pytest.mark.parametrize("temperature", [True, False], ids=["temperature", "final"])
@pytest.mark.parametrize("kept", [1, 2, 40, 20000])
def test_scores_at_minus_infinity(temperature, kept):
    for seed in range(8):
        arguments = decode_arguments(8, 20000, temperature=temperature, seed=seed)
        dropped = torch.randperm(20000, generator=torch.Generator().manual_seed(seed))[kept:]
        arguments["scores"][:, dropped] = -float("inf")
        run_both(arguments)


@pytest.mark.parametrize("first, last", [(0, 1024), (2048, 3072), (9216, 9217)], ids=["first", "inner", "ragged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_only_one_chunk_is_possible(first, last, dtype, sampled):
    arguments = decode_arguments(8, 9217, dtype=dtype, sampled=sampled)
    arguments["scores"][:, :first] = arguments["scores"][:, last:] = -float("inf")
    actual = run_both(arguments)
    tokens = actual["token"][~actual["parked"]]
    assert ((first <= tokens) & (tokens < last)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_the_best_chunk_is_the_ragged_last_one(dtype, sampled):
    arguments = decode_arguments(8, 9218, dtype=dtype, sampled=sampled)
    arguments["scores"][:, 9216:] += 100
    actual = run_both(arguments)
    assert (actual["token"][~actual["parked"]] >= 9216).all()


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_a_row_without_a_possible_token_takes_the_first(sampled):
    arguments = decode_arguments(8, 9217, sampled=sampled)
    arguments["scores"][:] = -float("inf")
    actual = run_both(arguments)
    assert (actual["token"][~actual["parked"]] == 0).all()


def test_more_chunks_than_threads_of_a_block():
    for sampled in (True, False):
        arguments = decode_arguments(3, 600_001, sampled=sampled, raw=torch.bfloat16)
        arguments["scores"][0, 600_000] = 100
        assert run_both(arguments)["tokens"][0].eq(600_000).any()


@pytest.mark.parametrize("scale, offset", [(0.0, 0.0), (1e-3, 25.0), (1e3, 0.0), (1.0, -1e3)])
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_flat_peaked_and_shifted_scores(scale, offset, sampled):
    arguments = decode_arguments(8, 50001, sampled=sampled, temperature=False)
    arguments["scores"].mul_(scale).add_(offset)
    actual, expected = copied(arguments, "cuda"), copied(arguments)
    decode_step(**actual)
    decode_step_reference(**expected)
    assert torch.equal(actual["token"].cpu(), expected["token"])
    # At an offset of 1000, fp32's own logsumexp is off by more than the op: compare with float64.
    exact = arguments["scores"].double().log_softmax(dim=-1).gather(1, expected["token"][:, None])[:, 0]
    active = ~arguments["parked"]
    logprobs = actual["logprobs"].cpu().gather(1, arguments["length"][:, None])[:, 0]
    assert_close(logprobs[active], exact[active])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lowest_index(dtype):
    arguments = decode_arguments(64, 50001, dtype=dtype, sampled=False)
    arguments["scores"].round_()
    run_both(arguments)
    arguments["scores"].zero_()
    arguments["scores"][0, [50_000, 40_960, 40_959, 2048]] = 1
    assert run_both(arguments, steps=1)["token"][:2].tolist() == [2048, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_a_row_has_the_same_bits_in_any_batch(dtype, sampled):
    arguments = decode_arguments(64, 248320, dtype=dtype, sampled=sampled)
    together = copied(arguments, "cuda")
    decode_step(**together)
    for first, last in ((0, 1), (4, 5), (8, 24)):
        rows = slice(first, last)
        alone = copied(rows_of(arguments, rows), "cuda")
        decode_step(**alone)
        assert all(same_bits(alone[name], together[name][rows]) for name in MUTATED)


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_nothing_of_a_parked_row_changes(sampled):
    arguments = decode_arguments(9, 4097, sampled=sampled, raw=torch.bfloat16)
    parked = arguments["parked"].clone()
    arguments["scores"][parked] = float("nan")
    arguments["length"][parked] = 10**6
    actual = run_both(arguments)
    for name in MUTATED:
        assert same_bits(arguments[name][parked], actual[name].cpu()[parked]), name


def test_output_buffers_may_be_wider():
    arguments = decode_arguments(6, 300)
    expected = run_both(arguments, steps=1)
    wide = {
        name: torch.nn.functional.pad(arguments[name], (0, 5), value=3).to("cuda") for name in ("tokens", "logprobs")
    }
    actual = copied(arguments, "cuda") | {name: buffer[:, :-5] for name, buffer in wide.items()}
    decode_step(**actual)
    for name, buffer in wide.items():
        assert same_bits(actual[name], expected[name])
        assert (buffer[:, -5:] == 3).all()


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_inside_a_graph(sampled):
    arguments = decode_arguments(7, 50001, dtype=torch.bfloat16, sampled=sampled, limit=3, stop_ids=())
    arguments["length"].zero_()
    decode_step(**copied(arguments, "cuda"))  # builds the op and loads its kernels

    actual, expected = copied(arguments, "cuda"), copied(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_step(**actual)
    for replay in range(3):
        graph.replay()
        torch.cuda.synchronize()
        decode_step_reference(**expected)
        assert_same_buffers(actual, expected)
        assert bool(actual["parked"].all()) == (replay >= 2)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_needs_no_sync():
    arguments = copied(decode_arguments(3, 1000), "cuda")
    decode_step(**arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode_step(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_current_stream_is_used():
    arguments = copied(decode_arguments(64, 248320), "cuda")
    expected = copied(arguments, "cuda")
    decode_step(**expected)
    torch.cuda.synchronize()
    scores = arguments["scores"].clone()
    arguments["scores"].fill_(float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        arguments["scores"].copy_(scores)
        decode_step(**arguments)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(same_bits(arguments[name], expected[name]) for name in MUTATED)


def test_the_reference_agrees_on_the_gpu():
    arguments = copied(decode_arguments(16, 248320), "cuda")
    reference = copied(arguments, "cuda")
    decode_step(**arguments)
    decode_step_reference(**reference)
    assert_same_buffers(arguments, {name: reference[name].cpu() for name in MUTATED})


def test_no_rows():
    arguments = copied(rows_of(decode_arguments(3, 20), slice(0)), "cuda")
    decode_step(**arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    torch.library.opcheck(decode_step, (), copied(decode_arguments(4, 33, dtype=dtype, raw=dtype), "cuda"))


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("scores", lambda tensor: tensor.double(), "scores must be float32, bfloat16 or float16"),
        ("scores", lambda tensor: tensor[0], "scores must be"),
        ("scores", lambda tensor: tensor.t().contiguous().t(), "columns of scores must be adjacent"),
        ("raw_logits", lambda tensor: tensor[:, :-1], "raw_logits must be"),
        ("temperature", lambda tensor: tensor.double(), "temperature must be"),
        ("seed", lambda tensor: tensor.int(), "seed must be"),
        ("position", lambda tensor: tensor[:-1], "position must be contiguous with one value a row"),
        ("parked", lambda tensor: tensor.byte(), "parked must be"),
        ("limit", lambda tensor: tensor.cpu(), "limit is on cpu"),
        ("tokens", lambda tensor: tensor[:, :0], "tokens must be"),
        ("logprobs", lambda tensor: tensor[:, :-1], "logprobs must be"),
        ("logprobs", lambda tensor: tensor[:1].expand_as(tensor), "rows apart"),
        ("stop_ids", lambda tensor: tensor[None], "stop_ids must be one contiguous row"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused(name, change, message):
    arguments = copied(decode_arguments(4, 20, raw=torch.float32), "cuda")
    before = copied(arguments, "cuda")
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        decode_step(**arguments)
    assert all(same_bits(arguments[other], before[other]) for other in MUTATED if other != name)
