# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks that share a model start together, sample alike, and fail together."""

import os
import time

import pytest
import torch
from harness import answers
from models import ragged_prompts
from ranks import CALL_SECONDS, COLLECTIVE_SECONDS, PATIENCE
from tensor_parallel_cases import PROMPTS, answer, engine_over, hybrid, plain, rollout_over

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import peers
from deepspeed_hybrid.generation.arena import PLAIN
from deepspeed_hybrid.generation.capacity import ANSWER_BYTES
from deepspeed_hybrid.generation.graph import GraphRunner
from deepspeed_hybrid.job import AUTO_SHARE
from deepspeed_hybrid.ops.collectives import post, posted

pytestmark = pytest.mark.xdist_group("two_ranks")
HERE = "parallel.test_peers"


def rank() -> int:
    return torch.distributed.get_rank()


def tokens_of(batch) -> list:
    return [row.tolist() for row in answers(batch)]


def shared_rollout(model=plain, **options):
    return rollout_over(engine_over(model().train()), **options)


# ------------------------------------------------------------------------------------------------------------- buffers


class EagerRunner(GraphRunner):
    """Warms up and keeps steps as if it captured them; a replay is one more step."""

    def prepare(self, key, step, harmless, warmups=2):
        if key not in self:
            with harmless():
                for _ in range(warmups):
                    step()
            self._graphs[key] = step
            self.captures += 1
        return step


def rollout_with_graphs():
    rollout = shared_rollout()
    rollout._graphs = rollout._arena.graphs = EagerRunner(4)
    return rollout, rollout._arena


def unlike_graphs() -> list:
    """Only one rank has given its captured steps up."""
    rollout, arena = rollout_with_graphs()
    before = tokens_of(answer(rollout, 6, temperature=0.0))
    if rank() == 1:
        arena.drop_graphs()
    return [tokens_of(answer(rollout, 6, temperature=0.0)) == before, arena.graphs.captures]


def test_peers_capture_together(ranks):
    """Warm-ups send to the others, who would take them for what their replays wait for."""
    assert ranks.run(f"{HERE}:unlike_graphs") == [[True, 2]] * 2


def released_before_its_first_row() -> list:
    """Only one rank gives its memory back between the call of generate_iter() and the first row."""
    rollout, arena = rollout_with_graphs()
    before = tokens_of(answer(rollout, 6, temperature=0.0))
    sampling = SamplingConfig(max_new_tokens=6, temperature=0.0)
    rows = rollout.generate_iter(RolloutRequest(*ragged_prompts(PROMPTS)), sampling)
    if rank() == 1:
        rollout.release_memory()
    return [[row.tokens.tolist() for row in sorted(rows, key=lambda row: row.index)] == before, arena.graphs.captures]


def test_peers_capture_together_for_an_iterator_that_waited(ranks):
    assert ranks.run(f"{HERE}:released_before_its_first_row") == [[True, 2]] * 2


def unlike_memory() -> list[int]:
    """Only one rank finds memory for a cache that holds longer rows, too."""
    rollout, arena = rollout_with_graphs()
    answer(rollout, 70, temperature=0.0)
    enough = arena._bytes(16, 64, PLAIN) + 4096
    arena.device_free = lambda: 10**12 if rank() == 1 else enough - arena._present()
    answer(rollout, 6, temperature=0.0, n_samples_per_prompt=3)
    return [arena.cache.slots, arena.cache.capacity]


def test_peers_make_room_alike(ranks):
    assert ranks.run(f"{HERE}:unlike_memory") == [[16, 64]] * 2


