# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""attention_block: a kernel that writes keys and values of all tokens, and attention_decode's, which read them."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton import attention_decode
from deepspeed_hybrid.ops.triton.attention_decode import MIN_TILE, _norm_and_rotate
from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait


@triton.jit
def _write(
    projected,
    cos,
    sin,
    keys,
    values,
    position,
    parked,
    k_norm,
    projected_stride,
    cos_stride,
    sin_stride,
    capacity,
    norm_offset,
    eps,
    lanes,
    first,
    HKV: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    NORM_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Key and value of one head of one token, whose columns begin at ``first``."""
    announce(PDL)
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(parked + row):
        wait(PDL)  # whoever waits for this kernel waits for what it would have waited for
        return
    place = tl.load(position + row)
    wait(PDL)
    one = tl.arange(0, 1)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    new = projected + row * projected_stride + first + kv_head * D
    cos += row * cos_stride
    sin += row * sin_stride
    key = _norm_and_rotate(new + one, one == 0, k_norm, cos, sin, norm_offset, eps, D, R, BLOCK_D, NORM_K)
    value = tl.load(new + HKV * D + one + dims, mask=dims < D, other=0.0)
    place = ((row % lanes * HKV + kv_head) * capacity + place) * D + one + dims
    tl.store(keys + place, key.to(keys.dtype.element_ty), mask=dims < D)
    tl.store(values + place, value, mask=dims < D)


def launch(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    parked: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    query_heads: int,
    gated: bool,
    scaling: float,
    lanes: int,
    splits: int = 0,
    *,
    block: int = 0,
) -> torch.Tensor:
    """Run the kernels on arguments that the op has checked; ``splits`` and ``block`` as of attention_decode's."""
    (rows, _), (_, kv_heads, capacity, head_dim) = projected.shape, keys.shape
    if rows:
        with torch.cuda.device_of(projected):  # Triton launches on the current device
            _write[(rows, kv_heads)](
                projected,
                cos,
                sin,
                keys,
                values,
                position,
                parked,
                k_norm,
                projected.stride(0),
                cos.stride(0),
                sin.stride(0),
                capacity,
                float(norm_offset),
                float(eps),
                lanes,
                query_heads * head_dim * (2 if gated else 1),
                HKV=kv_heads,
                D=head_dim,
                R=cos.shape[1],
                NORM_K=k_norm is not None,
                BLOCK_D=max(MIN_TILE, triton.next_power_of_2(head_dim)),
                num_warps=1,
                **pdl(projected),
            )
    return attention_decode.launch(
        projected,
        cos,
        sin,
        keys,
        values,
        position,
        parked,
        q_norm,
        k_norm,
        norm_offset,
        eps,
        query_heads,
        gated,
        scaling,
        splits,
        lanes=lanes,
        block=block,
    )
