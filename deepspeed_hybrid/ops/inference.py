# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ops for generation have no gradient, and say so when they are called instead of in a later backward."""

from torch.library import CustomOpDef


def refuse_gradients(op: CustomOpDef, name: str) -> None:
    """Make ``op`` raise where autograd would record it."""

    def refuse(*args, **kwargs):
        raise RuntimeError(
            f"{name} is for inference and has no gradient, but an argument requires grad: "
            "call it under torch.no_grad(), or use its torch reference to train"
        )

    op.register_autograd(refuse, setup_context=refuse)
