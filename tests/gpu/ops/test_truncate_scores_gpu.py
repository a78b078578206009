# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The CUDA truncate_scores against float64 on the CPU, in any batch, and in graphs."""

import pytest
import torch
from decode_cases import copied, decode_arguments, same_bits
from glue_cases import poisoned_outputs
from truncate_cases import KINDS, LOWEST, VOCABULARIES, check_rows, every_choice, score_rows, settings_of

from deepspeed_hybrid.ops.decode_step import decode_step
from deepspeed_hybrid.ops.truncate_scores import truncate_scores, truncate_scores_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_gpu(settings: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(setting.cuda() for setting in settings)


def run(scores: torch.Tensor, settings: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """On the GPU over poison; ``scores`` may be on the CPU and stay as they are."""
    before = scores.cuda()
    given = before.clone()
    with poisoned_outputs():
        kept = truncate_scores(given, *on_gpu(settings))
    assert same_bits(given, before)
    return kept


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(kind, vocab):
    choices = every_choice(vocab)
    scores, settings = score_rows(kind, len(choices), vocab), settings_of(choices, len(choices))
    check_rows(run(scores, settings), scores, *settings)


@pytest.mark.parametrize("vocab", [7, 4097, 151936, 248320])
@pytest.mark.parametrize("kind", ["random", "rounded", "flat", "mostly masked"])
def test_a_row_has_the_same_bits_in_any_batch(kind, vocab):
    """Rows are split among more blocks the fewer there are: 300 rows among none, and few among eight."""
    choices = every_choice(vocab)
    scores, settings = score_rows(kind, len(choices), vocab), settings_of(choices, len(choices))
    expected = run(scores, settings)
    copies = [300, 130, 64] if vocab < 10**5 else [300, 64]
    for rows in copies:
        chosen = torch.arange(rows) % len(choices)
        together = run(scores.cuda()[chosen.cuda()], tuple(setting[chosen] for setting in settings))
        assert same_bits(together, expected[chosen.cuda()]), rows
    for row in range(len(choices)):
        one = slice(row, row + 1)
        assert same_bits(run(scores[one], tuple(setting[one] for setting in settings)), expected[one]), choices[row]


@pytest.mark.parametrize("vocab", [1000, 248320])
def test_rows_anywhere_in_memory(vocab):
    """Rows on no 16-byte boundary are read entry by entry."""
    choices = every_choice(vocab)
    scores, settings = score_rows("random", len(choices), vocab), settings_of(choices, len(choices))
    expected = run(scores, settings)
    for shift in (1, 2, 3):
        storage = torch.full((scores.numel() + shift,), float("nan"), device="cuda")
        shifted = storage[shift:].view(scores.shape).copy_(scores)
        assert same_bits(truncate_scores(shifted, *on_gpu(settings)), expected)


@pytest.mark.parametrize("vocab", [1, 31, 4097, 248320])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), LOWEST])
def test_rows_without_probabilities_come_back(value, vocab):
    choices = every_choice(vocab)
    scores, settings = score_rows("random", len(choices), vocab), settings_of(choices, len(choices))
    if value == LOWEST:
        scores[:] = LOWEST
    else:
        scores[:, vocab // 3] = value
    assert same_bits(run(scores, settings), scores.cuda())


@pytest.mark.parametrize("order", ["ascending", "descending", "together"])
def test_the_largest_lie_where_one_thread_reads_them(order):
    """Many entries then reach what the threads know of the k-th largest."""
    choices = [(20, 0.0, 0.0), (256, 0.0, 0.0), (20, 0.05, 0.0), (200, 0.05, 0.01)]
    scores, settings = score_rows("random", len(choices), 248320), settings_of(choices, len(choices))
    if order == "together":
        scores[:, ::8192] += 50
    else:
        scores = scores.sort(dim=1, descending=order == "descending").values
    check_rows(run(scores, settings), scores, *settings)


def test_against_the_reference():
    """At what a user asks for, where no threshold is near."""
    scores, settings = score_rows("peaked", 64, 248320), settings_of([(20, 0.05, 0.0)], 64)
    assert torch.equal(run(scores, settings), truncate_scores_reference(scores.cuda(), *on_gpu(settings)))


def test_no_rows():
    nothing = tuple(setting[:0] for setting in settings_of([(1, 0.0, 0.0)], 1))
    assert run(torch.empty(0, 9), nothing).shape == (0, 9)


@pytest.mark.parametrize("vocab", [4097, 248320])
@pytest.mark.parametrize("rows", [1, 27, 64])
def test_inside_a_graph(rows, vocab):
    """Settings change between replays, and the choice of a token follows as in a step."""
    choices = every_choice(vocab)
    scores, settings = score_rows("random", rows, vocab).cuda(), on_gpu(settings_of(choices, rows))
    buffers = copied(decode_arguments(rows, vocab, sampled=True, temperature=False), "cuda")
    temperature = torch.full((rows, 1), 0.75, device="cuda")
    token = buffers["token"]

    def step() -> torch.Tensor:
        kept = truncate_scores(scores / temperature, *settings)
        decode_step(**buffers | {"scores": kept})
        return kept

    step()  # builds the ops
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    for seed in range(4):
        scores.copy_(score_rows("rounded" if seed % 2 else "random", rows, vocab, seed))
        for setting, fresh in zip(settings, settings_of(choices[seed:], rows), strict=True):
            setting.copy_(fresh)
        buffers["parked"].fill_(False)
        kept.fill_(float("nan"))
        graph.replay()
        check_rows(kept, scores / temperature, *settings)
        assert kept.gather(1, token[:, None]).isfinite().all()


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("scores", lambda tensor: tensor.t().contiguous().t(), "must be contiguous"),
        ("top_k", lambda tensor: tensor.repeat_interleave(2)[::2], "must be contiguous"),
        ("min_p", lambda tensor: tensor.cpu(), "must be on cuda"),
    ],
)
def test_bad_arguments_are_refused(name, change, message):
    top_k, tail, min_p = on_gpu(settings_of([(3, 0.1, 0.1)], 4))
    arguments = {"scores": score_rows("random", 4, 8).cuda(), "top_k": top_k, "top_p_tail": tail, "min_p": min_p}
    with pytest.raises(RuntimeError, match=message):
        truncate_scores(**arguments | {name: change(arguments[name])})
