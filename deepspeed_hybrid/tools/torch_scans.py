# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""GatedDeltaNet layers by transformers' torch functions: in fp32 exact, and with a backward that needs no tuning."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from deepspeed_hybrid.compat import CHUNK_FUNCTION, RECURRENT_FUNCTION, torch_function


@contextmanager
def torch_scans(model: nn.Module) -> Iterator[None]:
    """Inside, the model's own forward uses them whatever transformers bound at import; elsewhere FLA's may be."""
    sources = {sys.modules[type(module).__module__] for module in model.modules() if hasattr(module, "A_log")}
    names = (CHUNK_FUNCTION, RECURRENT_FUNCTION)
    bound = [(source, name, getattr(source, name)) for source in sources for name in names]
    try:
        for source, name, _ in bound:
            setattr(source, name, torch_function(source, name))
        yield
    finally:
        for source, name, function in bound:
            setattr(source, name, function)
