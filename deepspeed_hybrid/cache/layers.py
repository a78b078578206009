# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Cache layers with a place for every slot, at addresses that stay."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from deepspeed_hybrid.compat import LinearAttentionLayer, StaticLayer
from deepspeed_hybrid.ops import gdn_deferred, gdn_kept_block
from deepspeed_hybrid.ops.gdn_decode import ring_order, window_order

DEFERRED = "gdn_keys", "gdn_deltas", "gdn_decays"  # kinds of buffers of tokens beside the states
SETTLE_BYTES = 2**26  # of fp32 states at a time: memory may be full


@dataclass(frozen=True)
class Deferral:
    """How decode steps leave tokens beside recurrent states: in rings of so many places, and how states get them."""

    places: int
    settled: Callable[..., torch.Tensor]
    blocks: bool  # steps may have several tokens a row


SINGLE_TOKENS = Deferral(gdn_deferred.PLACES, gdn_deferred.settled, blocks=False)
BLOCKS = Deferral(gdn_kept_block.PLACES, gdn_kept_block.settled, blocks=True)


@dataclass(frozen=True)
class Uncommitted:
    """What a recurrent layer has left to do with a block of tokens, of which some will stay."""

    commit: Callable[..., None]  # gdn_commit of deepspeed_hybrid.ops, gdn_windows, or their references
    tensors: tuple[torch.Tensor, ...]  # of this layer, in the order of its arguments
    rest: tuple[int, ...]  # its last arguments, behind those that are of rows

    @property
    def kind(self) -> tuple:
        """Layers for which it is the same are committed together."""
        facts = ((tensor.shape, tensor.stride(), tensor.dtype) for tensor in self.tensors)
        return self.commit, self.rest, *facts


@dataclass(frozen=True)
class BlockPlan:
    """Several tokens a lane in one decode step, T of them, of which it is not known yet how many will stay."""

    tokens: int
    positions: torch.Tensor  # [T, B] int64
    idle: torch.Tensor  # [T, B] bool: tokens that are none: of parked lanes, or beyond a row's limit
    counts: torch.Tensor  # [B] int64: tokens of a lane that are some
    commits: list[Uncommitted] = field(default_factory=list)  # what recurrent layers left to do

    def leave(self, commit: Callable[..., None], tensors: tuple[torch.Tensor, ...], *rest: int) -> None:
        """Remember a recurrent layer's part until it is known how many tokens stay."""
        self.commits.append(Uncommitted(commit, tensors, rest))


@dataclass(frozen=True)
class StepPlan:
    """Where the tokens of one forward go, and what they see. B rows of T tokens.

    A prefill names the rows' slots; a decode step runs lanes 0..B-1, each the slot of that number.
    """

    lanes: int
    slots: torch.Tensor | None  # [B] int64 for a prefill; None for a decode step
    write_positions: torch.Tensor  # [B, T] int64: where each token's key and value go
    kv_length: int  # how many cache positions attention reads
    before: torch.Tensor  # [B] int64: tokens of each row so far
    after: torch.Tensor | None = None  # [B] int64: tokens when this forward is done; None: one more
    parked: torch.Tensor | None = None  # [B] bool: lanes whose state must keep its bits; None for a prefill
    token_mask: torch.Tensor | None = None  # [B, T] bool: False on padding; None: no padding
    first: bool = False  # the first tokens of their sequences: there is no earlier state
    block: BlockPlan | None = None  # the B rows of a decode step are T lanes each, token by token; None: one token
    only_slot: int | None = None  # the slot of the only row, where the host knows it: keys are read without a copy
    last_column: bool = False  # nobody asks for anything else of the model: of the last layer it is enough
    ids: torch.Tensor | None = None  # [B, T] int64: the tokens, for who draws on more than the model's cache
    answered: torch.Tensor | None = None  # [B] int64: in a decode step, tokens of each row's answer so far
    stepped: torch.Tensor | None = None  # [B] int64: in a decode step, tokens that each row's last step has brought

    def lengths(self) -> torch.Tensor:
        """[B] int64: tokens of each row when this forward is done."""
        return self.before + 1 if self.after is None else self.after


