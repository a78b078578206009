# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What others hang on modules: hooks, and attributes of which some say nothing of what a forward does."""

from collections.abc import Callable

from torch import nn

CAPTURING_HOOKS = "transformers.utils.output_capturing"
REQUIRING_HOOK = "transformers.modeling_utils", "make_inputs_require_grads"  # one more at every call that checkpoints
# By which transformers checkpoints activations: of training alone. Trainers turn it off for a rollout, and on again.
CHECKPOINTING_ATTRIBUTES = {
    "gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook", "_require_grads_hooks",
}  # fmt: skip
ZERO3_ATTRIBUTES = {"all_parameters", "applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn"}
# Where the functions come from that a ZeRO-3 engine hooks into modules; its profiling decorator hides some origins.
ZERO3_HOOK_SOURCES = ("deepspeed.runtime.engine", "deepspeed.runtime.zero.", "deepspeed.utils.nvtx")


def is_zero3_hook(hook: Callable) -> bool:
    """Whether a module's hook is a DeepSpeed engine's: those that fetch and free partitioned weights, and those of the
    whole model that begin and end a forward for its timers and its backward."""
    return (getattr(hook, "__module__", None) or "").startswith(ZERO3_HOOK_SOURCES)


def facts(module: nn.Module) -> set[str]:
    """Names of what a module holds besides modules, parameters and what is of training alone."""
    return {name for name in module.__dict__ if not name.startswith("_") and not is_bookkeeping(name)}


def is_bookkeeping(name: str) -> bool:
    """Whether an attribute of a module says nothing of what its forward does."""
    of_engines = name.startswith("ds_") or name in ZERO3_ATTRIBUTES
    return of_engines or name in CHECKPOINTING_ATTRIBUTES or name == "training"


def hooks_of(module: nn.Module) -> tuple:
    """Forward hooks that may change something. Those by which transformers captures hidden states, and which it
    leaves behind, only look on, and only where somebody asks for hidden states; one by which it has embeddings require
    gradients is of training alone."""
    before, behind = module.__dict__["_forward_pre_hooks"], module.__dict__["_forward_hooks"]
    if not before and not behind:
        return ()
    return tuple(hook for hook in (*before.values(), *behind.values()) if not _only_looks_on(hook))


def _only_looks_on(hook: Callable) -> bool:
    home = getattr(hook, "__module__", None) or ""
    return home.startswith(CAPTURING_HOOKS) or (home, getattr(hook, "__name__", "")) == REQUIRING_HOOK


def global_hooks() -> tuple:
    """Hooks that torch runs at every call of every module."""
    hooks = nn.modules.module
    return (*hooks._global_forward_pre_hooks.values(), *hooks._global_forward_hooks.values())
