# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A model that has learned real text, from what is on every machine: the sources of Python's standard library."""

import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import nn
from tqdm import tqdm

from deepspeed_hybrid.tools.device import has_cuda
from deepspeed_hybrid.tools.task import ByteTokenizer
from deepspeed_hybrid.tools.torch_scans import torch_scans

VOCAB = 320  # the byte tokenizer's, rounded up to what products like
TEXT_BYTES = 8 * 2**20
HELD_OUT = 0.05  # of the text, at its end
RATE, WARMUP_SHARE, LAST_SHARE = 1e-3, 0.05, 0.05  # of the learning rate, by the share of the time that is over
GPU_BATCH, CPU_BATCH = (64, 256), (8, 64)  # rows and tokens of a step


def standard_library(limit: int = TEXT_BYTES) -> bytes:
    """The sources of the modules that are single files, one after the other in the order of their names."""
    text, left = [], limit
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text.append(path.read_bytes()[:left])
        left -= len(text[-1])
        if left <= 0:
            break
    return b"".join(text)


def split(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [N] to learn from, and those behind them that are held out."""
    held_out = int(len(ids) * HELD_OUT)
    return ids[:-held_out], ids[-held_out:]


def byte_ids(text: bytes) -> torch.Tensor:
    """[N] int64, as ``ByteTokenizer`` encodes them."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long() + ByteTokenizer.first_byte


def windows(ids: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """[rows, width] from places spread evenly over ids [N]."""
    starts = torch.linspace(0, len(ids) - width, rows).long()
    return torch.stack([ids[start : start + width] for start in starts.tolist()])


def learn(model: nn.Module, ids: torch.Tensor, seconds: float, seed: int) -> float:
    """Train on random windows for so long, in fp32; the mean loss of the last tenth of the steps, in nats a token.

    Args:
        model: in fp32. Its GatedDeltaNet layers use torch functions, which no release of Triton gets wrong.
        ids: [N] int64.
    """
    rows, width = GPU_BATCH if has_cuda() else CPU_BATCH
    device = get_accelerator().current_device_name()
    ids, chance = ids.to(device), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    losses: list[torch.Tensor] = []
    start, share = time.perf_counter(), 0.0
    bar = "{desc}: {percentage:3.0f}% {elapsed} of " + f"{seconds:.0f} s"
    try:
        with torch_scans(model), tqdm(total=1.0, desc="learning", bar_format=bar, disable=None) as progress:
            while share < 1:
                for group in optimizer.param_groups:
                    group["lr"] = RATE * min(1.0, (share + 1e-3) / WARMUP_SHARE, max(LAST_SHARE, 1 - share))
                starts = torch.randint(0, len(ids) - width, (rows, 1), generator=chance).to(device)
                batch = ids[starts + torch.arange(width + 1, device=device)]
                logits = model.train()(input_ids=batch[:, :-1], use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.detach())
                loss.item()  # a clock that runs ahead of the device would say nothing
                before, share = share, min(1.0, (time.perf_counter() - start) / seconds)
                progress.update(share - before)
    finally:
        torch.set_float32_matmul_precision(precision)
        model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return float(torch.stack(last).mean())
