# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Group-relative policy optimisation (Shao et al. 2024), in its form with a reward for every position."""

import torch


def group_advantages(points: torch.Tensor, samples: int) -> torch.Tensor:
    """Normalise rewards over the samples of each prompt, position by position.

    Args:
        points: [B * samples, C] fp32, prompt-major.

    Returns:
        [B * samples, C] fp32: mean 0 over each group, 0 where all samples got the same.
    """
    groups = points.view(-1, samples, points.shape[1])
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-2)).view_as(points)


def policy_loss(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    real: torch.Tensor,
    clip: float,
    entropy_weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped token-level policy gradient, with a bonus for entropy that keeps exploration alive.

    Args:
        logits: [R, C, V] of the training forward.
        tokens: [R, C] int64 that were sampled.
        rollout_logprobs: [R, C] fp32, under the policy that sampled.
        advantages: [R, C] fp32.
        real: [R, C] bool, False behind a row's end.

    Returns:
        loss [] and logprobs [R, C], both fp32.
    """
    distribution = logits.float().log_softmax(dim=-1)
    logprobs = distribution.gather(2, tokens[:, :, None])[:, :, 0]
    ratio = (logprobs - rollout_logprobs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    entropy = -(distribution.exp() * distribution).sum(dim=-1)
    loss = -masked_mean(gain + entropy_weight * entropy, real)
    return loss, logprobs.detach()


def masked_mean(values: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The mean of ``values`` where ``real``, over all tokens alike."""
    return (values * real).sum() / real.sum()
