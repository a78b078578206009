# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""An MTP head at work: it follows the target's committed tokens, and proposes a block one token after another.

A token and the hidden state before it have their key and value at the token's position. Every forward of the target
writes them for all of its tokens, with the target's own hidden states: what a proposal wrote there, with the head's,
is gone then, and what lies behind the accepted tokens is written again before anybody sees it. A forward's first token
needs the last hidden state of the forward before, which is why some of them are kept.
"""

import copy

import torch
import torch.nn.functional as F

from deepspeed_hybrid.cache.layers import StepPlan
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall, text_model
from deepspeed_hybrid.generation.state import DecodeState
from deepspeed_hybrid.ops.block_step import block_inputs
from deepspeed_hybrid.speculative.copies import copy_weights
from deepspeed_hybrid.speculative.draft import attention
from deepspeed_hybrid.speculative.draft_cache import DraftCache
from deepspeed_hybrid.speculative.mtp import MtpDraft, behind_last_norm


class LastHidden:
    """[slots + 1, M, D], a ring for each slot: the target's hidden state at position p is in place p % M.

    A block has at most M tokens, and the one that comes to be the last committed is among them: nobody has to know
    which when they are written.
    """

    def __init__(self, slots: int, places: int, size: int, dtype: torch.dtype, device: torch.device):
        self.places = places
        self.hidden = torch.zeros(slots + 1, places, size, dtype=dtype, device=device)

    def read(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, T, D] of positions [B, T] of slots [B, T] or [B, 1] (int64 both)."""
        return self.hidden[slots, positions % self.places]

    def write(self, slots: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> None:
        """[B, T, D], to positions as :meth:`read` takes them."""
        self.hidden[slots, positions % self.places] = hidden

    def clear(self, slots: torch.Tensor) -> None:
        """What an earlier row left there may be NaN."""
        self.hidden.index_fill_(0, slots, 0.0)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"draft_hidden": self.hidden}