def unlike_room(slots: int | str) -> list:
    """Rank 0 has memory for two slots: with a share to spare, or not even for a prompt that samples wait for."""
    rollout, arena = rollout_with_graphs()
    asked = dict(temperature=0.0, n_samples_per_prompt=3)
    before = tokens_of(answer(rollout, 6, **asked))
    rollout.release_memory()
    tokens = max(PROMPTS) + 6
    least = arena.needed(2, tokens) + 3 * len(PROMPTS) * 6 * ANSWER_BYTES
    enough = least if slots == 2 else int((least + arena.slot_bytes(tokens)) / AUTO_SHARE) + 1
    arena.device_free = lambda: 10**12 if rank() == 1 else enough
    forwards = rollout._paths.call.forwards
    after = tokens_of(answer(rollout, 6, continuous_batch_size=slots, **asked))
    taken = rollout.get_last_continuous_stats()["slots"]
    return [after == before, taken, rollout._paths.call.forwards - forwards]


@pytest.mark.parametrize("slots", ["auto", 2])
def test_peers_take_as_many_slots_and_keep_as_many_prompts(ranks, slots):
    first, second = ranks.run(f"{HERE}:unlike_room", slots=slots)
    assert first == second and first[:2] == [True, 2]


# --------------------------------------------------------------------------------------------------------------- seeds


def drawn_seeds(shared: bool) -> list:
    """Answers without a seed, ranks' generators being at different numbers; and with one."""
    rollout = rollout_over(engine_over(plain().train(), shared=shared))
    torch.manual_seed(rank() if shared else 5)
    request, options = RolloutRequest(*ragged_prompts(PROMPTS)), dict(max_new_tokens=12, temperature=1.0)
    free = [tokens_of(rollout.generate(request, SamplingConfig(**options))) for _ in range(2)]
    seeded = [tokens_of(rollout.generate(request, SamplingConfig(**options, seed=seed))) for seed in (7, -7, 7)]
    assert free[0] != free[1] and seeded[0] != seeded[1] and seeded[0] == seeded[2]
    drawn = rollout._agree(request, SamplingConfig(**options)).plan.seed
    return [free, seeded[0], drawn]  # whose head ranks share, they choose alike whatever their seeds


def test_peers_draw_the_same_noise(ranks):
    first, second = ranks.run(f"{HERE}:drawn_seeds", shared=True)
    assert first == second


def test_replicas_draw_noise_of_their_own(replicas):
    """Also where their generators, or the seeds that they are given, are the same."""
    first, second = replicas.run(f"{HERE}:drawn_seeds", shared=False)
    assert first[2] != second[2]
    for one, other in zip([*first[0], first[1]], [*second[0], second[1]], strict=True):
        assert all(row != row_of_other for row, row_of_other in zip(one, other, strict=True))


# ------------------------------------------------------------------------------------------------------------ failures


def refused_call(fault: str) -> list:
    """One rank is asked for something else or for what is refused; afterwards all is as it was."""
    rollout = shared_rollout()
    before = answer(rollout, 5, temperature=1.0)
    ids, mask = ragged_prompts(PROMPTS)
    sampling = SamplingConfig(max_new_tokens=5, temperature=1.0, seed=rank() if fault == "seed" else 3)
    if rank() == 1 and fault == "prompt":
        ids[0, -1] += 1
    if rank() == 1 and fault == "bad":
        mask[0] = 0
    with pytest.raises((ValueError, RuntimeError)) as refused:
        rollout.generate(RolloutRequest(ids, mask), sampling)
    assert torch.equal(answer(rollout, 5, temperature=1.0).input_ids, before.input_ids)
    return [type(refused.value).__name__, str(refused.value)]


@pytest.mark.parametrize("fault", ["prompt", "seed"])
def test_peers_that_are_asked_for_different_things_refuse(ranks, fault):
    for kind, message in ranks.run(f"{HERE}:refused_call", fault=fault):
        assert kind == "ValueError" and "same request and sampling" in message and "rank 1" in message


def test_call_that_one_rank_refuses_is_refused_by_all(ranks):
    (first, message), (second, own) = ranks.run(f"{HERE}:refused_call", fault="bad")
    assert first == "RuntimeError" and "rank 1" in message and "refused" in message
    assert second == "ValueError" and "all padding" in own


