# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The draft model's forward against a dense one over the whole context, written out here without a cache."""

import pytest
import torch
import torch.nn.functional as F
from models import VOCAB, tiny_model
from mtp_cases import tiny_mtp
from speculative_cases import MASK, tiny_draft

from deepspeed_hybrid.cache.layers import StepPlan
from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.compat import ModelCall, layer_kinds
from deepspeed_hybrid.generation.state import DecodeState
from deepspeed_hybrid.speculative.config import FULL, SLIDING
from deepspeed_hybrid.speculative.draft import DFlashDraft, RMSNorm
from deepspeed_hybrid.speculative.drafter import DFlashDrafter
from deepspeed_hybrid.speculative.rope import RopeSettings

TOKENS = 6


def lively(draft: DFlashDraft) -> DFlashDraft:
    """Norms and biases that are not the neutral ones, so that leaving one out shows."""
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_()
    return draft


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: torch.Tensor, positions: torch.Tensor, rope: RopeSettings) -> torch.Tensor:
    """[N, heads, E] at positions [N], as complex numbers."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() / rope.theta ** (torch.arange(half).double() / half)
    turned = (
        torch.complex(x[..., :half].double(), x[..., half:].double())
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return (torch.cat([turned.real, turned.imag], dim=-1) * (rope.attention_factor or 1)).to(x.dtype)


def dense(draft: DFlashDraft, features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Features [N, C] of the context, embeddings [T, D] of the block behind it -> [T, D], one row, head by head."""
    config, weights = draft.config, draft.state_dict()
    eps, context, tokens = config.rms_norm_eps, len(features), len(embeddings)
    positions = torch.arange(context + tokens)
    seen_context = norm(F.linear(features, weights["fc.weight"]), weights["hidden_norm.weight"], eps)
    x = embeddings
    for index in range(config.num_layers):
        own = {
            name.removeprefix(f"layers.{index}."): weight
            for name, weight in weights.items()
            if name.startswith(f"layers.{index}.")
        }

        def projected(x, name, own=own):
            return F.linear(x, own[f"self_attn.{name}_proj.weight"], own.get(f"self_attn.{name}_proj.bias"))

        u = norm(x, own["input_layernorm.weight"], eps)
        both = torch.cat([seen_context, u])
        shape = (-1, config.head_dim)
        query = turn(
            norm(projected(u, "q").unflatten(-1, shape), own["self_attn.q_norm.weight"], eps),
            positions[context:],
            config.rope,
        )
        key = norm(projected(both, "k").unflatten(-1, shape), own["self_attn.k_norm.weight"], eps)
        key = turn(key, positions, config.rope)
        value = projected(both, "v").unflatten(-1, shape)
        mixed = torch.zeros_like(query)
        for head in range(config.num_heads):
            group = head // (config.num_heads // config.num_kv_heads)
            for row in range(tokens):
                at = context + row
                allowed = [
                    place
                    for place in range(context + tokens)
                    if (place <= at or not config.causal[index])
                    and (config.layer_types[index] == FULL or place >= at - config.sliding_window + 1)
                ]
                scores = query[row, head] @ key[allowed, group].T / config.head_dim**0.5
                mixed[row, head] = scores.softmax(-1) @ value[allowed, group]
        x = x + projected(mixed.flatten(1), "o")
        u = norm(x, own["post_attention_layernorm.weight"], eps)
        gated = F.silu(F.linear(u, own["mlp.gate_proj.weight"])) * F.linear(u, own["mlp.up_proj.weight"])
        x = x + F.linear(gated, own["mlp.down_proj.weight"])
    return norm(x, weights["norm.weight"], eps)