class MtpDrafter:
    """Serves a copy of an MTP head in the target's dtype, over the target's live embedding and head.

    Args:
        source: the head to copy; ``refresh()`` copies its weights again.
        call: the target's forward.
        most_tokens: of a block, the anchor among them.
    """

    def __init__(self, source: MtpDraft, call: ModelCall, most_tokens: int):
        self.source, self.call, self.most_tokens = source, call, most_tokens
        self.layer_ids: tuple[int, ...] = (len(text_model(call.model).layers) - 1,)
        self.row = 1, source.config.num_kv_heads, source.config.head_dim
        self.cache: DraftCache | None = None
        self.last: LastHidden | None = None
        self._serve()

    # ----------------------------------------------------------------------------------------------------- weights

    @torch.inference_mode(False)  # whoever makes it there may refresh() it elsewhere
    @torch.no_grad()
    def _serve(self) -> None:
        """Make the copy, as the target is now."""
        weight = self.call.embedding.weight
        self.device, self.dtype = weight.device, weight.dtype
        copied = copy.deepcopy(self.source).requires_grad_(False).eval()
        self.draft = copied.to(device=self.device, dtype=self.dtype)

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the source's weights, in place: every address stays."""
        copy_weights(self.draft, self.source)

    def describe(self) -> str:
        return f"the model's MTP head, up to {self.most_tokens - 1} passes"

    @property
    def weight_bytes(self) -> int:
        return sum(part.nbytes for part in self.draft.parameters())

    # ----------------------------------------------------------------------------------------------------- context

    def attach(self, cache: SlotCache) -> None:
        weight = self.call.embedding.weight
        if (weight.dtype, weight.device) != (self.dtype, self.device):
            self._serve()
        self.cache = DraftCache(self.row, cache.slots, cache.capacity, self.dtype, self.device)
        hidden_size = self.source.config.hidden_size
        self.last = LastHidden(cache.slots, self.most_tokens, hidden_size, self.dtype, self.device)
        cache.companions += [self.cache, self.last]

    def cache_bytes(self, slots: int, capacity: int) -> int:
        last = (slots + 1) * self.most_tokens * self.source.config.hidden_size * self.dtype.itemsize
        return DraftCache.nbytes(self.row, slots, capacity, self.dtype) + last

    def release(self) -> None:
        self.cache = self.last = None

    def observe(self, features: torch.Tensor, plan: StepPlan) -> None:
        block = plan.block
        if block is not None:  # token by token: row i * B + b is token i of lane b
            features = features.reshape(block.tokens, plan.lanes, -1).transpose(0, 1)
            ids, positions = plan.ids.view(block.tokens, plan.lanes).t(), block.positions.t()
            slots, positions = self._places(None, positions, block.idle.t())
        elif plan.slots is None:
            ids = plan.ids
            slots, positions = self._places(None, plan.write_positions, plan.parked[:, None])
        else:
            ids, idle = plan.ids, None if plan.token_mask is None else ~plan.token_mask
            slots, positions = self._places(plan.slots, plan.write_positions, idle)
        if plan.first:
            self.cache.clear(plan.slots)
            self.last.clear(plan.slots)
        hidden = behind_last_norm(self.call.model, features)
        before_first = self.last.read(slots[:, :1], positions[:, :1] - 1)
        before = torch.cat([before_first, hidden[:, :-1]], dim=1)
        # Token 0 has nothing before it. What it writes all the same is at position 0, which no query sees.
        keys, values = self.draft.keys_values(self.draft.merged(self._embedded(ids), before), positions)
        self.cache.write(0, slots, positions, keys, values)
        kept = slice(None) if plan.slots is None else slice(-1, None)  # of a prompt the last token's alone
        self.last.write(slots[:, kept], positions[:, kept], hidden[:, kept])

    def _places(
        self, slots: torch.Tensor | None, positions: torch.Tensor, idle: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots [B, T] or [B, 1] and positions [B, T] of tokens; scratch for tokens that are none.

        Args:
            slots: [B] int64; None: of the lanes.
            positions: [B, T] int64, which may be anything for those that are none.
            idle: [B, T] bool, tokens that are none; None: all are some.
        """
        if slots is None:
            slots = torch.arange(len(positions), device=positions.device)
        if idle is None:
            return slots[:, None], positions
        # Not position 0, where a query sees nothing.
        return slots[:, None].masked_fill(idle, self.cache.slots), positions.masked_fill(idle, 1)

    # ----------------------------------------------------------------------------------------------------- proposals

    def propose(self, state: DecodeState, tokens: int, kv_length: int) -> torch.Tensor:
        rows = state.token, state.position, state.length, state.limit, state.parked
        _, positions, idle, _ = block_inputs(*rows, None, 0, tokens)
        slots, positions = self._places(None, positions.t(), idle.t())
        hidden, length = self.last.read(slots[:, :1], positions[:, :1] - 1), min(kv_length, self.cache.capacity)
        ids, guesses = state.token[:, None], []
        for index in range(tokens - 1):
            one = slice(index, index + 1)
            hidden = self._pass(ids, hidden, slots[:, one], positions[:, one], length)
            ids = self._guesses(hidden)
            guesses.append(ids)
        return torch.cat(guesses, dim=1)

    def _pass(
        self, ids: torch.Tensor, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, length: int
    ) -> torch.Tensor:
        """One token a lane, [B, 1] each but for hidden [B, 1, D] -> [B, 1, D]."""
        places = torch.arange(length, device=positions.device)[None, None]
        seen = (places > 0) & (places <= positions[..., None])

        def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            self.cache.write(0, slots, positions, keys, values)
            return attention(queries, *self.cache.read(0, len(positions), length), seen)

        return self.draft(self.draft.merged(self._embedded(ids), hidden), positions, attend)

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] int64 -> [..., D]."""
        return F.embedding(ids, self.call.embedding.weight)

    def _guesses(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens by the target's head, [..., D] -> [...] int64."""
        # Not the head's forward: while the target generates it holds the target's last norm too.
        head = self.call.model.get_output_embeddings()
        # A head may have more rows than the embedding, which has to read these.
        return F.linear(hidden, head.weight, head.bias)[..., : self.call.known_ids].argmax(dim=-1)
