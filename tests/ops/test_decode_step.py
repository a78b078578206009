# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""decode_step on a CPU against an oracle in plain Python: choice, logprob, and every buffer."""

import math

import numpy as np
import pytest
import torch
from decode_cases import MUTATED, POISON_TOKEN, copied, decode_arguments, rows_of, same_bits
from tolerances import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_hybrid.ops.decode_step import LENGTH, RUNNING, STOPPED, decode_step, decode_step_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def philox_words(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python's integers."""
    for _ in range(10):
        left, right = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [right >> 32 ^ counter[1] ^ key[0], right % 2**32, left >> 32 ^ counter[3] ^ key[1], left % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def gumbel(entry: int, seed: int, request: int, sample: int, position: int) -> float:
    counter = [entry // 4, position % 2**32, sample % 2**32, request % 2**32]
    word = philox_words(counter, [seed % 2**32, (seed >> 32) % 2**32])[entry % 4]
    uniform = min((np.float32(word) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    return -math.log(-math.log1p(-float(uniform)))


def log_softmax_at(scores: list[float], entry: int) -> float:
    highest = max(scores)
    return scores[entry] - highest - math.log(sum(math.exp(score - highest) for score in scores))


def step_row(arguments: dict, row: int) -> None:
    """What one row of the buffers becomes, in place."""
    a = arguments
    if not a["active"][row]:
        return
    a["position"][row] += 1
    scores = a["scores"][row].float().numpy()
    if a["sampled"] and a["temperature"] is not None:
        scores = scores / a["temperature"][row].numpy()
    key = [int(a[name][row]) for name in ("seed", "request", "sample", "position")]
    noise = [gumbel(entry, *key) if a["sampled"] else 0.0 for entry in range(len(scores))]
    noisy = [float(score) + drawn for score, drawn in zip(scores, noise, strict=True)]
    choice = noisy.index(max(noisy))
    source = scores if a["raw_logits"] is None else a["raw_logits"][row].float().numpy()

    column = int(a["length"][row])
    a["token"][row] = a["tokens"][row, column] = choice
    a["logprobs"][row, column] = log_softmax_at([float(score) for score in source], choice)
    a["length"][row] += 1
    if choice in a["stop_ids"].tolist():
        a["finish"][row], a["active"][row] = STOPPED, False
    elif a["length"][row] >= a["limit"][row]:
        a["finish"][row], a["active"][row] = LENGTH, False


def run_both(arguments: dict, steps: int = 1) -> dict:
    """Run the op and the oracle; the buffers must agree. Returns the op's."""
    actual, expected = copied(arguments), copied(arguments)
    for _ in range(steps):
        assert decode_step(**actual) is None
        for row in range(expected["token"].numel()):
            step_row(expected, row)
    for name in MUTATED:
        assert_close(actual[name], expected[name]) if name == "logprobs" else torch.testing.assert_close(
            actual[name], expected[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
    return actual


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 127, 1001])
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
@pytest.mark.parametrize("temperature", [True, False], ids=["temperature", "final"])
def test_against_the_oracle(dtype, vocab, sampled, temperature):
    run_both(
        decode_arguments(4, vocab, dtype=dtype, sampled=sampled, temperature=temperature, stop_ids=(0, 2, -1)), steps=2
    )


@pytest.mark.parametrize("raw", DTYPES, ids=str)
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_logprobs_of_the_raw_logits(raw, sampled):
    arguments = decode_arguments(4, 127, sampled=sampled, raw=raw)
    without = copied(arguments) | {"raw_logits": None}
    actual = run_both(arguments)
    decode_step(**without)
    assert torch.equal(actual["token"], without["token"])
    assert not torch.equal(actual["logprobs"].nan_to_num(), without["logprobs"].nan_to_num())


@pytest.mark.parametrize("row_stride", [128, 130, 131])
def test_strided_rows(row_stride):
    arguments = decode_arguments(4, 127, row_stride=row_stride)
    packed = copied(arguments) | {"scores": arguments["scores"].contiguous()}
    actual = run_both(arguments)
    decode_step(**packed)
    assert all(same_bits(actual[name], packed[name]) for name in MUTATED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_else_changes(dtype):
    arguments = decode_arguments(7, 33, dtype=dtype, raw=dtype)
    inactive = ~arguments["active"]
    arguments["scores"][inactive] = float("nan")
    arguments["length"][inactive] = 10**6
    after = copied(arguments)
    decode_step(**after)

    for name, before in arguments.items():
        if isinstance(before, torch.Tensor) and name not in MUTATED:
            assert same_bits(before, after[name]), name
    for name in MUTATED:
        assert same_bits(arguments[name][inactive], after[name][inactive]), name
    for row in arguments["active"].nonzero()[:, 0]:
        others = torch.arange(after["tokens"].shape[1]) != arguments["length"][row]
        assert (after["tokens"][row, others] == POISON_TOKEN).all()
        assert after["logprobs"][row, others].isnan().all()


def test_a_row_does_not_depend_on_its_batch():
    arguments = decode_arguments(6, 501, dtype=torch.bfloat16)
    together = copied(arguments)
    decode_step(**together)
    for row in range(6):
        alone = rows_of(arguments, slice(row, row + 1))
        decode_step(**alone)
        for name in ("token", "position", "length", "active", "finish", "tokens"):
            assert torch.equal(alone[name][0], together[name][row]), name
        assert_close(alone["logprobs"][0], together["logprobs"][row])


def test_impossible_tokens_are_never_chosen():
    for seed in range(50):
        arguments = decode_arguments(3, 40, seed=seed)
        arguments["scores"][:, torch.arange(40) % 13 != 4] = -math.inf
        actual = run_both(arguments)
        active = arguments["active"]
        assert (actual["token"][active] % 13 == 4).all()


def test_one_possible_token_is_certain():
    arguments = decode_arguments(2, 40)
    arguments["scores"][:] = -math.inf
    arguments["scores"][:, 17] = -5.0
    actual = run_both(arguments)
    assert actual["token"].tolist() == [17, 17]
    assert actual["logprobs"].gather(1, arguments["length"][:, None]).tolist() == [[0.0], [0.0]]


def test_ties_go_to_the_lowest_index():
    arguments = decode_arguments(2, 300, sampled=False)
    arguments["scores"][:] = 0
    arguments["scores"][0, [290, 41, 77]] = 1
    assert run_both(arguments)["token"].tolist() == [41, 0]


@pytest.mark.parametrize(
    "stops, limit, finish",
    [
        ((), 9, RUNNING),
        ((-1, -1), 9, RUNNING),
        ((7, 5), 9, STOPPED),
        ((7,), 4, LENGTH),
        ((5, -1), 4, STOPPED),
    ],
    ids=["no stop ids", "padding", "stop id", "limit", "stop id on the last token"],
)
def test_the_end_of_a_row(stops, limit, finish):
    arguments = decode_arguments(1, 8, sampled=False, stop_ids=stops, limit=limit)
    arguments["scores"][0, 5] = 100
    arguments["length"][0] = 3
    actual = run_both(arguments)
    assert actual["finish"].item() == finish
    assert actual["active"].item() == (finish == RUNNING)
    assert actual["length"].item() == 4 and actual["tokens"][0, 3] == 5

    # A finished row stays as it is.
    if finish != RUNNING:
        again = copied(actual)
        decode_step(**again)
        assert all(same_bits(actual[name], again[name]) for name in MUTATED)


def test_noise_belongs_to_the_position_after_the_step():
    arguments = decode_arguments(1, 5000, temperature=False)
    arguments["scores"].zero_()
    chosen = set()
    for offset in range(5):
        shifted = copied(arguments)
        shifted["position"] += offset
        chosen.add(run_both(shifted)["token"].item())
    assert len(chosen) == 5


def test_inference_mode():
    arguments = decode_arguments(3, 20)
    expected = run_both(arguments)
    with torch.inference_mode():
        actual = copied(arguments)
        decode_step(**actual)
    assert all(same_bits(actual[name], expected[name]) for name in MUTATED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_opcheck(dtype, sampled):
    torch.library.opcheck(decode_step, (), decode_arguments(4, 33, dtype=dtype, sampled=sampled, raw=dtype))
    torch.library.opcheck(decode_step, (), decode_arguments(1, 3, dtype=dtype, sampled=sampled, temperature=False))


def test_fake_tensors_need_no_kernel():
    with FakeTensorMode():
        arguments = {
            name: value.to("meta") if isinstance(value, torch.Tensor) else value
            for name, value in decode_arguments(2, 9).items()
        }
        assert decode_step(**arguments) is None


def test_the_cpu_runs_the_reference():
    arguments = decode_arguments(5, 65)
    reference = copied(arguments)
    decode_step_reference(**reference)
    decode_step(**arguments)
    assert all(same_bits(arguments[name], reference[name]) for name in MUTATED)
