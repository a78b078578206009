# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Calls cut short anywhere, by lack of memory or by hand: no trace is left, and the next call is right."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from harness import rollout_of
from models import COMMON, GDN, MROPE, Tokenizer, ragged_prompts, tiny_model
from recorded_graph import capture_prompts, capture_steps, recording_accelerator
from test_memory_report import held_bytes, reported
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from deepspeed_hybrid import HybridEngineRollout, HybridEngineRolloutConfig, RolloutRequest, SamplingConfig
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.generation import tail
from deepspeed_hybrid.generation.arena import Arena
from deepspeed_hybrid.generation.graph import GraphRunner
from deepspeed_hybrid.generation.state import DecodeState
from deepspeed_hybrid.segments import gathered
from deepspeed_hybrid.segments.apply import surely

CALLS = {"eager": 120, "captured": 70}  # every other one is cut
ERRORS = [torch.OutOfMemoryError, KeyboardInterrupt, RuntimeError]
STOPS = list(range(40, 60))
SIZES = [([3, 7, 5], 6), ([4], 3), ([9, 2, 70, 8, 1], 9), ([2, 3], 70), ([6, 1, 4, 4, 5, 2, 7, 3, 3], 5)]
KINDS = [
    dict(temperature=0.0),
    dict(temperature=1.2, seed=5),
    dict(temperature=0.9, seed=5, top_p=0.9, repetition_penalty=1.2),
]


class CutAt(TorchDispatchMode):
    """Let ``operations`` of torch run, allocations among them, and raise ``error`` at the next; None: just count."""

    def __init__(self, operations: int | None = None, error: type[BaseException] = RuntimeError):
        super().__init__()
        self.left, self.error, self.count = operations, error, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        if self.left is not None and self.count == self.left + 1:
            raise self.error("cut")
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model():
    return small_model()


def small_model():
    """One layer of each kind, in a mixed training mode."""
    torch.manual_seed(0)
    types = ["linear_attention", "full_attention"]
    options = {**COMMON, **GDN, "num_hidden_layers": 2, "layer_types": types, "hidden_size": 64}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**options, rope_parameters=dict(MROPE))).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.01, 0.5).log())
    model.get_submodule("model.layers.1").eval()
    return model


def draw(chance: random.Random) -> SimpleNamespace:
    """A call: what of, how, and how many rows at a time."""
    size, kind = chance.randrange(len(SIZES)), chance.randrange(len(KINDS))
    slots, rows = chance.choice([None, 1, 2, 3, "auto"]), chance.random() < 0.4
    return SimpleNamespace(size=size, kind=kind, slots=slots, rows=rows)


def run(rollout, call) -> list[list[int]]:
    lengths, new_tokens = SIZES[call.size]
    request = RolloutRequest(*ragged_prompts(lengths))
    sampling = SamplingConfig(
        max_new_tokens=new_tokens,
        n_samples_per_prompt=2,
        continuous_batch_size=call.slots,
        stop_token_ids=STOPS,
        **KINDS[call.kind],
    )
    if call.rows:
        rows = sorted(rollout.generate_iter(request, sampling), key=lambda row: row.index)
        return [row.tokens.tolist() for row in rows]
    batch = rollout.generate(request, sampling)
    start = int(batch.response_start_idx[0])
    lengths = batch.response_lengths.tolist()
    return [row[start : start + length].tolist() for row, length in zip(batch.input_ids, lengths, strict=True)]


@pytest.fixture(scope="module")
def oracle(model):
    return undisturbed(model)


def undisturbed(model) -> dict[tuple[int, int], list[list[int]]]:
    """Every size and kind once, by rollouts that nothing befalls."""
    wanted = {}
    for size in range(len(SIZES)):
        for kind in range(len(KINDS)):
            call = SimpleNamespace(size=size, kind=kind, slots=None, rows=False)
            wanted[size, kind] = run(rollout_of(model, shrink_tail=False), call)
    return wanted


