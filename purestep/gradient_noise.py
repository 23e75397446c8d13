"""How noisy gradients are, and so how large a batch is worth its cost [McCandlish et al., 2018].

A token's gradient has the mean G and the covariance Σ. Of K microbatches with nₖ tokens and mean gradients gₖ, and of their
mean g over all N tokens:

    E (Σₖ nₖ ‖gₖ‖² − N ‖g‖²) = (K − 1) tr Σ          E ‖g‖² = ‖G‖² + tr Σ / N
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.reverse_mode import grad_and_value as plain_grad_and_value
from purestep.types import ReverseMode, StepMetrics, Tally, Tree


class SquaredNorms(NamedTuple):
    """What ``with_squared_norms`` makes of ``metrics.aux``: Σₖ nₖ ‖gₖ‖², and ``LossTerms.aux``.

    >>> SquaredNorms(torch.tensor(54.0), aux=()).squares
    tensor(54.)
    """

    squares: Tensor
    aux: Tree


class NoiseScale(NamedTuple):
    """What one step tells of the noise in gradients: unbiased ``trace`` and ``squared_norm``, and their quotient.

    ``scale``
        tr Σ / ‖G‖², the simple noise scale, in tokens: batches much smaller than that are mostly noise.
    ``trace``
        tr Σ, of one token's gradient.
    ``squared_norm``
        ‖G‖². A single step's may be negative.

    >>> trace, squared_norm = torch.tensor(6.0), torch.tensor(2.0)  # averages over steps
    >>> NoiseScale(trace / squared_norm, trace, squared_norm).scale
    tensor(3.)
    """

    scale: Tensor
    trace: Tensor
    squared_norm: Tensor


def with_squared_norms() -> ReverseMode:
    """``ps.grad_and_value`` for a step with ``normalize="grads"`` whose metrics are to tell the ``noise_scale``.

    It adds up the squared norms of the microbatches' gradients, over all ranks, in ``metrics.aux``, which becomes
    ``SquaredNorms(squares, aux)``. It costs one norm for each microbatch, and a tree of gradients that is alive beside the sums.

    >>> from purestep import make_update_step, optim
    >>> step = make_update_step(
    ...     lambda w, x: w * x, optim.sgd(0.1), weight_fn=torch.ones_like, normalize="grads",
    ...     grad_and_value=with_squared_norms(),
    ... )
    >>> w = torch.tensor(1.0)
    >>> _, _, metrics = step(w, optim.sgd(0.1).init(w), [torch.tensor([2.0, 4.0]), torch.tensor([6.0])])
    >>> metrics.aux.squares  # 2 · 3² + 1 · 6²
    tensor(54., dtype=torch.float64)
    """
    return ReverseMode(_squaring)


def _squaring(
    func: Callable[..., Any], /, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    differentiate = plain_grad_and_value(func, argnums, has_aux)

    def run(*args: Any) -> Any:
        output = differentiate(*args)
        grads, beside = output
        tally = beside[1] if has_aux else None
        if not isinstance(tally, Tally):
            return output
        (tokens,) = tally.num_tokens
        square = tree.global_norm(grads).to(torch.float64).square()
        # A microbatch without tokens has neither a gradient nor a mean.
        square = torch.where(tokens > 0, square / torch.where(tokens > 0, tokens, 1), 0)
        return grads, (beside[0], tally._replace(aux=SquaredNorms(square, tally.aux)))

    return run


def noise_scale(metrics: StepMetrics) -> NoiseScale:
    """The gradients' noise, from the metrics of a step that took its gradients ``with_squared_norms``.

    It needs at least two microbatches with tokens, on all ranks together, drawn apart from each other, and weights of 0 and 1;
    microbatches of uneven size are weighed right. A single step tells little: average ``trace`` and
    ``squared_norm`` over steps, and divide the averages. Where the tokens of a text resemble each other, count texts as
    tokens.

    >>> from purestep import count
    >>> group = [torch.tensor([2.0, 4.0]), torch.tensor([6.0])]
    >>> tokens, microbatches = count(group, torch.ones_like)
    >>> aux = SquaredNorms(torch.tensor(54.0), ())
    >>> trace = noise_scale(
    ...     StepMetrics(torch.tensor(0.0), tokens, microbatches, torch.tensor(4.0), torch.tensor(True), aux)
    ... ).trace  # 54 - 3 · 4²
    >>> trace
    tensor(6., dtype=torch.float64)
    """
    if not isinstance(metrics.aux, SquaredNorms):
        raise ValueError(
            "noise_scale needs the squared norms of the microbatches' gradients: make the step with "
            'grad_and_value=ps.with_squared_norms() and normalize="grads"'
        )
    square, tokens = metrics.grad_norm.to(torch.float64).square(), metrics.num_tokens
    trace = (metrics.aux.squares - tokens * square) / (metrics.num_microbatches - 1)
    squared_norm = square - trace / tokens
    return NoiseScale(trace / squared_norm, trace, squared_norm)
