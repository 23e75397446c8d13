"""Preferences: a loss for each pair."""

from torch import Tensor
from torch.nn import functional

from purestep.losses.shapes import paired


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

    Args:
        chosen: log π(text) of the preferred text of each pair, summed over its tokens.
        rejected: the same for the other text.
        reference_chosen: log π(text) under the model where training began, a constant.
        reference_rejected: the same for the other text.
        beta: β, the cost of moving away from the reference.
        label_smoothing: s, the assumed probability that a pair is labelled the wrong way round.

    >>> import torch
    >>> won, lost, reference = torch.tensor([[-4.0], [-9.0], [-5.0]])
    >>> dpo(won, lost, reference, reference)
    tensor([0.4741])
    """
    chosen, rejected, reference_chosen, reference_rejected = paired(
        chosen=chosen,
        rejected=rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
    )
    gap = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    losses = -functional.logsigmoid(gap)
    # log σ(−x) = log σ(x) − x
    return losses + label_smoothing * gap if label_smoothing else losses