def unlike_steps() -> list[str]:
    """What is said where ranks would run other steps, each with collective operations of its own; a bar is no such."""
    engine, sampling = engine_over(hybrid().train()), SamplingConfig(max_new_tokens=5, temperature=0.0)
    rollout = rollout_over(engine, progress=rank() == 0, enable_profiling=rank() == 0)
    request, said = RolloutRequest(*ragged_prompts(PROMPTS)), []
    before = rollout.generate(request, sampling)
    for name, value in dict(use_segki=False, segki_kernel="fused_glu", use_shared_prefill=False, poll_every=2).items():
        with pytest.raises(ValueError) as refused:
            rollout_over(engine, **({name: value} if rank() == 1 else {})).generate(request, sampling)
        said.append(str(refused.value))
    hooks = []
    if rank() == 1:
        mixer = engine.module.model.layers[0].linear_attn
        hooks.append(mixer.out_proj.register_forward_hook(lambda *args: None))
    with pytest.raises(ValueError) as refused:
        rollout.generate(request, sampling)
    said.append(str(refused.value))
    for hook in hooks:
        hook.remove()
    with pytest.raises(RuntimeError, match="is about something else"):
        rollout.generate(request, sampling) if rank() == 0 else rollout.generate_iter(request, sampling)
    assert torch.equal(rollout.generate(request, sampling).input_ids, before.input_ids)
    return said


def test_peers_that_would_run_other_steps_refuse(ranks):
    for said in ranks.run(f"{HERE}:unlike_steps"):
        assert len(said) == 5 and all("same configuration" in one and "rank 1" in one for one in said)


def refused_sync() -> str:
    """Rank 1 finds its model unfit before it meets the others."""
    rollout = shared_rollout()
    before, look = answer(rollout, 5, temperature=0.0), rollout._follow_weights

    def unfit():
        raise OSError("the disk is full")

    if rank() == 1:
        rollout._follow_weights = unfit
    with pytest.raises((OSError, RuntimeError)) as refused:
        rollout.sync_segki_weights()
    rollout._follow_weights = look
    rollout.sync_segki_weights()
    assert torch.equal(answer(rollout, 5, temperature=0.0).input_ids, before.input_ids)
    return str(refused.value)


def test_sync_that_one_rank_refuses_is_refused_by_all(ranks):
    first, second = ranks.run(f"{HERE}:refused_sync")
    assert "rank 1" in first and "refused" in first and second == "the disk is full"


def failing(where: str, patience: float) -> list:
    """Rank 0 fails at some point of generate(); what each rank raises, when, and what it says of a further call."""
    rollout = shared_rollout(hybrid)
    answer(rollout, 3, temperature=0.0)
    peers.PATIENCE, peers.APART = patience, PATIENCE
    calls, left = [], "test_peers/rank 0 has left"

    def fail(original):
        def run(*args, **kwargs):
            calls.append(1)
            if len(calls) == 3 and rank() == 0:
                raise OSError("the disk is full")
            while len(calls) == 3 and posted(left) is None:  # a slow host does not decide who waits for whom
                time.sleep(0.01)
            return original(*args, **kwargs)

        return run

    if where == "forward":
        rollout._paths.call.logits = fail(rollout._paths.call.logits)
    else:
        first = next(iter(rollout._injection.fused.values()))
        first.refresh = fail(first.refresh)
        calls += [1, 1]
    begun = time.monotonic()
    with pytest.raises((OSError, RuntimeError)) as raised:
        rollout.sync_segki_weights() if where == "sync" else answer(rollout, 20, temperature=0.0)
    seconds = time.monotonic() - begun
    if rank() == 0:
        post(left, "so it has")
    assert all("forward" not in module.__dict__ for module in rollout.engine.module.modules())
    assert rollout.engine.module.training
    with pytest.raises(RuntimeError) as again:
        answer(rollout, 20, temperature=0.0)
    return [type(raised.value).__name__, str(raised.value), seconds, str(again.value)]