class Served:
    """A drafter over slots of a tiny target, fed features by hand."""

    def __init__(self, draft: DFlashDraft, target=None, slots: int = 3, capacity: int = 40):
        self.target = target or tiny_model()
        self.drafter = DFlashDrafter(draft, ModelCall(self.target))
        self.cache = SlotCache(layer_kinds(self.target), slots, capacity)
        self.drafter.attach(self.cache)
        self.capacity = capacity

    @torch.no_grad()
    def feed(self, slot: int, features: torch.Tensor, start: int = 0) -> None:
        """[N, C] at positions start.. of a slot, as a prompt's."""
        positions = torch.arange(start, start + len(features))[None]
        plan = StepPlan(
            lanes=1,
            slots=torch.tensor([slot]),
            write_positions=positions,
            kv_length=start + len(features),
            before=torch.tensor([start]),
            first=start == 0,
        )
        self.drafter.observe(features[None], plan)

    @torch.no_grad()
    def hidden(self, anchors: list[int], positions: list[int], tokens: int = TOKENS) -> torch.Tensor:
        """What the block forward gives, [B, T, D], behind the last norm."""
        state = DecodeState.empty(len(anchors), 4, torch.device("cpu"))
        state.token.copy_(torch.tensor(anchors))
        state.position.copy_(torch.tensor(positions))
        state.parked.fill_(False)
        seen, block = [], self.drafter.draft.block

        def watched(*arguments):
            seen.append(block(*arguments))
            return seen[-1]

        self.drafter.draft.block = watched
        self.proposed = self.drafter.propose(state, tokens, self.capacity)
        del self.drafter.draft.block
        scaled, squares = seen[0]
        factor = (squares.sum(0) / scaled.shape[1] + self.drafter.source.config.rms_norm_eps).rsqrt()
        normed = scaled * factor[:, None] if len(squares) else scaled
        return normed.unflatten(0, (tokens, len(anchors))).transpose(0, 1)


def noise(target, anchor: int, tokens: int = TOKENS) -> torch.Tensor:
    return target.get_input_embeddings()(torch.tensor([anchor] + [MASK] * (tokens - 1))).detach()