def cut_calls(rollout, oracle, calls: int, holds: Callable[[], bool], least: float = 0.25) -> None:
    """Cut every other call somewhere; those between are right, and nothing is left behind any of them.

    Args:
        holds: asked after each call.
        least: share of calls that must have been cut: some end before the operation that would have been their last.
    """
    chance, model = random.Random(7), rollout._module
    modes = [module.training for module in model.modules()]
    operations: dict[tuple, int] = {}
    cuts = 0
    for number in range(calls):
        call = draw(chance)
        about = operations.get((call.size, call.slots))
        if number % 2 and about is not None:
            error = chance.choice(ERRORS)
            cut = CutAt(int(about * chance.random() ** 2), error)  # the first of them allocate
            try:
                with cut:
                    run(rollout, call)
            except error as caught:
                assert str(caught) == "cut"
                cuts += 1
                del caught
        else:
            with CutAt() as counting:
                assert run(rollout, call) == oracle[call.size, call.kind], call
            operations[call.size, call.slots] = counting.count
        assert_no_trace(model, modes)
        assert holds()
    for size, kind in oracle:
        assert run(rollout, SimpleNamespace(size=size, kind=kind, slots=2, rows=True)) == oracle[size, kind]
    assert cuts > least * calls


def assert_no_trace(model, modes: list[bool]) -> None:
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == []
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("steps", CALLS)
def test_calls_cut_at_any_operation(model, oracle, steps, monkeypatch):
    """One rollout through them all: what a cut call leaves behind, the next one would stumble over."""
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)
    captured = steps == "captured"
    with recording_accelerator() if captured else nullcontext():
        rollout = rollout_of(model, poll_every=3)
        if captured:
            capture_steps(rollout, max_graphs=3)
            capture_prompts(rollout, max_graphs=3)
        cut_calls(rollout, oracle, CALLS[steps], lambda: held_bytes(rollout) == sum(reported(rollout).values()))


def places() -> dict[str, tuple[type, str]]:
    return {
        "a new cache": (SlotCache, "__init__"),
        "rows that start": (DecodeState, "starting"),
        "growth": (Arena, "reserve"),
        "the beginning": (Arena, "begin"),
        "a capture": (GraphRunner, "_capture"),
        "rows into slots": (DecodeState, "store"),
        "a shrink": (Arena, "shrink"),
    }


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("place", places())
def test_what_was_being_made_is_released(model, oracle, place, error, monkeypatch):
    """A call that needs more than is there is cut while it grows; a smaller one is right then."""
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)
    sizes = 1, 3 if place == "a shrink" else 2
    small, large = (SimpleNamespace(size=size, kind=1, slots=None, rows=False) for size in sizes)
    owner, name = places()[place]
    with recording_accelerator():
        rollout = rollout_of(model)
        graphs = capture_steps(rollout)
        assert run(rollout, small) == oracle[1, 1]
        assert len(graphs) > 0

        def fail(*args, **options):
            raise error("cut")

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(error, match="cut"):
                run(rollout, large)
        left = {kind: size for kind, size in reported(rollout).items() if size}
        assert left.keys() <= {"masks", "packed_weights"} and held_bytes(rollout) == sum(left.values())
        assert len(graphs) == 0 and [part for part in model.modules() if "forward" in part.__dict__] == []
        assert run(rollout, small) == oracle[1, 1]
        assert run(rollout, large) == oracle[large.size, 1]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["first copies", "sync"])
def test_copies_half_gathered_are_given_back(make_engine, when, error, monkeypatch):
    """ZeRO-3: some weights of one step and some of another would be served as those of the last."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # DeepSpeed replaces it for good
    zero3 = {"stage": 3, "stage3_param_persistence_threshold": 1000}
    engine = make_engine(tiny_model("qwen3"), zero_optimization=zero3)
    rollout = HybridEngineRollout(engine, Tokenizer(), HybridEngineRolloutConfig(use_segki=True))
    call = SimpleNamespace(size=0, kind=1, slots=None, rows=False)
    wanted = run(rollout, call) if when == "sync" else None
    copy = gathered._copy

    def fail(*run) -> None:
        copy(*run)
        raise error("cut")

    with monkeypatch.context() as patch:
        patch.setattr(gathered, "_copy", fail)
        with pytest.raises(error, match="cut"):
            rollout.sync_segki_weights() if when == "sync" else run(rollout, call)
    assert {kind for kind, size in reported(rollout).items() if size} <= {"masks"}
    again = run(rollout, call)
    assert wanted is None or again == wanted
    assert rollout.memory_report()["packed_weights"] > 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_undo_is_finished_where_an_interrupt_strikes_in_it(interrupted):
    left = ["forward", "training", "forward"]

    def undo() -> None:
        nonlocal interrupted
        while left:
            left.pop()
            if interrupted:
                interrupted = False
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        surely(undo)
    assert left == []
