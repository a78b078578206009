# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The rollout engine: generation between optimizer steps, on the weights that train."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from deepspeed.runtime.rollout.base import RolloutEngine, RolloutRequest
from deepspeed.runtime.rollout.base import SamplingConfig as BaseSamplingConfig
from deepspeed.utils import logger

from deepspeed_hybrid.agreement import agreed_job
from deepspeed_hybrid.compat import attention_configs, bind_torch_gdn_without_gpu, dense_mask_attention
from deepspeed_hybrid.config import HybridEngineRolloutConfig
from deepspeed_hybrid.generation.arena import Arena
from deepspeed_hybrid.generation.assemble import assemble, finished_row
from deepspeed_hybrid.generation.batch import FinishedRow, RolloutBatch
from deepspeed_hybrid.generation.graph import GraphRunner
from deepspeed_hybrid.generation.loop import run_rows
from deepspeed_hybrid.generation.peers import ROUND, SYNC
from deepspeed_hybrid.generation.progress import Progress
from deepspeed_hybrid.generation.prompt_graphs import PromptGraphs
from deepspeed_hybrid.generation.requests import pad_id
from deepspeed_hybrid.generation.tail import TailShrink
from deepspeed_hybrid.job import Job, check_job
from deepspeed_hybrid.paths import Paths, resolve_paths
from deepspeed_hybrid.profile import CallClock, Figures
from deepspeed_hybrid.segments.fingerprint import SeenModel
from deepspeed_hybrid.segments.modes import evaluating
from deepspeed_hybrid.segments.weights import WeightSyncReport
from deepspeed_hybrid.speculation import make_speculation

PROMPT_GRAPHS = 4  # graphs of prompts to one of a decode step: prompts come in many shapes


@functools.cache
def _say_once(line: str) -> None:
    """A slower path says why, once a process."""
    logger.warning(f"deepspeed_hybrid: {line}")


