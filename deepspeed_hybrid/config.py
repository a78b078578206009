# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a user sets: the engine's configuration, checked when it is made."""

from dataclasses import dataclass, fields

import torch

SEGMENT_KINDS = ("all", "fused_glu", "fused_gdn", "fused_attention")
BACKENDS = ("auto", "cuda", "triton", "torch")
SPECULATIVE = ("dflash", "mtp")
AUTO_BLOCK = "auto"  # a draft_block_size
DRAFT_KV_CACHE_DTYPES = ("fp8_e4m3",)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HybridEngineRolloutConfig:
    """Options of :class:`HybridEngineRollout`; every field of DeepSpeed 0.19.8's class of this name is here.

    Args:
        use_graph_capture: one CUDA graph per decode step, and one per shape of prompts. None: on where possible, and
            the profile says why not. True without a CUDA device is an error.
        enable_profiling: fill ``get_last_profile()``, keep stages for ``export_chrome_trace()``, and mark them as NVTX
            ranges. Times on a GPU come from events, so that no stage waits for them.
        use_shared_prefill: samples of one prompt share its prefill. None: on.
        align_decode_fronts, enable_cache_trimming: accepted and without effect, since every row has a slot of its own.
        continuous_cache_capacity: tokens a slot can hold. None: what the request needs. Too small is an error.
        use_segki: segment kernels in the model's layers while generating. None: on where possible.
        segki_kernel: which segments, one of ``SEGMENT_KINDS``.
        segki_backend: which implementation of the kernels, one of ``BACKENDS``; 'auto' prefers CUDA where it builds.
        state_dtype: dtype of the recurrent state, a torch.dtype or its name.
        max_graphs: captured decode steps kept (so many of each length of blocks), and a quarter of the captured prompt
            shapes; the least recently used is dropped first.
        shrink_tail: once nobody waits for a slot and rows need at most half of the lanes, move them together and go on
            with fewer. A step of another size may round a last bit otherwise, as any schedule may.
        poll_every: decode steps between two looks at the stop flags; fewer of those that may bring several tokens.
        batch_invariant: a row's tokens and logprobs independent of its batch mates, slot and bucket to the last bit:
            prompts one at a time, products by kernels that sum a row in one order. It costs time, and
            wants every layer to be a decode chain; an error where one is not. On a CPU rows run one by one. On a GPU
            it is not confirmed in bf16 yet.
        progress: a bar on stderr over the rows of a call, with the number of tokens so far; where there are several
            processes, on the first only.
        speculative: 'dflash': a draft model guesses several tokens, and a step of the model chooses as many of its
            own as were guessed right, and one more. Tokens are those of the plain path. 'mtp': the same with the MTP
            head of a Qwen3.5. None: off.
        draft_model: the folder of a DFlash checkpoint, or a ``DFlashDraft``; for 'mtp' the folder of a Qwen3.5
            checkpoint, a .safetensors file, or an ``MtpDraft``. ``sync_weights`` copies a module's weights again.
        draft_block_size: tokens of a block, the last one chosen among them; at most the draft's own, which is None.
            An MTP head runs once for each token behind the first: None is 4, and 16 the most.
            'auto': as many as pay, by measured times and acceptance; where nothing pays, plain steps. Lengths then
            differ from run to run, and the last bits of logprobs with them.
        draft_kv_cache_dtype: of the keys and values that a draft model keeps of its context. 'fp8_e4m3': half as large
            as 16 bits, rounded as they are written, with a scale of 1; only guesses, and so speed, depend on it.
            None: the model's own. With 'dflash' alone.
        draft_side_stream: in a step of a block, bring a draft model's context up to date on a stream of its own,
            beside what follows in the step. Results are the same. On a CPU it changes nothing. With 'dflash' alone.
        train_consistent: in the training forward's order where that costs time: prompts run in the model's own code,
            and in decode steps a norm ends before the product that reads it, and products are the library's, with an
            activation or a residual in launches of their own. Roundings that cost nothing follow it in any case, and
            on a CPU nothing changes. Wants ``state_dtype`` fp32, as training has it, and goes without
            ``batch_invariant``.

    Raises:
        ValueError: names the field, what arrived and what is accepted.
    """

    use_graph_capture: bool | None = None
    enable_profiling: bool = False
    use_shared_prefill: bool | None = None
    align_decode_fronts: bool = False
    enable_cache_trimming: bool = False
    continuous_cache_capacity: int | None = None
    use_segki: bool | None = None
    segki_kernel: str = "all"
    segki_backend: str = "auto"
    state_dtype: torch.dtype | str = torch.float32
    shrink_tail: bool = True
    max_graphs: int = 8
    poll_every: int = 8
    batch_invariant: bool = False
    progress: bool = False
    speculative: str | None = None
    draft_model: object | None = None
    draft_block_size: int | str | None = None
    draft_kv_cache_dtype: str | None = None
    draft_side_stream: bool = False
    train_consistent: bool = False

    def __post_init__(self) -> None:
        for name in ("use_graph_capture", "use_shared_prefill", "use_segki"):
            _require(
                name,
                getattr(self, name),
                getattr(self, name) is None or isinstance(getattr(self, name), bool),
                "True, False or None",
            )
        inert = ("align_decode_fronts", "enable_cache_trimming")
        switches = ("draft_side_stream", "train_consistent")
        for name in (*inert, *switches, "enable_profiling", "shrink_tail", "batch_invariant", "progress"):
            _require(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        _require(
            "train_consistent",
            self.train_consistent,
            not (self.train_consistent and self.batch_invariant),
            "False where batch_invariant is True: the library's products go by the batch",
        )
        for name in ("max_graphs", "poll_every"):
            _require(name, getattr(self, name), is_integer(getattr(self, name), 1), "an integer of at least 1")
        _require(
            "continuous_cache_capacity",
            self.continuous_cache_capacity,
            self.continuous_cache_capacity is None or is_integer(self.continuous_cache_capacity, 1),
            "None or an integer of at least 1",
        )
        _require("segki_kernel", self.segki_kernel, self.segki_kernel in SEGMENT_KINDS, f"one of {SEGMENT_KINDS}")
        _require("segki_backend", self.segki_backend, self.segki_backend in BACKENDS, f"one of {BACKENDS}")
        _require(
            "speculative",
            self.speculative,
            self.speculative is None or self.speculative in SPECULATIVE,
            f"None or one of {SPECULATIVE}",
        )
        if self.speculative is None:
            for name in ("draft_model", "draft_block_size", "draft_kv_cache_dtype"):
                _require(name, getattr(self, name), getattr(self, name) is None, "None where speculative is None")
            _require("draft_side_stream", True, not self.draft_side_stream, "False where speculative is None")
        else:
            _require("draft_model", None, self.draft_model is not None, "set where speculative is")
        if self.speculative == "mtp":
            for name, off in (("draft_kv_cache_dtype", None), ("draft_side_stream", False)):
                _require(name, getattr(self, name), getattr(self, name) == off, f"{off} with speculative='mtp'")
        _require(
            "draft_block_size",
            self.draft_block_size,
            self.draft_block_size in (None, AUTO_BLOCK) or is_integer(self.draft_block_size, 2),
            f"None, an integer of at least 2 or {AUTO_BLOCK!r}",
        )
        _require(
            "draft_kv_cache_dtype",
            self.draft_kv_cache_dtype,
            self.draft_kv_cache_dtype is None or self.draft_kv_cache_dtype in DRAFT_KV_CACHE_DTYPES,
            f"None or one of {DRAFT_KV_CACHE_DTYPES}",
        )
        dtype = getattr(torch, self.state_dtype, None) if isinstance(self.state_dtype, str) else self.state_dtype
        _require("state_dtype", self.state_dtype, dtype in STATE_DTYPES, f"one of {STATE_DTYPES} or its name")
        _require(
            "state_dtype",
            self.state_dtype,
            not self.train_consistent or dtype == torch.float32,
            "torch.float32 where train_consistent is True: training's scan has no other",
        )
        object.__setattr__(self, "state_dtype", dtype)

    @classmethod
    def from_object(cls, cfg: object) -> "HybridEngineRolloutConfig":
        """Take over the fields that ``cfg`` has: None, this class, DeepSpeed's classes, or any object with them."""
        if isinstance(cfg, cls):
            return cfg
        if isinstance(cfg, dict):
            raise ValueError(
                "cfg must be an object with the fields as attributes; for a dict d pass HybridEngineRolloutConfig(**d)"
            )
        return cls(**{field.name: getattr(cfg, field.name) for field in fields(cls) if hasattr(cfg, field.name)})


def is_integer(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _require(name: str, value: object, accepted: bool, what: str) -> None:
    if not accepted:
        raise ValueError(f"{name} must be {what}; got {value!r}")
