"""Reinforcement: a loss for each action."""

import torch
from torch import Tensor

from purestep.losses.shapes import paired


def policy_gradient(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: float | tuple[float, float] = 0.2,
) -> Tensor:
    """Returns each action's clipped loss, as in PPO [2017] and GRPO, in float32 or wider.

        ℓ = −min(r A, clip(r, 1 − low, 1 + high) A)        r = π(a) / π_old(a)

    At the policy that acted, where r = 1, the gradient is that of −A log π(a).

    Args:
        log_probs: log π(a), of each action that was taken.
        old_log_probs: the same under the policy that acted, a constant. If that is the current
            policy, pass ``log_probs.detach()``.
        advantages: A, of the same shape. It may be negative, unlike a weight. Expand GRPO's one
            advantage for each text by ``advantages[:, None].expand_as(log_probs)``.
        clip: how far r may move before its gradient is 0; or ``(low, high)``.

    >>> log_probs, change = torch.full((3,), -0.7), torch.tensor([0.0, 1.0, 1.0])
    >>> policy_gradient(log_probs, log_probs - change, torch.tensor([2.0, 1.0, -1.0]))
    tensor([-2.0000, -1.2000,  2.7183])
    """
    log_probs, old_log_probs, advantages = paired(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(
            f"clip={clip!r}: how far the ratio may fall, from 0 to 1, and rise, from 0 on, as in "
            "0.2 or (0.2, 0.28)"
        )
    ratio = (log_probs - old_log_probs).exp()
    return -torch.minimum(
        ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    )
