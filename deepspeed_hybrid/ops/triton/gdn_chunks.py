# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernels of gdn_chunks, and their launch.

With S the state before a chunk, its tokens write U - W S (the WY form), where both factors follow from the chunk
alone: one kernel makes them for all chunks side by side, and a second one goes from chunk to chunk with S in
registers. Neither the state between chunks nor what a chunk writes goes through memory.
"""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.gdn_chunks import CHUNK, GdnChunkSizes
from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.rounding import rounded

PREPARE_WARPS, CARRY_WARPS = 4, 4
PREPARE_REGISTERS = 168  # three programs on a multiprocessor; 173 as it comes for heads of 128, and none is spilled
# Columns of the state for a program of the second kernel, and its stages of loads: with few programs each waits for
# its own loads, with many the cache is read less often by wide ones, and two on a multiprocessor wait in turn.
NARROW, WIDE = (32, 2), (64, 1)
MANY_PROGRAMS = 264

BLOCK = tl.constexpr(16)  # of a chunk's tokens: up to there all blocks of the triangle are inverted side by side


@triton.jit
def _cut(values):
    """The bits that TF32 has of values within -1 and 1, cut off as tensor cores do."""
    return values.to(tl.float16, fp_downcast_rounding="rtz")


@triton.jit
def _parts(values):
    """What fp16 holds of values, and of what is left."""
    most = values.to(tl.float16)
    return most, (values - most.to(tl.float32)).to(tl.float16)


@triton.jit
def _inverse(lower, at, SIZE: tl.constexpr):
    """(1 + lower)^-1 of a strictly lower triangle [SIZE, SIZE], SIZE four blocks, for unit keys and gates up to 1.

    It is rounded where the training forward's kernels round. Blocks of the diagonal are of fp32: from inverses X come
    those of blocks twice as large, X - X lower X between the two halves, in fp16, and a step of Newton's method makes
    up for what that has lost. Blocks below come diagonal by diagonal from those between, in products of TF32. What is
    multiplied is what one token's write adds to another's, hence within -1 and 1.
    """
    BLOCKS: tl.constexpr = SIZE // BLOCK
    later = at[:, None] // BLOCK - at[None, :] // BLOCK
    block = tl.sum(tl.reshape(tl.where(later == 0, lower, 0.0), (BLOCKS, BLOCK, BLOCKS, BLOCK)), axis=2)
    inside = tl.arange(0, BLOCK)
    apart = inside[:, None] ^ inside[None, :]  # below 2 in one pair, below 4 in one four
    one = tl.where((apart == 0)[None, :, :], 1.0, 0.0)
    inverse = tl.where((apart == 1)[None, :, :], -block, one)
    block, block_rest = _parts(block)
    for level in tl.static_range(1, 4):
        half = inverse.to(tl.float16)
        between = tl.dot(tl.dot(half, block).to(tl.float16), half)
        inverse = tl.where(((apart >> level) == 1)[None, :, :], -between, inverse)
    half, rest = _parts(inverse)
    error = inverse - one + tl.dot(block, half) + (tl.dot(block, rest) + tl.dot(block_rest, half))
    inverse -= tl.dot(half, error.to(tl.float16))

    spread = tl.reshape(tl.broadcast_to(inverse[:, :, None, :], (BLOCKS, BLOCK, BLOCKS, BLOCK)), (SIZE, SIZE))
    inverse = tl.where(later == 0, spread, 0.0)
    own = _cut(inverse)
    below = _cut(tl.where(later > 0, lower, 0.0))
    inverse -= tl.dot(_cut(tl.where(later == 1, tl.dot(own, below), 0.0)), own)
    for blocks in tl.static_range(2, BLOCKS):
        between = tl.where(later == blocks, tl.dot(below, _cut(inverse)), 0.0)
        inverse -= tl.dot(own, _cut(between))
    return inverse


@triton.jit(do_not_specialize=["length", "chunks"])
def gdn_prepare_kernel(
    key,
    value,
    b,
    a,
    A_log,
    dt_bias,
    w,
    u,
    decays,
    length,
    chunks,
    b_row_stride,
    b_token_stride,
    a_row_stride,
    a_token_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, B * HV): W, U and the sums of log decays, in the order of heads and padded to whole chunks."""
    announce(PDL)
    chunk, lane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, head = lane // HV, lane % HV
    at = tl.arange(0, CHUNK)
    token = chunk * CHUNK + at
    real = token < length
    k = tl.arange(0, DK)[None, :]
    v = tl.arange(0, DV)[None, :]
    rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
    offset = tl.load(dt_bias + head).to(tl.float32)

    wait(PDL)
    place = row * length + token
    keys = tl.load(key + (place * HK + head // (HV // HK))[:, None] * DK + k, mask=real[:, None], other=0.0)
    values = tl.load(value + (place * HV + head)[:, None] * DV + v, mask=real[:, None], other=0.0)
    raw_b = tl.load(b + row * b_row_stride + token * b_token_stride + head, mask=real, other=0.0).to(tl.float32)
    raw_a = tl.load(a + row * a_row_stride + token * a_token_stride + head, mask=real, other=0.0).to(tl.float32)

    beta = tl.where(real, rounded(tl.sigmoid(raw_b), b.dtype.element_ty), 0.0)
    raw_a += offset
    softplus = tl.maximum(raw_a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(raw_a)))
    decay = tl.cumsum(tl.where(real, rate * softplus, 0.0), axis=0)

    overlap = tl.dot(keys, tl.trans(keys)) * beta[:, None] * tl.exp(decay[:, None] - decay[None, :])
    # Rounded where the training forward's kernels round, and before the inverse: made behind it they would share its
    # memory, of which ptxas 12.8, in Triton 3.6 and 3.7, loses the address where operands are less than 64 wide.
    values = (values * beta[:, None]).to(values.dtype)
    keys = (rounded(keys * beta[:, None], keys.dtype) * tl.exp(decay)[:, None]).to(keys.dtype)
    inverse = _inverse(tl.where(at[:, None] > at[None, :], overlap, 0.0), at, CHUNK).to(keys.dtype)

    padded = (lane * chunks + chunk) * CHUNK + at
    tl.store(decays + padded, decay)
    tl.store(u + padded[:, None] * DV + v, tl.dot(inverse, values).to(values.dtype))
    tl.store(w + padded[:, None] * DK + k, tl.dot(inverse, keys).to(keys.dtype))


@triton.jit(do_not_specialize=["length", "chunks"])
def gdn_carry_kernel(
    query,
    key,
    w,
    u,
    decays,
    state,
    slots,
    core,
    length,
    chunks,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of the state's columns, B * HV): one chunk after the other."""
    announce(PDL)
    lane = tl.program_id(1).to(tl.int64)
    row, head = lane // HV, lane % HV
    at = tl.arange(0, CHUNK)
    k = tl.arange(0, DK)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    wait(PDL)
    state += ((tl.load(slots + row) * HV + head) * DK + k[:, None]) * DV + v[None, :]
    memory = tl.zeros([DK, BLOCK_V], tl.float32)
    if not FIRST:
        memory += tl.load(state).to(tl.float32)
    query += (row * length * HK + head // (HV // HK)) * DK
    key += (row * length * HK + head // (HV // HK)) * DK
    core += (row * length * HV + head) * DV
    w += lane * chunks * CHUNK * DK
    u += lane * chunks * CHUNK * DV
    decays += lane * chunks * CHUNK

    for chunk in tl.range(0, chunks, num_stages=STAGES):
        token = chunk * CHUNK + at
        place = token.to(tl.int64)[:, None]
        real = (token < length)[:, None]
        queries = tl.load(query + place * (HK * DK) + k[None, :], mask=real, other=0.0)
        keys = tl.load(key + place * (HK * DK) + k[None, :], mask=real, other=0.0)
        factors = tl.load(w + place * DK + k[None, :])
        written = tl.load(u + place * DV + v[None, :])
        decay = tl.load(decays + token)
        last = tl.load(decays + chunk * CHUNK + CHUNK - 1)

        before = memory.to(keys.dtype)
        written = written.to(tl.float32) - tl.dot(factors, before)
        seen = tl.dot(queries, tl.trans(keys)) * tl.exp(decay[:, None] - decay[None, :])
        seen = tl.where(at[:, None] >= at[None, :], seen, 0.0)
        read = tl.dot(queries, before) * tl.exp(decay)[:, None]
        read = tl.dot(seen.to(keys.dtype), written.to(keys.dtype), read) * scale
        tl.store(core + place * (HV * DV) + v[None, :], read.to(keys.dtype), mask=real)
        added = written * tl.exp(last - decay)[:, None]
        memory = tl.dot(tl.trans(keys), added.to(keys.dtype), memory * tl.exp(last))

    tl.store(state, memory.to(state.dtype.element_ty))


def launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    first: bool,
    sizes: GdnChunkSizes,
) -> torch.Tensor:
    """``gdn_chunks`` through the kernels, on CUDA or in Triton's interpreter, on arguments that the op has checked."""
    rows, tokens, key_heads, heads, key_dim, value_dim = sizes
    core = value.new_empty(rows, tokens, heads, value_dim)
    if rows == 0:
        return core
    chunks = triton.cdiv(tokens, CHUNK)
    w = key.new_empty(rows, heads, chunks * CHUNK, key_dim)
    u = value.new_empty(rows, heads, chunks * CHUNK, value_dim)
    decays = value.new_empty(rows, heads, chunks * CHUNK, dtype=torch.float32)
    shape = {"HK": key_heads, "HV": heads, "DK": key_dim, "DV": value_dim, "CHUNK": CHUNK}
    # Of states less wide than WIDE, too, ptxas would lose an address in programs of one stage.
    many = value_dim >= WIDE[0] and rows * heads * value_dim >= MANY_PROGRAMS * WIDE[0]
    block_v, stages = WIDE if many else NARROW
    block_v = min(value_dim, block_v)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        gdn_prepare_kernel[(chunks, rows * heads)](
            key,
            value,
            b,
            a,
            A_log,
            dt_bias,
            w,
            u,
            decays,
            tokens,
            chunks,
            b.stride(0),
            b.stride(1),
            a.stride(0),
            a.stride(1),
            **shape,
            num_warps=PREPARE_WARPS,
            maxnreg=PREPARE_REGISTERS,
            **pdl(query),
        )
        gdn_carry_kernel[(value_dim // block_v, rows * heads)](
            query,
            key,
            w,
            u,
            decays,
            state,
            slots,
            core,
            tokens,
            chunks,
            key_dim**-0.5,
            **shape,
            BLOCK_V=block_v,
            FIRST=first,
            STAGES=stages,
            num_warps=CARRY_WARPS,
            **pdl(query),
        )
    return core
