# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""attention_decode against float64 and Hugging Face's attention: the reference, and the kernels in the interpreter."""

import os

import pytest
import torch
from attention_cases import attention_arguments, only_row, run_attention
from decode_cases import same_bits
from glue_cases import DTYPES, moved
from models import VOCAB, tiny_model
from tolerances import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_hybrid.ops.attention_decode import attention_decode, attention_decode_op, attention_decode_reference

LENGTHS = [1, 15, 16, 17, 40]  # around blocks of 16, and more than one block for each of 3 splits
INTERPRETED = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


def kernels(splits: int, block: int = 16):
    """The Triton kernels on CPU tensors."""

    def run(**arguments) -> torch.Tensor:
        pytest.importorskip("triton")
        from deepspeed_hybrid.ops.triton.attention_decode import launch

        return launch(**arguments, splits=splits, block=block)

    return run


KERNELS = [pytest.param(kernels(splits), marks=INTERPRETED, id=f"kernels, {splits} splits") for splits in (1, 3)]
RUNS = [pytest.param(attention_decode, id="reference"), *KERNELS]
# The interpreter holds bf16 as integers, and multiplies them as such: fp16 stands for both.
DTYPED_RUNS = [
    pytest.param(attention_decode, torch.bfloat16, id="reference, bfloat16"),
    *(
        pytest.param(*run.values, dtype, marks=run.marks, id=f"{run.id}, {str(dtype)[6:]}")
        for run in RUNS
        for dtype in (torch.float32, torch.float16)
    ),
]


@pytest.mark.parametrize("run, dtype", DTYPED_RUNS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_against_float64(run, dtype, kv_heads, gated):
    run_attention(run, attention_arguments(LENGTHS, kv_heads=kv_heads, gated=gated, dtype=dtype, parked=True))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("rotary", [0, 2, 16, 32])
def test_how_much_of_a_head_is_rotated(run, rotary):
    run_attention(run, attention_arguments([17, 40], rotary=rotary))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "options", [{"normed": False}, {"norm_offset": 0.0}, {"norm_offset": 1.0}], ids=["none", "plain", "zero-centred"]
)
def test_norms(run, options):
    run_attention(run, attention_arguments([17, 40], **options))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_one_norm_alone(run, name):
    run_attention(run, attention_arguments([17, 40]) | {name: None})


@pytest.mark.parametrize("run", RUNS)
def test_dtypes_mix(run):
    options = {"cos_dtype": torch.float16, "norm_dtype": torch.float32}
    run_attention(run, attention_arguments([17, 40], dtype=torch.float16, **options))
    options = {"cos_dtype": torch.bfloat16, "norm_dtype": torch.bfloat16}
    run_attention(run, attention_arguments([17, 40], **options))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("head_dim, rotary", [(8, 8), (16, 4), (24, 10), (64, 64)])
def test_head_sizes(run, head_dim, rotary):
    run_attention(run, attention_arguments([17, 40], head_dim=head_dim, rotary=rotary))


@pytest.mark.parametrize("run", RUNS)
def test_more_queries_than_a_tile_has_rows(run):
    run_attention(run, attention_arguments([3, 18], query_heads=20, kv_heads=1, head_dim=16, gated=False))
    run_attention(run, attention_arguments([3, 18], query_heads=6, kv_heads=2, head_dim=16))


@pytest.mark.parametrize("run", RUNS)
def test_a_full_cache(run):
    run_attention(run, attention_arguments([33, 32, 31], capacity=33, poison=False))


@pytest.mark.parametrize("run", RUNS)
def test_strides_do_not_matter(run):
    sliced = attention_arguments(LENGTHS)
    packed = moved(sliced, "cpu") | {"projected": sliced["projected"].contiguous()}
    wide = {name: torch.cat([packed[name], packed[name]], dim=1)[:, :8] for name in ("cos", "sin")}
    wide = moved(packed, "cpu") | wide
    expected = run_attention(run, sliced)
    for other in (packed, wide):
        assert same_bits(run_attention(run, other), expected)