class PlanHolder:
    """The plan of the forward under way, shared by all layers of a cache, and what one of them has made of it."""

    plan: StepPlan

    def __init__(self) -> None:
        self.deferring = False  # whether decode steps may leave tokens beside recurrent states
        self._made: dict[Hashable, torch.Tensor] = {}

    def begin(self, plan: StepPlan) -> None:
        self.plan = plan

    def end(self) -> None:
        del self.plan
        self._made = {}

    def once(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """``make()`` of the first layer that asks."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class SlotKVLayer(StaticLayer):
    """Keys and values [slots + 1, heads, capacity, head_dim]; the last slot is scratch.

    The buffers are made at the first update, when the (possibly sharded) head count is known.
    """

    def __init__(self, holder: PlanHolder, slots: int, capacity: int):
        super().__init__(max_cache_len=capacity)
        self.__dict__.pop("cumulative_length", None)  # a tensor, of one length for all rows
        self.holder, self.slots = holder, slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def buffer(states: torch.Tensor) -> torch.Tensor:
            shape = (self.slots + 1, states.shape[1], self.max_cache_len, states.shape[3])
            return torch.zeros(shape, dtype=states.dtype, device=states.device)

        self.keys, self.values = buffer(key_states), buffer(value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, keep: Callable | None = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, heads, T, head_dim] by the plan; return what attention reads, [B, heads, plan.kv_length, ...].

        Args:
            keep: the ``keep_tokens`` op, or None to write in plain torch.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.holder.plan
        # Masked positions are still multiplied by zero: a NaN that an earlier row left there would spread.
        entering = plan.lengths() if plan.first else None
        rows = plan.slots if plan.slots is not None else self.holder.once("write_slots", self._write_slots)
        if keep is not None:
            keep(self.keys, self.values, key_states, value_states, rows, plan.write_positions, entering)
        else:
            if plan.first:
                written = plan.kv_length if plan.token_mask is None else 0  # without padding, by what follows
                for buffer in (self.keys, self.values):
                    buffer[:, :, written:].index_fill_(0, plan.slots, 0.0)
            where = (rows[:, None], slice(None), plan.write_positions)
            self.keys[where] = key_states.transpose(1, 2)
            self.values[where] = value_states.transpose(1, 2)
        if plan.first and plan.token_mask is None:  # nothing else is to be seen
            return key_states, value_states
        return self._read(self.keys, plan), self._read(self.values, plan)

    def _write_slots(self) -> torch.Tensor:
        """[B] int64: every lane's slot in a decode step, or the scratch slot where it is parked."""
        plan = self.holder.plan
        lanes = torch.arange(plan.lanes, device=plan.before.device)
        return lanes if plan.parked is None else lanes.masked_fill(plan.parked, self.slots)

    @staticmethod
    def _read(buffer: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        reachable = buffer[:, :, : plan.kv_length]
        if plan.only_slot is not None:
            return reachable[plan.only_slot : plan.only_slot + 1]
        return reachable[: plan.lanes] if plan.slots is None else reachable.index_select(0, plan.slots)

    def get_seq_length(self) -> int:
        return int(self.holder.plan.write_positions.max()) + 1 if self.is_initialized else 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"kv_keys": self.keys, "kv_values": self.values} if self.is_initialized else {}


class SlotGdnLayer(LinearAttentionLayer):
    """Conv window [slots + 1, channels, kernel] and recurrent state [slots + 1, v_heads, k_dim, v_dim].

    The window keeps the projection's dtype, the recurrent state ``state_dtype``. It is a ring: the token at position p
    is in column p % kernel. What is read and written has it in the order of time, the latest token last.

    Args:
        deferral: there is room for tokens that are not in the state yet, ``deferred``, and how they are kept there.
    """

    def __init__(self, holder: PlanHolder, slots: int, state_dtype: torch.dtype, deferral: Deferral | None = None):
        super().__init__()
        self.holder, self.slots, self.state_dtype, self.deferral = holder, slots, state_dtype, deferral
        self.window: torch.Tensor | None = None
        self.state: torch.Tensor | None = None
        self.deferred: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.lagging = False  # whether steps of this call have left tokens there

    def ensure(
        self, projected: torch.Tensor, kernel_size: int, state_shape: tuple[int, int, int], key_heads: int
    ) -> None:
        """Make the buffers at the first forward; ``projected`` is [B, T, channels]."""
        if self.window is not None:
            return
        rows, device = self.slots + 1, projected.device
        if self.deferral is not None:
            places, (heads, key_dim, value_dim) = self.deferral.places, state_shape
            keys = torch.zeros(rows, key_heads, places, key_dim, dtype=projected.dtype, device=device)
            deltas = torch.zeros(rows, heads, places, value_dim, dtype=torch.float32, device=device)
            self.deferred = keys, deltas, deltas.new_zeros(rows, heads, places)
        self.window = torch.zeros(rows, projected.shape[-1], kernel_size, dtype=projected.dtype, device=device)
        self.state = torch.zeros(rows, *state_shape, dtype=self.state_dtype, device=device)

    def read_window(self) -> torch.Tensor | None:
        """[B, channels, kernel] before the planned tokens; None, for zeros, before the first of a sequence."""
        plan = self.holder.plan
        if plan.first:
            return None
        return self._in_time(
            self.window[: plan.lanes] if plan.slots is None else self.window.index_select(0, plan.slots)
        )

    def read_state(self) -> torch.Tensor | None:
        """[B, v_heads, k_dim, v_dim], likewise."""
        plan = self.holder.plan
        if plan.first:
            return None
        return self.state[: plan.lanes] if plan.slots is None else self.state.index_select(0, plan.slots)

    def _in_time(self, ring: torch.Tensor) -> torch.Tensor:
        holder, kernel = self.holder, ring.shape[-1]
        order = holder.once(("window", kernel), lambda: window_order(holder.plan.before, kernel))
        return ring.gather(2, order.expand(ring.shape))

    def write_window(self, window: torch.Tensor) -> None:
        """Store what :meth:`read_window` returns next time."""
        plan = self.holder.plan
        kernel = window.shape[-1]
        order = self.holder.once(("ring", kernel), lambda: ring_order(plan.lengths(), kernel))
        ring = window.gather(2, order.expand(window.shape))
        if plan.slots is None:
            before = self.window[: plan.lanes]
            torch.where(plan.parked[:, None, None], before, ring, out=before)
        else:
            self.window.index_copy_(0, plan.slots, ring)

    def write_state(self, state: torch.Tensor) -> None:
        """Store what :meth:`read_state` returns next time."""
        plan = self.holder.plan
        if plan.slots is not None:
            self.state.index_copy_(0, plan.slots, state.to(self.state_dtype))
        elif state.data_ptr() != self.state.data_ptr():  # else it was updated in place
            self.state[: plan.lanes].copy_(state)

    def settle(self, *of_rows: torch.Tensor) -> None:
        """Take the tokens beside the states into them; as of the cache."""
        if self.lagging and self.deferral is not None:
            lanes, count = len(of_rows[0]), max(1, SETTLE_BYTES // (4 * self.state[0].numel()))
            for rows in (slice(first, min(first + count, lanes)) for first in range(0, lanes, count)):
                state, rings = self.state[rows], (part[rows] for part in self.deferred)
                state.copy_(self.deferral.settled(state, *rings, *(part[rows] for part in of_rows)))
        self.lagging = False

    def tensors(self) -> dict[str, torch.Tensor]:
        if self.window is None:
            return {}
        kept = dict(zip(DEFERRED, self.deferred or (), strict=False))
        return {"gdn_conv": self.window, "gdn_state": self.state, **kept}
