# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Kernels of a block that start before the kernel ahead has ended, in the interpreter: nobody may read too early."""

from collections.abc import Callable, Iterator

import pytest
import torch
from gdn_decode_cases import Shape, arguments_of, interpreted

from deepspeed_hybrid.cache.layers import BlockPlan
from deepspeed_hybrid.ops.gdn_decode import gdn_decode_reference
from deepspeed_hybrid.segments.block_step import gdn_block
from deepspeed_hybrid.speculative.verify import commit

pytestmark = [pytest.mark.interpreter, interpreted]

SHAPE = Shape(1, 2, 8, 16)
LANES, TOKENS = 3, 5


class LateStores:
    """What a kernel has stored is seen when the next one waits for it, or is launched plainly, and no earlier."""

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def flush(self) -> None:
        for buffer, stored in self._pending:
            buffer.copy_(stored)
        self._pending = []

    def around(self, launch: Callable, buffers: tuple[torch.Tensor, ...]) -> torch.Tensor:
        before = [buffer.clone() for buffer in buffers]
        out = launch()
        self.flush()
        for buffer, old in zip(buffers, before, strict=True):
            if not torch.equal(buffer, old):
                self._pending.append((buffer, buffer.clone()))
                buffer.copy_(old)
        return out


@pytest.fixture
def stores() -> Iterator[LateStores]:
    from deepspeed_hybrid.ops.triton import dependent, gdn_decode

    late = LateStores()

    def pdl(tensor: torch.Tensor, first: bool = False) -> dict[str, bool]:
        if first:
            late.flush()
        return {"PDL": True, "launch_pdl": not first}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gdn_decode, "pdl", pdl)
        patch.setattr(dependent, "gdc_launch_dependents", lambda: None)
        patch.setattr(dependent, "gdc_wait", late.flush)
        yield late


def block_of(op: Callable, counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs, and window and state after the commit."""
    arguments = arguments_of(SHAPE, LANES)
    projected = torch.cat([arguments_of(SHAPE, LANES, seed=seed)["projected"] for seed in range(TOKENS)])
    window, state = arguments.pop("window"), arguments.pop("state")
    start = arguments.pop("position")
    for name in ("projected", "parked"):
        arguments.pop(name)

    def step(part, window, state, position, idle, again) -> torch.Tensor:
        return op(projected=part, window=window, state=state, position=position, parked=idle, again=again, **arguments)

    steps = torch.arange(TOKENS)[:, None]
    block = BlockPlan(TOKENS, start + steps, torch.zeros(TOKENS, LANES, dtype=torch.bool))
    out = gdn_block(step, projected, window, state, block)
    commit(block, counts)
    return out, window, state


@pytest.mark.parametrize("counts", [[5, 1, 0], [2, 4, 3]], ids=str)
def test_a_token_sees_what_the_one_before_it_stored(stores, counts):
    from deepspeed_hybrid.ops.triton.gdn_decode import launch

    def late(window, state, **arguments) -> torch.Tensor:
        return stores.around(lambda: launch(window=window, state=state, **arguments), (window, state))

    mine = block_of(late, torch.tensor(counts))
    stores.flush()
    for one, other in zip(mine, block_of(gdn_decode_reference, torch.tensor(counts)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