@pytest.mark.parametrize("run", RUNS)
def test_one_angle_for_all_rows(run):
    arguments = attention_arguments(LENGTHS)
    shared = {name: arguments[name][:1].expand(len(LENGTHS), -1) for name in ("cos", "sin")}
    expected = run_attention(run, arguments | {name: angle.contiguous() for name, angle in shared.items()})
    assert same_bits(run(**arguments | shared), expected)


@pytest.mark.parametrize("run", RUNS)
def test_all_rows_parked(run):
    arguments = attention_arguments([3, 4])
    arguments["parked"][:] = True
    arguments["projected"][:] = float("nan")
    assert (run_attention(run, arguments) == 0).all()


@pytest.mark.parametrize("run", RUNS)
def test_no_rows(run):
    assert run_attention(run, attention_arguments([])).shape == (0, 128)


@pytest.mark.parametrize("run, dtype", DTYPED_RUNS)
def test_a_row_has_the_same_bits_in_any_batch(run, dtype):
    arguments = attention_arguments([9, *LENGTHS], dtype=dtype, parked=True)
    alone = {row: only_row(arguments, row) for row in (0, 3, 5)}
    together = run_attention(run, arguments)
    for row, arguments in alone.items():
        assert same_bits(run_attention(run, arguments)[0], together[row])


@pytest.mark.parametrize("run", RUNS)
def test_large_scores(run):
    arguments = attention_arguments(LENGTHS, poison=False)
    arguments["keys"] *= 1000
    assert run_attention(run, arguments).isfinite().all()


@pytest.mark.parametrize(
    "splits, block",
    [pytest.param(*case, marks=INTERPRETED) for case in [(0, 16), (2, 16), (20, 16), (64, 16), (3, 32), (0, 0)]],
)
def test_splits_and_blocks(splits, block):
    arguments = attention_arguments([1, 48, 330], query_heads=2, kv_heads=1, head_dim=16, capacity=352)
    run_attention(kernels(splits, block), arguments)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "qwen3", "llama", "qwen2_5"])
def test_as_hugging_face_computes_it(run, family):
    """Token for token, from the projections of a model to what it gives its output projection."""
    model, seen = tiny_model(family), {}
    attention = next(layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn"))
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(attention, name).register_forward_hook(lambda _, inputs, out, name=name: seen.update({name: out}))
    attention.o_proj.register_forward_pre_hook(lambda _, inputs: seen.update(out=inputs[0]))
    model.model.rotary_emb.register_forward_hook(lambda _, inputs, out: seen.update(angles=out))
    batch, length, config = 2, 19, model.config
    with torch.no_grad():
        model(torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(0)))

        projected = torch.cat([seen[name] for name in ("q_proj", "k_proj", "v_proj")], dim=-1)
        q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        keys, values = torch.full((2, batch, config.num_key_value_heads, length + 3, 32), float("nan")).unbind()
        for step in range(length):
            out = run(
                projected=projected[:, step],
                cos=seen["angles"][0][:, step].expand(batch, -1),
                sin=seen["angles"][1][:, step].expand(batch, -1),
                keys=keys,
                values=values,
                position=torch.full((batch,), step),
                parked=torch.zeros(batch, dtype=torch.bool),
                q_norm=None if q_norm is None else q_norm.weight,
                k_norm=None if k_norm is None else k_norm.weight,
                norm_offset=1.0 if family in ("qwen3_5", "qwen3_next") else 0.0,
                eps=config.rms_norm_eps,
                query_heads=config.num_attention_heads,
                gated=family in ("qwen3_5", "qwen3_next"),
                scaling=attention.scaling,
            )
            assert_close(out, seen["out"][:, step])


def test_the_cpu_runs_the_reference():
    arguments = attention_arguments(LENGTHS, parked=True)
    copy = moved(arguments, "cpu")
    assert same_bits(attention_decode(**arguments, splits=3), attention_decode_reference(**copy))
    assert same_bits(arguments["keys"], copy["keys"]) and same_bits(arguments["values"], copy["values"])