class HybridEngineRollout(RolloutEngine):
    """Generate with the model inside a DeepSpeed engine, between its optimizer steps.

    Args:
        engine: a DeepSpeed engine, or anything whose ``module`` is a Hugging Face causal language model.
        tokenizer: needs ``pad_token_id`` or ``eos_token_id`` (an int or a list).
        cfg: a :class:`HybridEngineRolloutConfig`, one of DeepSpeed's configs, or None.

    Raises:
        ValueError: the model, or a field of ``cfg``, is not supported; the message names it.
        RuntimeError: a path that ``cfg`` asks for cannot run here.
    """

    name = "deepspeed_hybrid"

    def __init__(self, engine, tokenizer, cfg=None):
        bind_torch_gdn_without_gpu()
        self.engine, self.tokenizer = engine, tokenizer
        self._module = engine.module
        self.cfg = HybridEngineRolloutConfig.from_object(cfg)
        self._paths: Paths = resolve_paths(engine, self.cfg)
        self._injection = self._paths.injection
        self._figures = Figures(self.cfg.enable_profiling, self._paths.device)
        self._speculation = make_speculation(self.cfg, self._paths)
        kinds = 1 if self._speculation is None else len(self._speculation.controller.lengths)
        self._graphs = GraphRunner(kinds * self.cfg.max_graphs, self._figures.trace) if self._paths.graph else None
        place = self._paths.call, self._paths.device, self.cfg.state_dtype
        steps = self._graphs, self._paths.choose, self._paths.truncate
        self._arena = Arena(
            *place,
            *steps,
            lambda: self._injection.masked,
            self._prompt_graphs(),
            self._speculation,
            self._paths.peers.least,
            self._injection.sums,
            lambda state_dtype: self._injection.many_rows(state_dtype, self._speculation is not None),
            self._paths.copy,
        )
        self._look()
        self._changes = 0  # how often the model was found changed
        self._unfit = False  # whether the arena was made before the last change
        self._run = 0  # counts calls, so that an iterator left open knows when its slots were taken
        self._closed = False
        for line in self._paths.notes:
            _say_once(line)

    def _look(self) -> None:
        """Remember the model as it is, and which tables every call has to set, until it is found changed."""
        model = self._paths.call.model
        self._seen: SeenModel | None = SeenModel(model)
        self._tables = [module.__dict__ for module in model.modules()]  # past the slow __setattr__
        self._configs = attention_configs(model)

    def _prompt_graphs(self) -> PromptGraphs | None:
        """On CUDA prompts have the same shapes whether graphs are on or not, and so the same numbers."""
        if self._paths.device.type != "cuda":
            return None
        most, trace = PROMPT_GRAPHS * self.cfg.max_graphs, self._figures.trace
        runner = GraphRunner(most, trace) if self._paths.graph else None
        return PromptGraphs(self._paths.call, runner, lambda: self._injection.prompt_obstacle)

    # ------------------------------------------------------------------------------------------------- generation

    @torch.inference_mode(False)
    @torch.no_grad()
    def generate(self, request: RolloutRequest, sampling: BaseSamplingConfig) -> RolloutBatch:
        """Answer every prompt ``n_samples_per_prompt`` times. Ranks that share a model (AutoTP) call it together.

        Args:
            request: left-padded prompts, [B, T_p].
            sampling: ours or DeepSpeed's SamplingConfig.

        Returns:
            A :class:`RolloutBatch` of B * n rows on the request's device.

        Raises:
            ValueError: bad input, named, before any state has changed.
            RuntimeError: after ``shutdown()``, or after an optimizer step without a sync where weights are gathered;
                or another rank that shares the model has refused the call or has failed.
        """
        clock = self._figures.clock()
        job = self._agree(request, sampling)
        clock.is_checked()
        self._run_to_the_end(job)
        self._figures.note_end(job, clock)
        batch = assemble(request, job.plan.samples, job.answers, pad_id(self.tokenizer))
        self._figures.take(job, clock, self._arena, self._more_figures)
        return batch

    def generate_iter(self, request: RolloutRequest, sampling: BaseSamplingConfig) -> Iterator[FinishedRow]:
        """Like :meth:`generate`, but yield every row when it ends. Between rows the model is as it was before.

        Closing the iterator early abandons the rows still running; the next call starts clean. The figures of a run
        that came to its end include what the caller did between rows.
        """
        clock = self._figures.clock()
        with torch.inference_mode(False):
            job = self._agree(request, sampling, watched=True)
        clock.is_checked()
        return self._finished_rows(job, clock)

    def _finished_rows(self, job: Job, clock: CallClock) -> Iterator[FinishedRow]:
        clock.is_begun()
        for rows in self._rounds(job):
            for row in rows:
                with torch.inference_mode(False):
                    finished = finished_row(job.answers, row, job.request.prompt_ids.device)
                yield finished
        clock.is_done()
        self._figures.take(job, clock, self._arena, self._more_figures)

    def _run_to_the_end(self, job: Job) -> None:
        """Run the job in one go: nobody can have touched the model since it was prepared."""
        with self._numbered(), self._paths.peers.together():
            with self._figures.trace.span("weights"):
                self._injection.freshen()
            with self._generating():
                for _ in self._begin(job, job.anew):
                    pass

    def _rounds(self, job: Job) -> Iterator[list[int]]:
        """Run the job, yielding the rows that have ended. The model is bound only while this generator runs."""
        rounds, begun = None, self._changes
        with self._numbered() as run:
            while True:
                self._refuse_closed("generate_iter()")
                if run != self._run:
                    raise RuntimeError("generate_iter() was overtaken: another call has used its slots since")
                self._follow_weights()
                if rounds is None:
                    self._release_unfit()  # as at the start of a call
                begun = self._changes if rounds is None else begun
                if begun != self._changes and self._graphs is not None:
                    raise RuntimeError("the model was changed while rows were running in a captured graph")
                # What a caller does between rows may take one rank longer, and change its memory alone.
                alike = self._paths.peers.meet(ROUND, self._arena.digest())
                with self._paths.peers.together():
                    with self._figures.trace.span("weights"):
                        self._injection.freshen()  # packed copies follow parameters that were written without notice
                    with self._generating():
                        rounds = rounds or self._begin(job, not alike, watched=True)
                        rows = next(rounds, None)
                if rows is None:
                    return
                yield rows

    @contextmanager
    def _numbered(self) -> Iterator[int]:
        """The number of a run, which is no longer the last once another has taken its slots.

        After a failure what is in the slots is not to be trusted; after an iterator was closed, it is.
        """
        self._run += 1
        run = self._run
        try:
            yield run
        except GeneratorExit:
            raise
        except BaseException:
            if run == self._run:
                self._arena.release()
            raise

    def _begin(self, job: Job, anew: bool, watched: bool = False) -> Iterator[list[int]]:
        """Make room, prepare the step (a capture, where there is none yet), and give the rounds of the loop."""
        with self._figures.trace.span("setup"):
            if anew:
                self._arena.release()
            self._arena.reserve(job.slots, job.tokens, job.plan.kind)
            if self._speculation is not None:
                self._speculation.begin()
            step = self._arena.begin(job.plan)
        return run_rows(
            self._arena,
            job.prompts,
            job.plan,
            step,
            job.slots,
            job.answers,
            job.stats,
            self.cfg.poll_every,
            self.cfg.use_shared_prefill is not False,
            job.keeps,
            self._figures.trace,
            TailShrink(self.cfg.shrink_tail),
            Progress(self.cfg.progress, job.rows),
            watched,
        )

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """The model in evaluation mode with our forwards bound; all of it is undone on exit."""
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            # Slots have the parameters' dtype, and a captured step must not hold autocast's copies of them.
            torch.autocast(self._paths.device.type, enabled=False),
            self._injection.bound(),
            dense_mask_attention(self._configs),
            nullcontext() if self._speculation is None else self._speculation.watching(self._paths.call),
            evaluating(self._tables),
        ):
            yield

    def _prepare(self, request: RolloutRequest, sampling: BaseSamplingConfig) -> Job:
        """Check everything, change nothing."""
        self._refuse_closed("generate()")
        if self.engine.module is not self._module:
            raise RuntimeError(
                "engine.module is another model than when this rollout was made; make a new HybridEngineRollout"
            )
        self._follow_weights()
        self._run += self._release_unfit()  # an iterator that is still open stood on what is released here
        self._injection.check()
        return check_job(request, sampling, self._paths, self.cfg, self.tokenizer, self._arena)

    def _agree(self, request: RolloutRequest, sampling: BaseSamplingConfig, watched: bool = False) -> Job:
        """Check the call, with the ranks that share the model where there are any."""
        asked, paths = getattr(sampling, "continuous_batch_size", None), self._paths
        try:
            return agreed_job(lambda: self._prepare(request, sampling), asked, paths, self.cfg, self._arena, watched)
        except Exception:
            if not self._closed and self.engine.module is self._module and not paths.peers.lost:
                self._injection.take_part()
            raise

    # ---------------------------------------------------------------------------------------------------- weights

    def sync_weights(self, step: int) -> None:
        """Make generation follow the weights of optimizer step ``step``; the trainer's side of DeepSpeed's API."""
        self.sync_segki_weights()

    def sync_segki_weights(self) -> WeightSyncReport:
        """Refresh every derived weight in place, at addresses that stay. Views of the parameters cost nothing.

        Under AutoTP the ranks that share the model call it together, as they call ``generate()``.
        Under ZeRO stage 3 this gathers all weights, so that every rank must call it, once after each
        ``engine.step()``; a ``generate()`` without it is refused. The first ``generate()``, and that after a
        ``release_memory()``, gathers by itself, and is then as collective as this. Only the engine's count of steps
        tells that copies are stale: call this also after ``load_checkpoint()``, and after writing to the weights.
        """
        gathered = self._injection.gathered
        with self._paths.peers.meeting(SYNC):
            self._refuse_closed("a sync")
            if gathered is None or gathered.step is None:  # else left to generate(): looking may outlast the copying
                self._follow_weights()
            if self._speculation is not None:
                self._speculation.drafter.refresh()
        try:
            with self._paths.peers.together(), self._figures.trace.span("sync"):
                return self._injection.sync()
        except BaseException:
            if gathered is not None:  # half of the copies may be of another step, and no count of steps tells
                self.release_memory()
            raise

    def _release_unfit(self) -> bool:
        """Give up buffers made for a model that has changed since: another dtype or width would not fit them."""
        unfit, self._unfit = self._unfit, False
        if unfit:
            self._arena.release()
        return unfit

    def _follow_weights(self) -> None:
        """Plan and fuse anew, and drop the graphs, where anything about the model has changed."""
        if self._seen is None or not self._seen.is_same():
            self._seen = None  # until all that follows has come to its end
            self._paths.check_model(self.engine)
            self._changes, self._unfit = self._changes + 1, True
            self._arena.settle()  # layers may go another way from here on
            self._injection.replan()
            self._injection.follow()
            self._look()  # again: parameters may have been moved next to one another
            for line in self._paths.notes:
                _say_once(line)
            if self._arena.holds_graphs():
                logger.warning("deepspeed_hybrid: the model was changed; captured graphs are dropped")
            self._arena.drop_graphs()

    # ---------------------------------------------------------------------------------------------------- reports

    def describe(self) -> str:
        """Which path every layer takes, and why, as text."""
        lines = [self._paths.describe()]
        if self._speculation is not None:
            lines.append(f"speculative decoding: on, {self._speculation.describe()}")
        return "\n".join(lines)

    def memory_report(self) -> dict:
        """Bytes that generation holds between calls, by kind, each counted once, and ``state_dtype``.

        ``kv_keys``, ``kv_values``, ``gdn_conv``, ``gdn_state`` and, for many rows on CUDA, ``gdn_keys``,
        ``gdn_deltas`` and ``gdn_decays`` are the cache, ``decode_state`` the rows' state and answers,
        ``prompt_buffers`` and ``prompt_logits`` the ends of captured prompt forwards, ``graph_pool`` what else graphs
        have reserved, ``inboxes`` (on CUDA) what ranks write sums into, ``masks`` a mask, ``packed_weights`` copies
        of weights; ``draft_keys``, ``draft_values``, ``draft_weights`` and ``draft_hidden`` are a draft's.
        """
        mask, arena = self._paths.call.kept_mask, self._arena
        others = {"masks": 0 if mask is None else mask.nbytes, "packed_weights": self._injection.packed_bytes}
        if self._speculation is not None:
            others["draft_weights"] = self._speculation.drafter.weight_bytes
        return {**arena.bytes_by_kind(), **arena.graph_bytes(), **others, "state_dtype": self.cfg.state_dtype}

    def get_last_profile(self) -> dict | None:
        """Times (ms) and rates of the last ``generate()``; None unless ``enable_profiling``."""
        return self._figures.profile

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write the stages of the last calls and syncs (some 65,000 stages) as JSON for chrome://tracing or Perfetto.

        The row 'host' has when the host queued a stage, 'device (stream)' when a GPU was at it.

        Raises:
            RuntimeError: without ``enable_profiling``, since nothing was recorded.
        """
        self._figures.export(path)

    def get_last_continuous_stats(self) -> dict | None:
        """Slots, refills, occupancy and rates of the last call with a ``continuous_batch_size``."""
        return self._figures.continuous_stats

    def _more_figures(self) -> dict:
        """What a profile says beside times and rows."""
        captures = {
            "graph_captures": 0 if self._graphs is None else self._graphs.captures,
            "prefill_graph_captures": self._arena.prefill_captures,
        }
        speculative = {} if self._speculation is None else {"speculation": self._speculation.stats.summary()}
        return {**captures, **self._paths.reasons(), **speculative}

    # ----------------------------------------------------------------------------------------------------- memory

    def release_memory(self) -> None:
        """Give cache, state, graphs and gathered weights back; the next ``generate()`` makes them anew."""
        self._run += 1
        self._injection.release()
        self._arena.release()
        self._paths.call.kept_mask = None
        self._paths.empty_cache()

    def shutdown(self) -> None:
        """Release everything; a later ``generate()`` or sync, which would take memory again, is a RuntimeError."""
        self.release_memory()
        self._closed = True

    def _refuse_closed(self, call: str) -> None:
        if self._closed:
            raise RuntimeError(f"{call} was asked for after shutdown()")

    def __enter__(self) -> "HybridEngineRollout":
        return self

    def __exit__(self, *exception) -> None:
        self.shutdown()
