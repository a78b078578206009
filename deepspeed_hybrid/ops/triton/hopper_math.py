# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Activations and roundings in fewer instructions than they compile to by themselves. Roundings have the same bits,
activations are as exact, to the last bits of fp32.

They matter where every element of a prompt passes: Hopper issues a quarter as many exponentials, reciprocals and
conversions of single values as it does additions, and of these kernels instructions take longer than the memory.
HOPPER says whether the card has the instructions; elsewhere, and in Triton's interpreter, the plain expressions stand.
"""

import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.rounding import rounded

COMPILED = tl.constexpr(isinstance(rounded, triton.JITFunction))  # the interpreter has no instructions of a card


@triton.jit
def sigmoid(values, HOPPER: tl.constexpr):
    """Of fp32. The plain expression also provides for denormal results: here values below -87 come out as zero."""
    if HOPPER and COMPILED:
        return tl.inline_asm_elementwise(
            """{
                .reg .f32 t;
                mul.f32 t, $1, 0fBFB8AA3B;
                ex2.approx.ftz.f32 t, t;
                add.f32 t, t, 0f3F800000;
                rcp.approx.ftz.f32 $0, t;
            }""",  # the constants are -log2(e) and one
            "=f,f",
            [values],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.sigmoid(values)


@triton.jit
def silu(values, HOPPER: tl.constexpr):
    """Of fp32, likewise."""
    if HOPPER and COMPILED:
        return values * sigmoid(values, HOPPER)
    return values / (1.0 + tl.exp(-values))


@triton.jit
def rounded_in_pairs(same: tl.constexpr, values, dtype: tl.constexpr, HOPPER: tl.constexpr):
    """As ``rounded_if``: two values in one conversion, where one by one each would take as long as an exponential."""
    if not same:
        return values
    if HOPPER and COMPILED and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
                .reg .b32 t;
                cvt.rn.bf16x2.f32 t, $3, $2;
                shl.b32 $0, t, 16;
                and.b32 $1, t, 0xffff0000;
            }""",
            "=f,=f,f,f",
            [values],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return rounded(values, dtype)