@pytest.mark.parametrize("where, patience", [("forward", peers.PATIENCE), ("refresh", 0.5), ("sync", 0.5)])
def test_rank_that_fails_ends_the_others(ranks, where, patience):
    (first, own, early, once_more), (second, told, late, again) = ranks.run(
        f"{HERE}:failing", where=where, patience=patience
    )
    ranks.stop()  # they cannot speak to one another any more
    assert first == "OSError" and own == "the disk is full" and early < COLLECTIVE_SECONDS
    assert second == "RuntimeError" and "rank 0 raised OSError: the disk is full" in told
    assert late < COLLECTIVE_SECONDS, "the others waited for as long as the group does"
    assert "were separated" in again and "were separated" in once_more and "rank 1 was waiting" in once_more


def dying() -> list:
    """Rank 0 ends in the midst of generate(), and with it the store of messages."""
    rollout = shared_rollout()
    original = rollout._paths.call.logits

    def end(*args):
        if rank() == 0:
            os._exit(1)
        return original(*args)

    rollout._paths.call.logits = end
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        answer(rollout, 6, temperature=0.0)
    return [str(raised.value), time.monotonic() - begun]


def test_rank_that_dies_ends_the_others(ranks):
    first, second = ranks.replies(f"{HERE}:dying", deaths=True)
    ranks.stop()
    message, seconds = second["result"]
    assert first == {"error": "died"} and "has failed on all ranks" in message
    assert seconds < COLLECTIVE_SECONDS


def failing_alike() -> bool:
    """Every rank fails at the same point, and the next call is right. To wait for another would take longer than
    this test may."""
    peers.PATIENCE = 10 * CALL_SECONDS
    rollout = shared_rollout()
    before = answer(rollout, 6, temperature=0.0)
    original, calls = rollout._paths.call.logits, []

    def fail(*args):
        calls.append(1)
        if len(calls) == 3:
            raise OSError("the disk is full")
        return original(*args)

    rollout._paths.call.logits = fail
    with pytest.raises(OSError):
        answer(rollout, 6, temperature=0.0)
    try:
        return torch.equal(answer(rollout, 6, temperature=0.0).input_ids, before.input_ids)
    finally:
        peers.PATIENCE = PATIENCE


def test_peers_that_fail_alike_go_on(ranks):
    assert ranks.run(f"{HERE}:failing_alike") == [True, True]


def apart(what: str) -> list:
    """Rank 0 leaves an iterator, or syncs, where rank 1 goes on; afterwards all is as it was."""
    rollout = shared_rollout()
    before = answer(rollout, 5, temperature=0.0)
    sampling = SamplingConfig(max_new_tokens=5, temperature=0.0, continuous_batch_size=1)
    rows = rollout.generate_iter(RolloutRequest(*ragged_prompts(PROMPTS)), sampling)
    next(rows)
    with pytest.raises(RuntimeError) as raised:
        if rank() == 1:
            next(rows)
        elif what == "sync":
            rollout.sync_segki_weights()
        else:
            rows.close()
            answer(rollout, 5, temperature=0.0)
    assert torch.equal(answer(rollout, 5, temperature=0.0).input_ids, before.input_ids)
    return [str(raised.value)]


@pytest.mark.parametrize("what", ["sync", "close"])
def test_ranks_that_do_different_things_say_so(ranks, what):
    for message, other in zip(sum(ranks.run(f"{HERE}:apart", what=what), []), (1, 0), strict=True):
        assert f"rank {other} of those that share this model" in message


def hooked_head() -> list:
    """A hook of the head that comes or goes: its logits become whole, or this rank's."""
    engine = engine_over(plain().train())
    head = engine.module.get_output_embeddings()
    rollout = rollout_over(engine)
    hook = head.register_forward_hook(lambda *args: None)
    hooked = rollout_over(engine)
    answer(hooked, 3, temperature=0.0)
    with pytest.raises(RuntimeError, match="head"):
        answer(rollout, 3, temperature=0.0)
    hook.remove()
    with pytest.raises(RuntimeError, match="head"):
        answer(hooked, 3, temperature=0.0)
    return tokens_of(answer(rollout, 3, temperature=0.0))


def test_a_hook_of_the_head_is_never_served_as_if_it_were_not_there(ranks):
    first, second = ranks.run(f"{HERE}:hooked_head")
    assert first == second
