"""Computes losses of one value for each unit: a row, a pair of texts, an action."""

import torch
from torch import Tensor
from torch.nn import functional

from purestep.losses.arguments import check_label_smoothing, promote_same_shape


def mse(predictions: Tensor, targets: Tensor, *, batch_dims: int = 1) -> Tensor:
    """Returns each unit's squared error, a mean over its elements, in float32 or wider.

        ℓᵢ = meanⱼ (xᵢⱼ − yᵢⱼ)²

    At a weight of 1 for each unit, a step's loss is torch's ``MSELoss`` over all rows, for any cut
    into microbatches. With ``batch_dims=0``, a microbatch is one unit, so the cut matters. Raises
    ``ValueError`` unless shapes are equal, and unless ``batch_dims`` is from 0 to their number of
    dimensions.

    Args:
        predictions: x.
        targets: y, of the same shape.
        batch_dims: how many leading dimensions number the units. 1: a unit is a row. 2: for (rows,
            time, features), each time step of each row has a loss and a weight. All dimensions:
            each element is a unit.

    >>> mse(torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.zeros(2, 2))
    tensor([5., 0.])
    """
    predictions, targets = promote_same_shape(predictions=predictions, targets=targets)
    if not 0 <= batch_dims <= predictions.ndim:
        raise ValueError(
            f"batch_dims={batch_dims} of predictions of shape "
            f"{tuple(predictions.shape)}: it counts "
            f"leading dimensions, so take one from 0 to {predictions.ndim}"
        )
    squares = (predictions - targets).square()
    if batch_dims == squares.ndim:
        return squares
    return squares.flatten(batch_dims).mean(-1)


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Returns each pair's loss of direct preference optimisation [2023], in float32 or wider.

        ℓ = −(1 − s) log σ(β Δ) − s log σ(−β Δ)
        Δ = (chosen − reference chosen) − (rejected − reference rejected)

    All tensors have one shape, which is the result's; otherwise raises ``ValueError``. It also
    does so unless s is from 0 to 1.

    Args:
        chosen: log π(text) of the preferred text of each pair, summed over its tokens.
        rejected: the same for the other text.
        reference_chosen: log π(text) under the model where training began. It is not detached:
            compute it under ``torch.no_grad()``.
        reference_rejected: the same for the other text.
        beta: β, the cost of moving away from the reference.
        label_smoothing: s, the assumed probability that a pair is labelled the wrong way round.

    >>> won, lost, reference = torch.tensor([[-4.0], [-9.0], [-5.0]])
    >>> dpo(won, lost, reference, reference)
    tensor([0.4741])
    """
    chosen, rejected, reference_chosen, reference_rejected = promote_same_shape(
        chosen=chosen,
        rejected=rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
    )
    check_label_smoothing(label_smoothing)
    gap = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    losses = -functional.logsigmoid(gap)
    if label_smoothing == 0:
        return losses
    return losses + label_smoothing * gap  # since log σ(−x) = log σ(x) − x


def policy_gradient(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: float | tuple[float, float] = 0.2,
) -> Tensor:
    """Returns each action's clipped loss, as in PPO [2017] and GRPO, in float32 or wider.

        ℓ = −min(r A, clip(r, 1 − low, 1 + high) A)        r = π(a) / π_old(a)

    At the policy that acted, where r = 1, the gradient is that of −A log π(a). All tensors have one
    shape, which is the result's. Raises ``ValueError`` for others, unless low is from 0 to 1, and
    unless high is at least 0.

    Args:
        log_probs: log π(a), of each action that was taken.
        old_log_probs: the same under the policy that acted, a constant. If that is the current
            policy, pass ``log_probs.detach()``.
        advantages: A, of the same shape. It may be negative, unlike a weight. Expand GRPO's one
            advantage for each text by ``advantages[:, None].expand_as(log_probs)``.
        clip: how far r may move, in the direction in which r A rises, before its gradient is 0; or
            ``(low, high)``.

    >>> log_probs, change = torch.full((3,), -0.7), torch.tensor([0.0, 1.0, 1.0])
    >>> policy_gradient(log_probs, log_probs - change, torch.tensor([2.0, 1.0, -1.0]))
    tensor([-2.0000, -1.2000,  2.7183])
    """
    log_probs, old_log_probs, advantages = promote_same_shape(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(
            f"clip={clip!r}: how far the ratio may fall, from 0 to 1, and rise, from 0 on, as in "
            "0.2 or (0.2, 0.28)"
        )
    log_ratio = log_probs - old_log_probs
    # Where r is clipped, its exp may overflow, and 0 · ∞ would be NaN: at 90, say, in float32.
    # exp(1 + high) is clipped, too. No compiler traces ``math.log1p`` of a clip that varies.
    capped = log_ratio.clamp(max=high + 1)
    ratio = torch.where(advantages < 0, log_ratio, capped).exp()
    clipped_ratio = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * advantages, clipped_ratio * advantages)
