"""Computes losses per unit of loss, be it a token, a row or a pair: never a mean, never a sum."""

from purestep.losses.linear import linear_cross_entropy, linear_kl_divergence
from purestep.losses.logits import cross_entropy, kl_divergence
from purestep.losses.pointwise import dpo, mse, policy_gradient

__all__ = [
    "cross_entropy", "linear_cross_entropy", "kl_divergence", "linear_kl_divergence",
    "mse", "dpo", "policy_gradient",
]  # fmt: skip