@pytest.mark.parametrize("name", ["projected", "cos", "sin", "keys", "values", "q_norm", "k_norm"])
def test_a_gradient_is_refused(name):
    arguments = attention_arguments([3, 4], poison=False)
    arguments[name].requires_grad_()
    before = arguments["keys"].detach().clone()
    with pytest.raises(RuntimeError, match="attention_decode is for inference and has no gradient"):
        attention_decode(**arguments)
    assert same_bits(arguments["keys"].detach(), before)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            attention_decode(**arguments)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("projected", torch.Tensor.double, "projected must be float32, bfloat16 or float16, not torch.float64"),
        (
            "projected",
            lambda tensor: tensor[:, :-1],
            r"projected must be \[batch, 384\] for these heads, not \[2, 383\]",
        ),
        ("projected", lambda tensor: tensor[0], "projected must be"),
        ("projected", lambda tensor: tensor.t().contiguous().t(), "last dimension of projected must be contiguous"),
        ("cos", lambda tensor: tensor[:, :7], "cos must be"),
        ("cos", lambda tensor: tensor[:1], "cos must be"),
        ("cos", lambda tensor: torch.cat([tensor] * 5, dim=1), "cos must be .2, an even number up to 32."),
        ("sin", lambda tensor: tensor[:, :6], "sin must be"),
        ("sin", torch.Tensor.long, "sin must be float32"),
        ("keys", torch.Tensor.bfloat16, "keys must be torch.float32 as projected"),
        ("keys", lambda tensor: tensor[0], "keys must be .slots, heads"),
        ("keys", lambda tensor: tensor[:1], "a slot for each of the 2 rows"),
        ("keys", lambda tensor: tensor[:, :, :0], "room for a token"),
        ("keys", lambda tensor: tensor.repeat(1, 1, 1, 9), "heads of 1 to 256 dimensions"),
        ("keys", lambda tensor: tensor[:, :, :-1], "keys must be contiguous"),
        ("values", lambda tensor: tensor[:, :, :-1], "values must be"),
        ("values", torch.Tensor.half, "values must be torch.float32"),
        ("values", lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2), "values must be contiguous"),
        ("position", torch.Tensor.int, "position must be torch.int64"),
        ("position", lambda tensor: tensor[:1], "position must be .2."),
        ("parked", torch.Tensor.byte, "parked must be torch.bool"),
        ("parked", lambda tensor: tensor[:, None], "parked must be .2."),
        ("q_norm", lambda tensor: tensor[:-1], "q_norm must be .32."),
        ("k_norm", lambda tensor: tensor.repeat(2)[::2], "last dimension of k_norm must be contiguous"),
        ("query_heads", lambda heads: 3, "query_heads must be a multiple of the 2 heads"),
        ("query_heads", lambda heads: 0, "query_heads must be"),
        ("splits", lambda splits: 65, "splits must be 0 to 64"),
        ("splits", lambda splits: -1, "splits must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused(name, change, message):
    arguments = attention_arguments([3, 4], poison=False) | {"splits": 0}
    before = moved(arguments, "cpu")
    with pytest.raises(RuntimeError, match=f"attention_decode: .*{message}"):
        attention_decode(**arguments | {name: change(arguments[name])})
    assert same_bits(arguments["keys"], before["keys"]) and same_bits(arguments["values"], before["values"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "no norm"])
def test_opcheck(dtype, normed):
    arguments = attention_arguments([3, 40], dtype=dtype, normed=normed, gated=normed, poison=False)
    torch.library.opcheck(attention_decode_op, (), arguments)
    torch.library.opcheck(attention_decode_op, (), arguments | {"splits": 3})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_tensors_need_no_kernel(dtype):
    arguments = attention_arguments([3, 40], dtype=dtype)
    with FakeTensorMode():
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                arguments[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        out = attention_decode(**arguments)
    assert out.shape == (2, 128) and out.dtype == dtype and out.device.type == "meta" and out.is_contiguous()
