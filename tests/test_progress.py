# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The bar: off unless asked for, on stderr, at its end when the rows are, and closed whatever happens."""

import gc
import io
from types import SimpleNamespace

import pytest
import torch
from harness import answers, greedy, rollout_of
from models import ragged_prompts, tiny_model
from tqdm import tqdm

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import progress
from deepspeed_hybrid.generation.arena import Arena
from deepspeed_hybrid.generation.progress import Progress

LENGTHS, STOPS = [3, 7, 5], list(range(40, 70))


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen2_5")


def sampling(**options) -> SamplingConfig:
    return SamplingConfig(
        **{"max_new_tokens": 8, "n_samples_per_prompt": 2, "seed": 3, "stop_token_ids": STOPS, **options}
    )


def open_bars() -> list[tqdm]:
    gc.collect()
    return [bar for bar in getattr(tqdm, "_instances", ()) if not bar.disable]


@pytest.mark.parametrize("slots", [None, 1, 2])
def test_rows_and_tokens(model, capfd, slots):
    rollout, request = rollout_of(model, progress=True), RolloutRequest(*ragged_prompts(LENGTHS))
    batch = rollout.generate(request, sampling(continuous_batch_size=slots))
    streams = capfd.readouterr()
    assert streams.out == ""
    last = streams.err.replace("\r", "\n").rstrip().splitlines()[-1]
    assert last.startswith("rollout: 100%") and "6/6" in last
    assert f"{int(batch.response_lengths.sum())} tokens" in last
    assert open_bars() == []


def test_off_by_default_and_the_same_numbers(model, capfd):
    prompts = ragged_prompts(LENGTHS)
    plain = greedy(rollout_of(model), prompts, 6)
    assert "row" not in capfd.readouterr().err
    shown = greedy(rollout_of(model, progress=True), prompts, 6)
    assert torch.equal(plain.input_ids, shown.input_ids) and torch.equal(plain.logprobs, shown.logprobs)


def test_rows_of_an_iterator(model, capfd):
    rollout = rollout_of(model, progress=True)
    rows = rollout.generate_iter(RolloutRequest(*ragged_prompts(LENGTHS)), sampling(continuous_batch_size=1))
    next(rows)
    assert len(open_bars()) == 1
    rows.close()
    assert open_bars() == []
    assert len(list(rollout.generate_iter(RolloutRequest(*ragged_prompts(LENGTHS)), sampling()))) == 6
    assert open_bars() == [] and "6/6" in capfd.readouterr().err


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_closed_by_an_error(model, error, monkeypatch):
    rollout = rollout_of(model, progress=True)

    def fail():
        raise error("cut")

    monkeypatch.setattr(Arena, "_step", lambda *args: fail)
    with pytest.raises(error, match="cut"):
        greedy(rollout, ragged_prompts(LENGTHS), 4)
    assert open_bars() == []
    monkeypatch.undo()
    assert answers(greedy(rollout, ragged_prompts(LENGTHS), 4))


class Broken(io.StringIO):
    """A stream that takes ``left`` more operations and then has gone."""

    def __init__(self, left: int, error: Exception):
        super().__init__()
        self.left, self.error, self.failures = left, error, 0

    def _one_more(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.failures += 1
            raise self.error

    def write(self, text: str) -> int:
        self._one_more()
        return len(text)

    def flush(self) -> None:
        self._one_more()


@pytest.mark.parametrize("left", [0, 1, 2, 5])
@pytest.mark.parametrize(
    "error",
    [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left"), ValueError("I/O operation on closed file")],
    ids=lambda error: type(error).__name__,
)
def test_a_broken_stream_ends_no_call(model, error, left, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(progress.logger, "warning", said.append)
    rollout, stream = rollout_of(model, progress=True), Broken(left, error)
    prompts, config = ragged_prompts(LENGTHS), sampling(continuous_batch_size=1)
    wanted = rollout_of(model).generate(RolloutRequest(*prompts), config)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", stream)
        batch = rollout.generate(RolloutRequest(*prompts), config)
        assert open_bars() == []
        rows = list(rollout.generate_iter(RolloutRequest(*prompts), config))
        gc.collect()
    assert torch.equal(batch.input_ids, wanted.input_ids) and len(rows) == 6
    assert stream.failures == 2  # once a call: it is not asked again
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == []
    assert sum("no progress bar" in line and str(error) in line for line in said) == 2


def test_a_process_without_stderr(model, monkeypatch):
    rollout = rollout_of(model, progress=True)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", None)
        assert answers(greedy(rollout, ragged_prompts(LENGTHS), 4))


def test_an_interrupt_while_the_bar_is_drawn_is_one(model, monkeypatch):
    rollout = rollout_of(model, progress=True)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", Broken(3, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            greedy(rollout, ragged_prompts(LENGTHS), 4)
        patch.undo()
        gc.collect()
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == []
    assert answers(greedy(rollout, ragged_prompts(LENGTHS), 4))


@pytest.mark.parametrize("rank, shown", [(0, True), (1, False)])
def test_one_bar_for_all_processes(monkeypatch, rank, shown):
    comm = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: rank)
    monkeypatch.setattr(progress.deepspeed, "comm", comm)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert Progress(True, 4).shown is shown and Progress(False, 4).shown is False


def test_the_switch_is_checked(model):
    with pytest.raises(ValueError, match="progress.*True or False.*1"):
        rollout_of(model, progress=1)
