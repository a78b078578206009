# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One call on several ranks: peers run the same job with the same noise, and other ranks have noise of their own."""

from collections.abc import Callable
from dataclasses import astuple, replace

from deepspeed_hybrid.generation.arena import Arena
from deepspeed_hybrid.generation.batch import AUTO
from deepspeed_hybrid.generation.peers import CALL, REFUSED, Peers, digest_of, words
from deepspeed_hybrid.job import Job

SPREAD = 0x9E3779B97F4A7C15  # odd: seeds of replicas lie far apart
WORD = 2**64


def agreed_job(check: Callable[[], Job], asked: int | str | None, peers: Peers, arena: Arena) -> Job:
    """The job that all peers run. The first peer's draw of a seed counts, and the smallest number of slots.

    Peers capture together and replay together, so that where one has given its graphs up, the others do.

    Args:
        check: checks this rank's call; waits for nobody.
        asked: the call's ``continuous_batch_size``.
        arena: this rank's.

    Raises:
        ValueError: a peer was asked for something else.
        RuntimeError: a peer refused the call.
    """
    if peers.group is None:
        return _of_replica(check(), peers.replica)
    try:
        job = check()
    except BaseException:
        peers.exchange(words(REFUSED))
        raise
    every = peers.exchange(words(CALL, _digest(job), job.plan.seed or 0, job.slots, job.keeps, arena.digest()))
    for rank, (kind, digest, *_) in enumerate(every):
        if kind == REFUSED:
            raise RuntimeError(f"rank {rank} of those that share this model refused the call; its error says why")
        if kind != CALL:
            raise RuntimeError(f"rank {rank} of those that share this model takes rows of generate_iter(), or syncs")
        if digest != every[0][1]:
            raise ValueError(
                f"ranks that share a model must pass the same request and sampling; those of rank {rank} differ from "
                "those of the first"
            )
    slots = min(slots for *_, slots, _, _ in every)
    job = replace(
        job,
        plan=replace(job.plan, seed=every[0][2]),
        slots=slots,
        keeps=all(keeps for *_, keeps, _ in every),  # ranks run the same forwards
        anew=len({buffers for *_, buffers in every}) > 1,
        continuous_slots=slots if asked == AUTO else job.continuous_slots,
    )
    return _of_replica(job, peers.replica)


def _of_replica(job: Job, replica: int) -> Job:
    """With a key of noise that no other replica has; the first one keeps the seed."""
    mixed = ((job.plan.seed or 0) + replica * SPREAD) % WORD
    return replace(job, plan=replace(job.plan, seed=mixed - WORD if mixed >= WORD // 2 else mixed))


def _digest(job: Job) -> int:
    """63 bits of what peers must have in common: a seed that was drawn is not among it."""
    plan = replace(job.plan, seed=0 if job.seed_drawn else job.plan.seed or 0)
    options = repr((astuple(plan), job.prompts.lengths, job.tokens)).encode()
    return digest_of(options + job.prompts.ids.cpu().numpy().tobytes())
