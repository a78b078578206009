# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gdn_heads and the ops of gdn_block.py on a CPU, and their kernels in Triton's interpreter: as many decode steps."""

from collections.abc import Iterator

import pytest
import torch
from decode_cases import same_bits
from gdn_block_cases import BlockOps, block_of, step_by_step
from gdn_decode_cases import SHAPES, Shape, interpreted
from glue_cases import poisoned_outputs
from tolerances import assert_close

from deepspeed_hybrid.ops.gdn_block import gdn_block, gdn_commit, gdn_commit_op
from deepspeed_hybrid.ops.gdn_decode import gdn_decode_reference
from deepspeed_hybrid.ops.gdn_heads import gdn_heads

SMALL = Shape(1, 2, 8, 16)


def heads_kernel(*args, **named) -> tuple[torch.Tensor, torch.Tensor]:
    from deepspeed_hybrid.ops.triton.gdn_heads import launch  # under the interpreter only

    return launch(*args, **named)


def block_kernel(*args, **named) -> torch.Tensor:
    from deepspeed_hybrid.ops.triton.gdn_block import launch

    return launch(*args, **named)


def commit_kernel(*args, **named) -> None:
    from deepspeed_hybrid.ops.triton.gdn_block import launch_commit

    launch_commit(*args, **named)


KERNELS = BlockOps(heads_kernel, block_kernel, commit_kernel)
both = pytest.mark.parametrize(
    "ops",
    [
        BlockOps(gdn_heads, gdn_block, gdn_commit),
        pytest.param(KERNELS, marks=[pytest.mark.interpreter, interpreted]),
    ],
    ids=["op", "kernel"],
)


