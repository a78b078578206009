# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Generate, train, release, again and again: what a long run of RL does, and what it must not pile up."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
from harness import answers, greedy
from models import ragged_prompts

from deepspeed_hybrid import RolloutRequest, SamplingConfig


@dataclass(frozen=True)
class Left:
    """What there is after a cycle, when everything is released."""

    device: int  # bytes in tensors
    reserved: int  # bytes that the allocator keeps; 0 on a CPU
    captures: int  # in this cycle
    objects: int  # that Python's collector knows of
    resident: int  # bytes of the process


def generate(rollout) -> str:
    """Calls of several kinds and shapes, slots refilled in one of them; the tokens of all, as text, which Python's
    collector does not count.

    Rows have limits and no stop ids: a schedule that went by the tokens would capture now more, now less.
    """
    sampling = SamplingConfig(
        max_new_tokens=9,
        temperature=1.1,
        seed=5,
        n_samples_per_prompt=2,
        continuous_batch_size=3,
        max_new_tokens_per_row=[2, 9, 1, 5, 3, 4],
    )
    batches = [
        greedy(rollout, ragged_prompts([3, 7, 5]), 6),
        greedy(rollout, ragged_prompts([3, 7, 5], seed=2), 6),  # its prompts are captured, where prompts are
        rollout.generate(RolloutRequest(*ragged_prompts([4, 40, 2])), sampling),
    ]
    rows = rollout.generate_iter(RolloutRequest(*ragged_prompts([6, 2])), SamplingConfig(max_new_tokens=4, seed=1))
    next(rows)
    rows.close()
    return str([row.tolist() for batch in batches for row in answers(batch)])


def run_cycles(rollout, train: Callable[[], None], cycles: int) -> tuple[list[Left], list[str]]:
    """``train`` behind each generation; what is left after each release, and the tokens of each cycle."""
    left, tokens = [], []
    for _ in range(cycles):
        captures = captured(rollout)
        tokens.append(generate(rollout))
        train()
        rollout.sync_segki_weights()
        captures = captured(rollout) - captures
        rollout.release_memory()
        left.append(what_is_left(captures))
    return left, tokens


def captured(rollout) -> int:
    return (0 if rollout._graphs is None else rollout._graphs.captures) + rollout._arena.prefill_captures


def what_is_left(captures: int) -> Left:
    gc.collect()
    resident = psutil.Process().memory_info().rss
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of what only the collector has let go of
        return Left(
            torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), captures, len(gc.get_objects()), resident
        )
    storages = {}
    for thing in gc.get_objects():
        # Other tests of this process may have left tensors of other kinds, which have no storage.
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return Left(sum(storages.values()), 0, captures, len(gc.get_objects()), resident)


def assert_steady(left: list[Left], warm: int, objects: int, resident: int) -> None:
    """Nothing grows from cycle ``warm`` on, or by no more than that many objects and bytes of the process in all."""
    before, after = left[warm], left[-1]
    print(f"after cycle {warm}: {before}\nafter cycle {len(left) - 1}: {after}")
    assert after.device <= before.device
    assert after.reserved <= before.reserved
    assert {one.captures for one in left[warm:]} == {before.captures}
    assert after.objects - before.objects <= objects
    assert after.resident - before.resident <= resident
