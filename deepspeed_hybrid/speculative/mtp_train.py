# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Train an MTP head on the policy's own rollouts. The policy gets no gradient from it: it is only read.

Chains start at anchors drawn from the answers. A chain's first pass reads the target's hidden state before its anchor,
and each later one what the pass before has made, as in decoding; its tokens are the row's own, since what follows a
wrong guess is never looked at. A pass is to say the row's next token.
"""

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.speculative.draft import attention
from deepspeed_hybrid.speculative.mtp import MtpDraft, behind_last_norm
from deepspeed_hybrid.speculative.train import Answered, DraftLoss, FeatureTrainer

# Shapes: R rows, S tokens, N anchors a row, T block tokens, D hidden.


class Chains:
    """What the passes of all chains see: the rows' own pairs up to the anchor, and of each chain its passes so far."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, anchors: torch.Tensor):
        places = torch.arange(keys.shape[1], device=keys.device)
        self.keys, self.values = [keys], [values]  # [R, S or N, G, E]
        self.seen = [(places > 0) & (places <= anchors[..., None])]  # [R, N, S or N]

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return attention(queries, torch.cat(self.keys, 1), torch.cat(self.values, 1), torch.cat(self.seen, -1))

    def attend_and_remember(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Of passes behind the first, which has the row's own pair."""
        rows, chains = keys.shape[:2]
        self.keys.append(keys)
        self.values.append(values)
        self.seen.append(torch.eye(chains, dtype=torch.bool, device=keys.device).expand(rows, -1, -1))
        return self.attend(queries, keys, values)


def mtp_loss(
    draft: MtpDraft,
    hidden: torch.Tensor,
    rows: Answered,
    anchors: torch.Tensor,
    found: torch.Tensor,
    embedding: torch.Tensor,
    head: torch.Tensor,
    head_bias: torch.Tensor | None,
    tokens: int,
    decay: float,
) -> DraftLoss:
    """Cross entropy of the tokens behind those of the chains, the further from the anchor the less.

    Args:
        hidden: [R, S, D] of the target, behind its last norm; it gets no gradient.
        anchors, found: [R, N], of :func:`deepspeed_hybrid.speculative.train.draw_anchors`; the first token of a row
            starts no chain.
        embedding, head, head_bias: the target's; they get no gradient.
        tokens: T, one more than there are passes.
        decay: pass i, from 0 on, counts decay ** i.
    """
    length, device = rows.ids.shape[1], rows.ids.device
    found, anchors = found & (anchors > 0), anchors.clamp(min=1)
    embeddings = F.embedding(rows.ids, embedding.detach())
    before = F.pad(hidden.detach()[:, :-1], (0, 0, 1, 0))
    pairs = draft.keys_values(draft.merged(embeddings, before), torch.arange(length, device=device)[None])
    chains = Chains(*pairs, anchors)
    state = before.gather(1, anchors[..., None].expand(-1, -1, before.shape[2]))
    bias = None if head_bias is None else head_bias.detach()
    total, weights = hidden.new_zeros(2, dtype=torch.float32).unbind()
    shares = []
    for index in range(tokens - 1):
        places = anchors + index
        ids = rows.ids.gather(1, places.clamp(max=length - 1))
        attend = chains.attend_and_remember if index else chains.attend
        state = draft(draft.merged(F.embedding(ids, embedding.detach()), state), places, attend)
        behind = (places + 1).clamp(max=length - 1)
        counted = rows.answered.gather(1, behind) & (places + 1 < length) & found
        labels = rows.ids.gather(1, behind)[counted]
        logits = F.linear(state[counted].to(head.dtype), head.detach(), bias).float()
        total = total + decay**index * F.cross_entropy(logits, labels, reduction="sum")
        weights = weights + decay**index * counted.sum()
        shares.append((logits.argmax(dim=-1) == labels).sum() / counted.sum().clamp(min=1))
    return DraftLoss(total / weights.clamp(min=1e-6), torch.stack(shares))


class MtpTrainer(FeatureTrainer):
    """AdamW over an MTP head, a rollout at a time; usable between the policy's own steps.

    What a rollout serves is a copy: its ``sync_weights()`` takes the trained weights over.

    Args:
        model: the target, of which nothing is changed.
        draft: in fp32, on the target's device.
        learning_rate: of AdamW; 1e-5 lets a checkpoint's own head follow a policy, from scratch it takes far more.
        tokens: of the blocks that it is to propose.
        anchors: chains a row.
        decay: pass i, from 0 on, counts decay ** i.
        clip: of the gradient's norm.
        seed: of the anchors.

    Raises:
        ValueError: ``tokens`` is below 2.
    """

    def __init__(
        self,
        model: nn.Module,
        draft: MtpDraft,
        learning_rate: float = 1e-5,
        tokens: int = 4,
        anchors: int = 64,
        decay: float = 0.8,
        clip: float = 1.0,
        seed: int = 0,
    ):
        if tokens < 2:
            raise ValueError(f"tokens of a block must be at least 2; got {tokens}")
        super().__init__(model, draft, (), learning_rate, anchors, clip, seed)
        self.layer_ids = (len(text_model(self.model).layers) - 1,)
        self.tokens, self.decay = tokens, decay

    def loss(self, features: torch.Tensor, rows: Answered, anchors: torch.Tensor, found: torch.Tensor) -> DraftLoss:
        head, embedding = self.model.get_output_embeddings(), text_model(self.model).embed_tokens.weight
        hidden = behind_last_norm(self.model, features)
        chains, theirs = (rows, anchors, found), (embedding, head.weight, head.bias)
        return mtp_loss(self.draft, hidden, *chains, *theirs, self.tokens, self.decay)