def run(ops: BlockOps, arguments: dict) -> None:
    """Outputs over poison, and then the slots, are those of decode steps; what is no row's keeps its bits."""
    out, window, state = step_by_step(gdn_decode_reference, arguments)
    before = {name: arguments[name].clone() for name in ("window", "state")}
    counts = arguments["counts"]
    live = torch.arange(len(out) // len(counts))[:, None] < counts
    with poisoned_outputs():
        mine = ops.verify(arguments)
    assert mine.dtype == arguments["projected"].dtype and mine.is_contiguous()
    assert (mine.view(*live.shape, -1)[~live] == 0).all()
    assert_close(mine, out)
    assert all(same_bits(arguments[name], old) for name, old in before.items())
    ops.take_over(arguments)
    assert same_bits(arguments["window"], window)
    assert_close(arguments["state"], state)
    if ops is not KERNELS:
        assert same_bits(mine, out) and same_bits(arguments["state"], state)
    untouched = torch.cat([counts == 0, torch.tensor([True])])
    assert same_bits(arguments["state"][untouched], before["state"][untouched])


@both
@pytest.mark.parametrize(
    "shape", [SHAPES[0], SHAPES[3], SHAPES[4], SHAPES[6]], ids=lambda shape: "-".join(map(str, shape))
)
def test_a_block_is_as_many_decode_steps(ops, shape):
    run(ops, block_of(shape, [5, 0, 2], 5))
    run(ops, block_of(shape, [2], 2, bias=False))


@both
@pytest.mark.parametrize("tokens", [1, 5])
def test_every_number_of_tokens(ops, tokens):
    """More than the conv's taps, as many and fewer; and near the beginning of sequences."""
    arguments = block_of(SMALL, list(range(tokens + 1)), tokens)
    arguments["position"] = torch.arange(tokens + 1)
    run(ops, arguments)


@both
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dtypes(ops, dtype, state_dtype):
    """A state of 16 bits is rounded behind each token, as it is in slots. (Of bf16 the interpreter cuts bits off.)"""
    run(ops, block_of(SMALL, [3, 1], 3, dtype=dtype, state_dtype=state_dtype, weights=dtype))


@both
@pytest.mark.parametrize("garbage", [float("nan"), -1e30])
def test_tokens_that_do_not_count_reach_nothing(ops, garbage):
    arguments = block_of(SMALL, [0, 2, 4], 4)
    spoilt = {name: value.clone() if name in ("window", "state") else value for name, value in arguments.items()}
    beyond = (torch.arange(4)[:, None] >= arguments["counts"]).flatten()
    spoilt["projected"] = torch.where(beyond[:, None], garbage, arguments["projected"])
    assert same_bits(ops.verify(spoilt), ops.verify(arguments))
    for one in (spoilt, arguments):
        ops.take_over(one)
    assert all(same_bits(spoilt[name], arguments[name]) for name in ("window", "state"))
    assert bool(spoilt["state"].isfinite().all())


@both
def test_rows_of_none_keep_their_bits_whatever_they_hold(ops):
    arguments = block_of(SMALL, [2, 0], 3)
    arguments["state"][1], arguments["window"][1], arguments["position"][1] = float("nan"), float("inf"), -7
    run(ops, arguments)


@both
def test_layers_are_committed_together(ops, monkeypatch):
    """Each with its own numbers; tokens that do not stay, and free slots, as ever."""
    if ops is KERNELS:
        from deepspeed_hybrid.ops.triton import gdn_block as kernels

        monkeypatch.setattr(kernels, "MOST_LAYERS", 2)
    layers = [block_of(SMALL, [3, 0, 2], 4, seed=10 * layer) for layer in range(3)]
    for name in ("position", "counts"):
        for layer in layers:
            layer[name] = layers[0][name]
    expected = [step_by_step(gdn_decode_reference, layer)[1:] for layer in layers]
    free = [layer["state"][-1].clone() for layer in layers]
    ops.take_over_together(layers)
    for layer, (window, state), untouched in zip(layers, expected, free, strict=True):
        assert same_bits(layer["window"], window) and same_bits(layer["state"][-1], untouched)
        assert_close(layer["state"], state)


@both
def test_layers_that_differ_are_not_committed_together(ops):
    one, other = block_of(SMALL, [1], 2), block_of(Shape(1, 1, 8, 32), [1], 2)
    before = [layer["state"].clone() for layer in (one, other)]
    with pytest.raises(RuntimeError, match="must have the same sizes and dtypes"):
        ops.take_over_together([one, other])
    tensors = [[tensor] for tensor in (*ops.prepared(one), one["window"], one["state"])]
    with pytest.raises(RuntimeError, match="must be of the same layers"):
        ops.commit(*tensors[:4], 2 * tensors[4], one["position"], one["counts"], one["key_heads"])
    assert all(same_bits(layer["state"], old) for layer, old in zip((one, other), before, strict=True))


@both
def test_nothing_to_do(ops):
    arguments = block_of(SMALL, [], 2)
    assert ops.verify(arguments).shape == (0, 32)
    ops.take_over(arguments)


# ---------------------------------------------------------------------------------------------------- dependent launch


class LateStores:
    """What a kernel has stored is seen when the next one waits for it, and no earlier."""

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def delay(self, buffer: torch.Tensor, stored: torch.Tensor, before: torch.Tensor) -> None:
        buffer.copy_(before)
        self._pending.append((buffer, stored))

    def flush(self) -> None:
        for buffer, stored in self._pending:
            buffer.copy_(stored)
        self._pending = []


@pytest.fixture
def stores(monkeypatch) -> Iterator[LateStores]:
    from deepspeed_hybrid.ops.triton import dependent, gated_norm, gdn_block, gdn_heads

    late = LateStores()
    for module in (gated_norm, gdn_block, gdn_heads):
        monkeypatch.setattr(module, "pdl", lambda tensor: {"PDL": True, "launch_pdl": True})
    monkeypatch.setattr(dependent, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(dependent, "gdc_wait", late.flush)
    return late


@pytest.mark.interpreter
@interpreted
def test_what_the_kernel_before_stores_is_waited_for(stores):
    """Products, positions, counts, heads and gates: each kernel sees them as of the end of the one before it."""
    arguments = block_of(SMALL, [3, 1, 0, 4], 4)
    out, window, state = step_by_step(gdn_decode_reference, arguments)

    def late(*names: str, more: tuple[torch.Tensor, ...] = ()) -> None:
        for buffer in (*(arguments[name] for name in names), *more):
            stores.delay(buffer, buffer.clone(), torch.full_like(buffer, 1))

    late("projected", "position", "counts")
    tokens = KERNELS.prepared(arguments)
    late("counts", more=tokens[1:])
    layer = {name: arguments[name] for name in ("norm_weight", "eps")}
    rest = {name: arguments[name] for name in ("state", "counts", "key_heads")}
    assert_close(KERNELS.block(*tokens, **layer, **rest), out)
    late("counts", "projected", "position", more=tokens[1:])
    slots = [[arguments[name]] for name in ("window", "state")]
    KERNELS.commit(*([one] for one in tokens), *slots, arguments["position"], arguments["counts"], rest["key_heads"])
    assert same_bits(arguments["window"], window)
    assert_close(arguments["state"], state)


# -------------------------------------------------------------------------------------------------------------- as ops

OPS = BlockOps(gdn_heads, gdn_block, gdn_commit)


@pytest.mark.parametrize("rounded", [False, True])
def test_opcheck(rounded):
    arguments = block_of(SMALL, [2, 0, 1], 2, dtype=torch.bfloat16) | {"rounded_heads": rounded}

    def checked(op):
        def call(*args, **named):
            torch.library.opcheck(op, args, named)
            return op(*args, **named)

        return call

    watched = BlockOps(*(checked(op) for op in (gdn_heads, gdn_block, gdn_commit_op)))
    watched.verify(arguments)
    watched.take_over(arguments)


def test_there_is_no_gradient():
    arguments = block_of(SMALL, [2], 2)
    tokens = OPS.prepared(arguments)
    arguments["projected"].requires_grad_()
    with pytest.raises(RuntimeError, match="gdn_heads is for inference and has no gradient"):
        OPS.prepared(arguments)
    one, other = BlockOps(lambda *_, **__: tokens[1:], *OPS[1:]), arguments
    with pytest.raises(RuntimeError, match="gdn_block is for inference and has no gradient"):
        one.verify(other)
    with pytest.raises(RuntimeError, match="gdn_commit is for inference and has no gradient"):
        one.take_over(other)


@both
@pytest.mark.parametrize(
    "name, change, message",
    [
        ("counts", lambda tensor: tensor.int(), "counts must be (contiguous )?int64"),
        ("counts", lambda tensor: tensor[:, None], "counts must be contiguous int64|counts must have shape"),
        ("projected", lambda tensor: tensor[:-1], "as many rows for each token as there are lanes, 2"),
        ("projected", lambda tensor: tensor[:, :-1], "projected must have shape"),
        ("state", lambda tensor: tensor.double(), "state must be float32 or bfloat16 or float16"),
        ("state", lambda tensor: tensor[:1], "state must be .* with a slot for each of 2"),
        ("position", lambda tensor: tensor[:0], "as many rows for each token|position must have shape"),
        ("position", lambda tensor: tensor.int(), "position must be int64"),
        ("window", lambda tensor: tensor[:1], "window must have a slot for each of the 2 rows"),
        ("window", lambda tensor: tensor[:, :-1], "channels|window must have shape"),
        ("heads", lambda tensor: tensor[:, :-1], "heads must have shape"),
        ("heads", lambda tensor: tensor.half(), "heads must be float32"),
        ("gates", lambda tensor: tensor[:1], "gates must have shape"),
        ("norm_weight", lambda tensor: tensor[:-1], "norm_weight must have shape"),
    ],
)
def test_arguments_that_do_not_fit_are_named(ops, name, change, message):
    """Of each op that takes the argument; the others are as they should be."""
    arguments = block_of(SMALL, [2, 1], 2)
    arguments["projected"] = arguments["projected"][:, : sum(SMALL.columns)].contiguous()
    before, (projected, heads, gates) = arguments["state"].clone(), ops.prepared(arguments)
    layer = {
        key: arguments[key] for key in ("window", "conv_weight", "conv_bias", "A_log", "dt_bias", "position", "counts")
    }

    def committed(position, counts, key_heads, **named):
        ops.commit(position=position, counts=counts, key_heads=key_heads, **{key: [one] for key, one in named.items()})

    given = {"projected": projected, "key_heads": arguments["key_heads"]}
    block = given | {"heads": heads, "gates": gates} | {key: arguments[key] for key in ("state", "counts")}
    calls = [
        (ops.heads, given | layer | {"key_dim": before.shape[2]}),
        (ops.block, block | {key: arguments[key] for key in ("norm_weight", "eps")}),
        (committed, block | {key: arguments[key] for key in ("window", "position")}),
    ]
    refused = 0
    for op, named in calls:
        if name in named:
            with pytest.raises(RuntimeError, match=message):
                op(**named | {name: change(named[name])})
            refused += 1
    assert refused and same_bits(arguments["state"], before)
