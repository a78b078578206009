# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One call on several ranks: peers run the same job with the same noise, and other ranks have noise of their own."""

from collections.abc import Callable
from dataclasses import astuple, replace

from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.generation.arena import Arena
from deepspeed_hybrid.generation.batch import AUTO
from deepspeed_hybrid.generation.peers import CALL, REFUSED, ROWS, check_kind, digest_of, words
from deepspeed_hybrid.job import Job
from deepspeed_hybrid.paths import Paths

SPREAD = 0x9E3779B97F4A7C15  # odd: seeds of replicas lie far apart
WORD = 2**64


def agreed_job(
    check: Callable[[], Job],
    asked: int | str | None,
    paths: Paths,
    cfg: HybridEngineRolloutConfig,
    arena: Arena,
    watched: bool,
) -> Job:
    """The job that all peers run. The first peer's draw of a seed counts, and the smallest number of slots.

    Peers capture together and replay together, so that where one has given its graphs up, the others do.

    Args:
        check: checks this rank's call; waits for nobody.
        asked: the call's ``continuous_batch_size``.
        paths: this rank's, with its peers.
        cfg: this rank's.
        arena: this rank's.
        watched: whether the caller takes rows as they end.

    Raises:
        ValueError: a peer was asked for something else, or would run it in another way.
        RuntimeError: a peer refused the call, or is about something else.
    """
    peers, kind = paths.peers, ROWS if watched else CALL
    if peers.group is None:
        return _of_replica(check(), peers.replica)
    try:
        job = check()
        digests = _digest(job), _way(paths, cfg), arena.digest()
    except BaseException:
        peers.exchange(words(REFUSED))
        raise
    every = peers.exchange(words(kind, *digests, job.plan.seed or 0, job.slots, job.keeps))
    for rank, (other, digest, way, *_) in enumerate(every):
        check_kind(rank, other, kind)
        if digest != every[0][1]:
            raise ValueError(
                f"ranks that share a model must pass the same request and sampling; those of rank {rank} differ from "
                "those of the first"
            )
        if way != every[0][2]:
            raise ValueError(
                f"ranks that share a model must have the same configuration, and the same adapters and hooks on its "
                f"layers; rank {rank} would not run the steps of the first"
            )
    slots = min(slots for *_, slots, _ in every)
    job = replace(
        job,
        plan=replace(job.plan, seed=every[0][4]),
        slots=slots,
        keeps=all(keeps for *_, keeps in every),  # ranks run the same forwards
        anew=len({buffers for _, _, _, buffers, *_ in every}) > 1,
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


def _way(paths: Paths, cfg: HybridEngineRolloutConfig) -> int:
    """63 bits of what decides over the steps of a run, and over what goes between ranks in each."""
    common = replace(cfg, enable_profiling=False, progress=False)  # which a rank may have for itself
    return digest_of(repr((common, paths.graph, paths.injection.exchanges)).encode())
