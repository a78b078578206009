# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A stream beside the current one, for a part of a step that the rest of the step does not wait for."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from deepspeed.accelerator import get_accelerator


class SideStream:
    """A branch that leaves the current stream and comes back to it within a step, eager or captured.

    What the branch reads was made on the current stream, whose memory is given to others as soon as nobody holds it:
    so it is held until the branch is back. What the branch itself makes is of its own stream's memory. Where there is
    no CUDA device both are one.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._held: list[torch.Tensor] = []

    @contextmanager
    def branch(self, *held: torch.Tensor) -> Iterator[None]:
        """What is launched inside runs on the side, behind all that the current stream has so far.

        Args:
            held: what it reads that nobody else holds until :meth:`join`.
        """
        if held[0].device.type != "cuda":
            yield
            return
        accelerator = get_accelerator()
        if self._stream is None:  # in a warm-up: no capture has made it
            self._stream = accelerator.Stream()
        self._held.extend(held)
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            yield

    def join(self) -> None:
        """The current stream goes on behind the branch."""
        if self._held:
            get_accelerator().current_stream().wait_stream(self._stream)
            self._held.clear()
