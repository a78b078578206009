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

from deepspeed_hybrid.ops.decode_step import (
    LENGTH,
    RUNNING,
    STOPPED,
    choose_token,
    decode_step,
    decode_step_reference,
)

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


def log_sum_exp(scores: list[float]) -> float:
    highest = max(scores)
    return highest + math.log(sum(math.exp(score - highest) for score in scores)) if highest > -math.inf else highest


def chosen(scores: list[float], key: list[int] | None) -> int:
    """The first highest entry; with a key, a chunk by its weight and noise, then an entry of it by score and noise."""
    if key is None:
        return scores.index(max(scores))
    starts = range(0, len(scores), 1024)
    noisy = [log_sum_exp(scores[start : start + 1024]) + gumbel(2**33 + i, *key) for i, start in enumerate(starts)]
    start = starts[noisy.index(max(noisy))]
    noisy = [score + gumbel(start + i, *key) for i, score in enumerate(scores[start : start + 1024])]
    return start + noisy.index(max(noisy))


def log_softmax_at(scores: list[float], entry: int) -> float:
    highest = max(scores)
    return scores[entry] - highest - math.log(sum(math.exp(score - highest) for score in scores))


def step_row(arguments: dict, row: int) -> None:
    """What one row of the buffers becomes, in place."""
    a = arguments
    if a["parked"][row]:
        return
    a["position"][row] += 1
    scores = a["scores"][row].float().numpy()
    if a["sampled"] and a["temperature"] is not None:
        scores = scores / a["temperature"][row].numpy()
    key = [int(a[name][row]) for name in ("seed", "request", "sample", "position")] if a["sampled"] else None
    choice = chosen([float(score) for score in scores], key)
    source = scores if a["raw_logits"] is None else a["raw_logits"][row].float().numpy()

    column = int(a["length"][row])
    a["token"][row] = a["tokens"][row, column] = choice
    a["logprobs"][row, column] = log_softmax_at([float(score) for score in source], choice)
    a["length"][row] += 1
    if choice in a["stop_ids"].tolist():
        a["finish"][row], a["parked"][row] = STOPPED, True
    elif a["length"][row] >= a["limit"][row]:
        a["finish"][row], a["parked"][row] = LENGTH, True


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
@pytest.mark.parametrize("vocab", [1, 3, 127, 1001, 1024, 1025, 2500, 4097])
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
    parked = arguments["parked"].clone()
    arguments["scores"][parked] = float("nan")
    arguments["length"][parked] = 10**6
    after = copied(arguments)
    decode_step(**after)

    for name, before in arguments.items():
        if isinstance(before, torch.Tensor) and name not in MUTATED:
            assert same_bits(before, after[name]), name
    for name in MUTATED:
        assert same_bits(arguments[name][parked], after[name][parked]), name
    for row in (~arguments["parked"]).nonzero()[:, 0]:
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
        for name in ("token", "position", "length", "parked", "finish", "tokens"):
            assert torch.equal(alone[name][0], together[name][row]), name
        assert_close(alone["logprobs"][0], together["logprobs"][row])


def test_impossible_tokens_are_never_chosen():
    for seed in range(50):
        arguments = decode_arguments(3, 40, seed=seed)
        arguments["scores"][:, torch.arange(40) % 13 != 4] = -math.inf
        actual = run_both(arguments)
        active = ~arguments["parked"]
        assert (actual["token"][active] % 13 == 4).all()


def test_one_possible_token_is_certain():
    arguments = decode_arguments(2, 40)
    arguments["scores"][:] = -math.inf
    arguments["scores"][:, 17] = -5.0
    actual = run_both(arguments)
    assert actual["token"].tolist() == [17, 17]
    assert actual["logprobs"].gather(1, arguments["length"][:, None]).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("entries", [[290, 41, 77], [3999, 2047, 2048]], ids=["one chunk", "several chunks"])
def test_ties_go_to_the_lowest_index(entries):
    arguments = decode_arguments(2, 4000, sampled=False)
    arguments["scores"][:] = 0
    arguments["scores"][0, entries] = 1
    assert run_both(arguments)["token"].tolist() == [min(entries), 0]


@pytest.mark.parametrize("first, last", [(0, 1024), (1024, 2048), (3072, 3500)], ids=["first", "inner", "last"])
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_only_one_chunk_is_possible(first, last, sampled):
    arguments = decode_arguments(2, 3500, sampled=sampled)
    arguments["scores"][:, :first] = arguments["scores"][:, last:] = -math.inf
    assert all(first <= token < last for token in run_both(arguments)["token"].tolist())


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_a_row_without_a_possible_token_takes_the_first(sampled):
    arguments = decode_arguments(2, 2500, sampled=sampled)
    arguments["scores"][:] = -math.inf
    decode_step(**arguments)
    assert arguments["token"].tolist() == [0, 0]


def sampled_tokens(scores: torch.Tensor, temperature: float, draws: int) -> torch.Tensor:
    """Tokens of one row of scores at as many positions."""
    parts = [torch.full((draws,), part) for part in (3, 1, 0)]
    rows = scores.expand(draws, -1)
    return choose_token(rows, None, torch.full((draws,), temperature), *parts, torch.arange(draws), True)[0]


def test_samples_across_chunks_follow_the_softmax():
    """Three chunks of very different weight, among them entries at -inf, and a tail that is one bin."""
    entries = [0, 5, 1023, 1024, 1500, 1501, 2047, 2048, 2999]
    scores = torch.full((3000,), -2.0)
    scores[entries] = torch.tensor([4.0, 5.0, 3.0, 3.5, 1.0, 4.5, 3.0, 5.5, 4.0])
    impossible = torch.arange(3000) % 3 == 1
    impossible[entries] = False
    scores[impossible] = -math.inf
    temperature, draws = 0.8, 10_000
    seen = sampled_tokens(scores, temperature, draws).bincount(minlength=3000).double()
    expected = (scores.double() / temperature).softmax(dim=-1) * draws
    assert seen[impossible].sum() == 0

    def binned(counts: torch.Tensor) -> torch.Tensor:
        return torch.cat([counts[entries], (counts.sum() - counts[entries].sum())[None]])

    chi_square = ((binned(seen) - binned(expected)) ** 2 / binned(expected)).sum()
    assert chi_square < 33.72  # 1 in 10,000 with 9 degrees of freedom


def test_the_entry_does_not_depend_on_the_noise_of_the_chunk():
    """Two chunks of four equal entries: if chunk 0 drew as entry 0 does, entry 0 would be chosen too often in it."""
    scores = torch.full((2048,), -math.inf)
    scores[:4] = scores[1024:1028] = 0.0
    draws = 10_000
    tokens = sampled_tokens(scores, 1.0, draws)
    seen = torch.stack([(tokens == entry).sum() for entry in (*range(4), *range(1024, 1028))]).double()
    assert ((seen - draws / 8) ** 2 / (draws / 8)).sum() < 29.88  # 1 in 10,000 with 7 degrees of freedom


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
    assert actual["parked"].item() == (finish != RUNNING)
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