LAYERS = {
    "full": dict(),
    "bias": dict(attention_bias=True),
    "causal": dict(causal=(True, True)),
    "sliding": dict(layer_types=(SLIDING, SLIDING)),
    "mixed": dict(layer_types=(SLIDING, FULL)),
    "both ways": dict(layer_types=(SLIDING, FULL), causal=(False, False)),
    "scaled": dict(rope=RopeSettings(16, attention_factor=1.3)),
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_blocks_over_the_cache_are_dense_ones(options):
    """Rows of different lengths, longer and shorter than the window; some context comes in later pieces."""
    draft = lively(tiny_draft(tiny_model(), **options))
    served = Served(draft)
    torch.manual_seed(3)
    features = [torch.randn(length, draft.fc.in_features) for length in (11, 1, 17)]
    served.feed(0, features[0])
    served.feed(1, features[1])
    served.feed(2, features[2][:9])
    served.hidden([5, 6, 7], [11, 1, 9])  # a block that the following context overwrites
    served.feed(2, features[2][9:], start=9)
    hidden = served.hidden([50, 60, 70], [11, 1, 17])
    for row, anchor in enumerate((50, 60, 70)):
        expected = dense(draft, features[row], noise(served.target, anchor))
        torch.testing.assert_close(hidden[row], expected, atol=2e-5, rtol=1e-4)
        logits = F.linear(expected[1:], served.target.lm_head.weight)
        assert torch.equal(served.proposed[row], logits.argmax(-1))


@pytest.mark.parametrize("options", [{}, LAYERS["bias"], LAYERS["scaled"]], ids=["plain", "bias", "scaled"])
def test_one_product_for_all_layers_is_layer_by_layer(options):
    draft = lively(tiny_draft(tiny_model(), **options))
    attention = draft.layers[0].self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    assert {one.bias is not None for one in projections} == {"attention_bias" in options}
    served, features = Served(draft), torch.randn(2, 5, draft.fc.in_features)
    with torch.no_grad():
        single = draft.context_keys_values(draft.context(features), torch.arange(5)[None].expand(2, -1))
    for slot, rows in enumerate(features):
        served.feed(slot, rows)
    cache = served.drafter.cache
    for kept, other in zip((cache.keys, cache.values), single, strict=True):
        assert other.shape == (2, 5, 2, 2, 16)
        torch.testing.assert_close(kept[:2, :5], other, atol=1e-5, rtol=1e-5)


def test_refreshed_in_place():
    draft = lively(tiny_draft(tiny_model(), attention_bias=True))
    served = Served(draft)
    drafter = served.drafter
    places = [part.data_ptr() for part in drafter.draft.tensors()]
    features = torch.randn(7, draft.fc.in_features)
    served.feed(0, features)
    before = served.hidden([9], [7])
    lively(draft)
    with torch.no_grad():
        draft.fc.weight.normal_()
        draft.layers[1].self_attn.v_proj.weight.normal_()
    drafter.refresh()
    served.feed(0, features)
    after = served.hidden([9], [7])
    assert not torch.allclose(before, after, atol=1e-2)
    torch.testing.assert_close(after[0], dense(draft, features, noise(served.target, 9)), atol=2e-5, rtol=1e-4)
    assert [part.data_ptr() for part in drafter.draft.tensors()] == places


@pytest.mark.parametrize("inside", [False, True])
def test_made_in_inference_mode(inside):
    target, draft = tiny_model(), tiny_draft(tiny_model())
    with torch.inference_mode():
        served = Served(draft, target)
    with torch.inference_mode(inside):
        served.drafter.refresh()
    served.drafter.refresh()
    assert not any(part.is_inference() for part in served.drafter.draft.tensors())


def test_the_context_goes_by_the_configured_order():
    """fc's columns belong to layers in that order: both turned round is the same draft, one of them is not."""
    target = tiny_model()
    one = lively(tiny_draft(target, target_layer_ids=(3, 1)))
    width = one.config.hidden_size
    first, second = torch.randn(2, 5, width)
    other = tiny_draft(target, target_layer_ids=(1, 3))
    other.load_state_dict(one.state_dict())
    given = torch.cat([first, second], dim=-1)
    turned = torch.cat([second, first], dim=-1)
    assert not torch.allclose(other.context(turned), one.context(given), atol=1e-2)
    other.fc.weight.copy_(torch.cat([one.fc.weight[:, width:], one.fc.weight[:, :width]], dim=1))
    torch.testing.assert_close(other.context(turned), one.context(given), atol=1e-5, rtol=1e-5)


def test_norms_are_plain():
    """Qwen3.5's own are stored around zero; a fresh one of each kind does not do the same to a weight."""
    x, weight = torch.randn(3, 8), torch.rand(8)
    plain = RMSNorm(8, 1e-6)
    plain.weight = torch.nn.Parameter(weight)
    oracle = torch.nn.RMSNorm(8, 1e-6)
    oracle.weight = torch.nn.Parameter(weight)
    torch.testing.assert_close(plain(x), oracle(x))
    theirs = type(tiny_model().model.norm)(8)
    theirs.weight = torch.nn.Parameter(weight)
    assert not torch.allclose(plain(x), theirs(x), atol=1e-2)


@pytest.mark.parametrize("make", [tiny_draft, tiny_mtp])
def test_a_cast_leaves_frequencies_alone(make):
    draft, far = make(tiny_model()), torch.tensor([[12345]])
    exact, later = draft.rotary(far, torch.float32), draft.bfloat16().rotary(far, torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(exact, later, strict=True))


def test_embedding_and_head_are_the_live_ones():
    target = tiny_model()
    draft = lively(tiny_draft(target))
    served = Served(draft, target)
    features = torch.randn(6, draft.fc.in_features)
    served.feed(0, features)
    before = served.hidden([9], [6])
    optimizer = torch.optim.SGD([target.get_input_embeddings().weight, target.lm_head.weight], lr=1.0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    after = served.hidden([9], [6])
    expected = dense(draft, features, noise(target, 9))
    torch.testing.assert_close(after[0], expected, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(before, after, atol=1e-2)
    assert torch.equal(served.proposed[0], F.linear(expected[1:], target.lm_head.weight).argmax(-1))


def test_only_what_the_embedding_can_read_is_proposed():
    target = tiny_model()
    head = torch.nn.Linear(target.lm_head.in_features, VOCAB + 64, bias=True)
    torch.nn.init.zeros_(head.weight)
    with torch.no_grad():
        head.bias[:] = torch.arange(VOCAB + 64)
    target.lm_head = head
    served = Served(lively(tiny_draft(target)), target)
    served.feed(0, torch.randn(4, served.drafter.source.fc.in_features))
    served.hidden([9], [4])
    assert served.proposed.unique().tolist() == [VOCAB - 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_cache_has_the_targets_dtype(dtype):
    target = tiny_model().to(dtype)
    draft = lively(tiny_draft(target))
    served = Served(draft, target)
    features = torch.randn(6, draft.fc.in_features).to(dtype)
    served.feed(0, features)
    assert served.drafter.cache.keys.dtype == dtype
    expected = dense(draft, features.float(), noise(target, 9).float())
    tolerance = 2e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(served.hidden([9], [6])[0].float(), expected, atol=tolerance, rtol=tolerance)


def test_what_an_earlier_row_left_is_not_seen():
    """NaN in a slot's context does not reach the next row of that slot."""
    draft = lively(tiny_draft(tiny_model()))
    served = Served(draft)
    served.feed(0, torch.full((30, draft.fc.in_features), float("nan")))
    features = torch.randn(4, draft.fc.in_features)
    served.feed(0, features)
    hidden = served.hidden([9], [4])
    torch.testing.assert_close(hidden[0], dense(draft, features, noise(served.target, 9)), atol=2e-5, rtol=1e-4)
    assert int(served.proposed.max()) < VOCAB
