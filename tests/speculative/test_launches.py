# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How many ops a speculative step is, by part, each of which is one launch on a GPU, or two at the most.

Nothing is left to small kernels of torch, but for the features' concatenation and the drafts' argmax.
"""

from collections import Counter

import pytest
from models import ragged_prompts, tiny_model
from speculative_cases import speculative_rollout, tiny_draft
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_hybrid import RolloutRequest, SamplingConfig, paths
from deepspeed_hybrid.ops import fused_linear
from deepspeed_hybrid.ops.shared_sum import SharedSum
from deepspeed_hybrid.segments import chains
from deepspeed_hybrid.segments.decoder_layer import DecodeOps
from deepspeed_hybrid.speculative import speculation

FREE = {"view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "t", "transpose", "unbind", "split", "alias"}
FREE |= {"detach", "empty", "empty_like", "new_empty", "split_with_sizes", "as_strided", "squeeze"}


class Watch(TorchDispatchMode):
    """Ops that do something, by the part that calls them."""

    def __init__(self):
        super().__init__()
        self.part, self.seen = "other", {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.seen.setdefault(self.part, Counter())[name] += 1
        return func(*args, **(kwargs or {}))

    def around(self, part: str, function):
        def run(*args):
            outer, self.part = self.part, part
            try:
                return function(*args)
            finally:
                self.part = outer

        return run


@pytest.fixture
def ops(monkeypatch):
    """The ops themselves, which a CPU otherwise has as references: a dispatcher sees into these."""
    chain = fused_linear.normed_rows, fused_linear.normed_linear, fused_linear.residual_linear
    gdn = chains.gdn_decode, chains.gdn_heads, chains.gdn_block, chains.gdn_commit
    mixers = *gdn, chains.attention_decode, chains.attention_block
    shared = SharedSum(fused_linear.normed_linear, fused_linear.normed_rows)
    both = DecodeOps(*chain, shared, *mixers, chains.embedded_rows, chains.rotary_tables)
    monkeypatch.setattr(chains, "_reference_ops", lambda batch_invariant: both)
    monkeypatch.setattr(paths, "OPS", {name: (op, op) for name, (op, _) in paths.OPS.items()})


@pytest.mark.parametrize("sampling, choice", [(dict(temperature=0.0), 1), (dict(seed=1, top_p=0.9), 3)])
def test_ops_of_a_step(ops, monkeypatch, sampling, choice):
    target, layers = tiny_model().requires_grad_(False), 3
    rollout = speculative_rollout(target, tiny_draft(target, block_size=16, num_layers=layers))
    watch, drafter, steps = Watch(), rollout._speculation.drafter, []
    for owner, name in (
        (speculation, "verify"),
        (speculation, "accept"),
        (speculation, "commit"),
        (drafter, "propose"),
        (drafter, "observe"),
    ):
        monkeypatch.setattr(owner, name, watch.around(name, getattr(owner, name)))
    step = rollout._speculation.step

    def watched(*args):
        steps.append(1)
        if len(steps) != 2:
            return step(*args)
        with watch:
            return step(*args)

    rollout._speculation.step = watched
    rollout.generate(RolloutRequest(*ragged_prompts([5])), SamplingConfig(max_new_tokens=24, **sampling))
    seen, plain = watch.seen, 4 * len(target.model.layers)  # of a layer two products and two with a residual ...
    assert seen["propose"].total() == 5 + 5 * layers and seen["propose"]["argmax"] == 1
    assert seen["observe"] == {"rotary_tables": 1, "normed_linear": 2, "normed_rows": 1, "draft_context": 1}
    # ... and a mixer, with what comes before its delta rule; the embedding, rotary tables and the head; the features
    mixers = len(target.model.layers) + seen["verify"]["gdn_heads"]
    assert seen["verify"].total() == plain + mixers + 3 + 1 + seen["verify"]["block_inputs"]
    assert seen["verify"]["block_inputs"] == 1 and seen["verify"]["gdn_heads"] == seen["verify"]["gdn_block"] == 3
    assert seen["accept"].total() == 2 + choice and seen["other"] == {"count_reached": 1}
    assert seen["commit"] == {"gdn_commit": 1}  # of all layers
