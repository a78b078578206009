# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a rollout says that it holds is what it holds: every tensor that can be reached from it, and no other."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import FunctionType, MethodType

import pytest
import torch
from harness import greedy, rollout_of
from models import FAMILIES, ragged_prompts, tiny_model
from recorded_graph import RecordedGraph, capture_prompts, capture_steps, recording_accelerator

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation.graph import GraphRunner
from deepspeed_hybrid.segments import weights

PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device, type)


def parts(thing) -> Iterator[object]:
    """What a thing holds, as far as Python code can hold anything; a recorded graph stands for CUDA's."""
    if isinstance(thing, dict):
        yield from thing.keys()
        yield from thing.values()
    elif isinstance(thing, partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, FunctionType):
        yield from (cell.cell_contents for cell in thing.__closure__ or ())
        yield from thing.__defaults__ or ()
    elif isinstance(thing, MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, (list, tuple, set, frozenset)) or type(thing).__name__ == "deque":
        yield from thing
    yield from getattr(thing, "__dict__", {}).values()


def reachable(rollout) -> list[torch.Tensor]:
    """Tensors, one a storage, without those of the model."""
    model = rollout._module
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen, found, queue = set(), {}, [rollout]
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, (*PLAIN, RecordedGraph)):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            address = thing.untyped_storage().data_ptr()
            if address not in own:
                found[address] = thing
            continue
        queue += list(parts(thing))
    return list(found.values())


def held_bytes(rollout) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in reachable(rollout))


def reported(rollout) -> dict[str, int]:
    return {kind: size for kind, size in rollout.memory_report().items() if kind != "state_dtype"}


def run(rollout) -> None:
    """Prompts of two shapes, each often enough to be captured where prompts are; every buffer that there can be."""
    for _ in range(3):
        greedy(rollout, ragged_prompts([3, 7, 5]), 8, continuous_batch_size=2)
        greedy(rollout, ragged_prompts([9, 40, 33]), 5, repetition_penalty=1.2, stop_token_ids=list(range(11)))
    list(rollout.generate_iter(RolloutRequest(*ragged_prompts([4])), SamplingConfig(max_new_tokens=3, seed=1)))


# Every family as it comes and captured; all four pairs for one that is hybrid and one that is not.
WAYS = [(family, *way) for family in FAMILIES for way in ((None, True), (False, False))]
WAYS += [(family, *way) for family in ("qwen3_5", "qwen3") for way in ((None, False), (False, True))]


@pytest.mark.parametrize("family, use_segki, captured", WAYS)
def test_the_report_is_the_sum_of_what_is_held(family, use_segki, captured):
    with recording_accelerator() if captured else nullcontext():
        rollout = rollout_of(tiny_model(family), use_segki=use_segki)
        if captured:
            capture_steps(rollout)
            capture_prompts(rollout)
        assert held_bytes(rollout) == sum(reported(rollout).values())
        run(rollout)
        report = reported(rollout)
        assert held_bytes(rollout) == sum(report.values()), report
        cache, state = rollout._arena.cache, rollout._arena.state
        assert report["decode_state"] == sum(value.nbytes for _, value in state._items() if value is not None)
        for kind in ("kv_keys", "kv_values", "gdn_conv", "gdn_state"):
            of_kind = [layer.tensors()[kind] for layer in cache.layers if kind in layer.tensors()]
            assert report[kind] == sum(tensor.nbytes for tensor in of_kind), kind
        prompts = rollout._arena.prompts._captured.values() if captured else []
        if captured and rollout._injection.prompt_obstacle is None:
            assert prompts
        assert report["prompt_logits"] == sum(forward.logits.nbytes for forward in prompts)
        assert report["prompt_buffers"] == sum(forward.ids.nbytes + forward.facts.nbytes for forward in prompts)

        rollout.release_memory()
        left = {kind: size for kind, size in reported(rollout).items() if size}
        assert held_bytes(rollout) == sum(left.values()) and left.keys() <= {"packed_weights"}


def test_packed_weights_are_counted_once(monkeypatch):
    monkeypatch.setattr(weights, "_owns_its_storage", lambda parameter: False)  # as under an optimizer of its own
    rollout = rollout_of(tiny_model(), use_segki=True)
    run(rollout)
    assert reported(rollout)["packed_weights"] > 0
    assert held_bytes(rollout) == sum(reported(rollout).values())


def test_nothing_is_left_of_a_call_that_failed():
    model = tiny_model()
    rollout = rollout_of(model)
    run(rollout)

    def fail(*args):
        raise torch.OutOfMemoryError("cut")

    hook = model.get_submodule("model.layers.2").register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        greedy(rollout, ragged_prompts([3, 7, 5]), 8)
    hook.remove()
    left = {kind: size for kind, size in reported(rollout).items() if size and kind != "masks"}
    assert left == {} and held_bytes(rollout) == sum(reported(rollout).values())


# ------------------------------------------------------------------------------------------------------ graphs' pools


def test_a_pool_is_what_the_allocator_reserved_for_it(monkeypatch):
    """Two runners, two pools; segments of others are nobody's business."""
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 1},
        {"segment_pool_id": (0, 3), "total_size": 10},
        {"segment_pool_id": (0, 4), "total_size": 100},
        {"segment_pool_id": (0, 3), "total_size": 1000},
        {"total_size": 10000},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    steps, prompts = GraphRunner(2), GraphRunner(2)
    assert steps.pool_bytes == 0
    steps._pool, prompts._pool = (0, 3), (0, 4)
    assert (steps.pool_bytes, prompts.pool_bytes) == (1010, 100)
    steps.release()
    assert steps.pool_bytes == 0


def test_logits_in_a_pool_are_not_counted_twice(monkeypatch):
    with recording_accelerator():
        rollout = rollout_of(tiny_model("qwen2_5"))
        capture_steps(rollout)
        capture_prompts(rollout)
        run(rollout)
        logits = reported(rollout)["prompt_logits"]
        assert logits > 0
        monkeypatch.setattr(GraphRunner, "pool_bytes", property(lambda runner: 10**6))
        assert reported(rollout)["graph_pool"] == 2 * 10**6 - logits
