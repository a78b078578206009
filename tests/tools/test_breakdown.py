# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Kernels by kind: none of ours is 'other', and the table says what its sum is not."""

import re
from pathlib import Path

import pytest

from deepspeed_hybrid.tools import bench
from deepspeed_hybrid.tools.breakdown import KernelShare, kind_of

CSRC = Path(__file__).resolve().parents[2] / "csrc"
KERNELS = {
    name: path.parent.name
    for path in sorted(CSRC.rglob("*.cu*"))
    for name in re.findall(r"__global__ void __launch_bounds__\([^)]*\)\s+(\w+)\(const", path.read_text())
}
KINDS = {
    "attention_streamed": "attention",
    "decode_step": "choice",
    "few_rows_linear": "product",
    "warpgroup_linear": "product",
    "fused_silu_mul_halves": "silu * up",
    "gdn_gates": "gdn gates",
    "gdn_streamed_block": "gdn scan",
    "truncate_scores": "truncation",
}


def test_the_sources_were_read():
    assert set(KERNELS.values()) == set(KINDS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_cuda_kernel_of_ours_has_its_kind(kernel):
    arguments = "" if kernel == "gates" else "<__nv_bfloat16, true>"  # the one that is no template
    assert kind_of(f"void ds_hybrid::(anonymous namespace)::{kernel}{arguments}(Arguments)") == KINDS[KERNELS[kernel]]


@pytest.mark.parametrize(
    "kernel, kind",
    [("row_linear_kernel", "product"), ("gdn_decode_kernel", "gdn scan"), ("gdn_conv_kernel", "conv"),
     ("gdn_prepare_kernel", "gdn scan"), ("gdn_carry_kernel", "gdn scan"),
     ("_attend", "attention"), ("_combine", "attention"), ("_normalise", "norm"), ("_add_and_normalise", "norm"),
     ("_gate_and_normalise", "norm"), ("_tables", "rotary"), ("nvjet_tst_64x8", "product"), ("unheard_of", "other")],
)  # fmt: skip
def test_kinds_of_other_kernels(kernel, kind):
    assert kind_of(kernel) == kind


def test_the_table_says_that_kernels_overlap(monkeypatch, capsys):
    shares = [KernelShare("product", 129.0, 2771.7), KernelShare("choice", 2.0, 6.4)]
    monkeypatch.setattr(bench, "step_breakdown", lambda generate: shares)
    rows = bench._kernels(None, None, {})
    printed = capsys.readouterr().out
    assert "131 kernels a step, 2.778 ms in them" in printed and "overlap" in printed
    assert rows == [{"kind": "product", "count": 129.0, "us": 2771.7}, {"kind": "choice", "count": 2.0, "us": 6.4}]
