"""What flows through an update step, and the signatures of its functions."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from torch import Tensor
from typing_extensions import TypeVar

Tree: TypeAlias = Any
"""An optree pytree. Its leaves are tensors; ``None`` is an empty subtree, not a leaf."""

Params: TypeAlias = Tree
"""A tree of floating point tensors: what is differentiated and updated."""

OptState: TypeAlias = Tree
"""The optimizer's state, a tree of tensors."""


class State(Any):  # type: ignore[misc]
    """Stands for the state of an optimizer of ``ps.optim``: type checkers refuse params for it."""


Microbatch: TypeAlias = Any
"""What ``loss_fn`` takes at once: any tree of tensors, of any shape."""

ParamsT = TypeVar("ParamsT", default=Params)
ReadParams = TypeVar("ReadParams", default=Params, contravariant=True)
StateT = TypeVar("StateT", default=OptState)

GradHook: TypeAlias = Callable[[int, Tensor], Tensor]
"""Takes a leaf's position and its final sum, and returns the tensor that stands for the sum now.

It is the sum, a view of the bucket that holds it, or zeros without memory if it is scattered.
"""

Gather: TypeAlias = Literal["step", "microbatch", "loss"]
"""Where sharded params are gathered: once a step, once a microbatch, or by the loss itself."""


class LossOutput(NamedTuple):
    """Holds a microbatch's losses, and what else a loss function may return.

    Attributes:
        losses: one loss per token. The step sums them with their weights and divides by the global
            count.
        microbatch_loss: a scalar auxiliary loss, such as load balancing. The step adds its mean
            over all microbatches with tokens, on all ranks. This term **depends on the cut**.
            Microbatches without tokens compute it too, at weight 0: it must be finite there.
        aux: a tree of tensors, summed over microbatches and ranks into ``metrics.aux``. Return sums
            and counts, never means, and divide them afterwards.
        weights: the tokens' weights, if only the forward pass knows them. This needs
            ``weight_fn=None`` and ``normalize="grads"``. No gradient flows through weights.

    >>> import torch
    >>> LossOutput(torch.ones(2, 3), aux={"correct": torch.tensor(4)}).aux["correct"]
    tensor(4)
    """

    losses: Tensor
    microbatch_loss: Tensor | None = None
    aux: Tree = ()
    weights: Tensor | None = None


class LossFn(Protocol[ReadParams]):
    """Computes one loss per token: never a mean, never a sum.

    The call is ``loss_fn(params, microbatch)``. It returns the losses, or a ``LossOutput``.

    >>> import torch
    >>> def squares(w: Params, microbatch: Microbatch) -> Tensor:
    ...     return (w - microbatch["y"]) ** 2
    >>> loss_fn: LossFn = squares
    >>> loss_fn(torch.tensor(1.0), {"y": torch.tensor([1.0, 3.0])})
    tensor([0., 4.])
    """

    def __call__(
        self, params: ReadParams, microbatch: Microbatch, /
    ) -> Tensor | LossOutput: ...


class WeightFn(Protocol):
    """Computes each token's weight wᵢ ≥ 0 as bool, int or float: ``weight_fn(microbatch)``.

    It reads data alone. A step counts these weights, and multiplies the losses by the same ones.

    >>> import torch
    >>> def no_padding(microbatch: Microbatch) -> Tensor:
    ...     return microbatch["y"] != -1
    >>> weight_fn: WeightFn = no_padding
    >>> weight_fn({"y": torch.tensor([1, 3, -1])})
    tensor([ True,  True, False])
    """

    def __call__(self, microbatch: Microbatch, /) -> Tensor: ...


class GradAndValue(Protocol):
    """Turns a function into one that returns ``(grads, value)``, as ``torch.func.grad_and_value``.

    >>> import torch
    >>> differentiate: GradAndValue = torch.func.grad_and_value
    >>> differentiate(lambda w: w**2)(torch.tensor(3.0))
    (tensor(6.), tensor(9.))
    """

    def __call__(
        self,
        func: Callable[..., Any],
        /,
        argnums: int | tuple[int, ...] = 0,
        has_aux: bool = False,
    ) -> Callable[..., Any]: ...


class TokenCounts(NamedTuple):
    """Holds the denominators of an update: N = Σ wᵢ, and the number of microbatches with tokens.

    >>> import torch
    >>> from purestep import count_tokens
    >>> count_tokens([torch.ones(2), torch.ones(3), torch.zeros(4)], lambda x: x > 0)
    TokenCounts(num_tokens=tensor(5), num_microbatches=tensor(2))
    """

    num_tokens: Tensor
    num_microbatches: Tensor


class GradSums(NamedTuple):
    """Holds the sums over the tokens of a group, on one rank or on all.

    Attributes:
        grads: the gradient of ``loss``, a tree like the params.
        loss: Σ wᵢ ℓᵢ(θ). If ``accumulate`` got ``total=``, this is divided by N. Then the terms of
            ``LossOutput.microbatch_loss``, divided by ``total.num_microbatches``, are added.
        counts: the ``TokenCounts`` of these microbatches.
        aux: the sum of ``LossOutput.aux``, or ``()``.

    >>> import torch
    >>> from purestep import accumulate
    >>> group = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    >>> sums = accumulate(lambda w, x: w * x, torch.tensor(1.0), group, weight_fn=torch.ones_like)
    >>> sums.grads, sums.loss, sums.counts.num_microbatches, sums.aux
    (tensor(6.), tensor(6.), tensor(2), ())
    """

    grads: Tree
    loss: Tensor
    counts: TokenCounts
    aux: Tree


def _read_field(metrics: Any, index: Any) -> Any:
    """Returns an item of a tuple; raises ``TypeError`` for a text, with the names of the fields."""
    if isinstance(index, str):
        fields = metrics._fields
        text = f"metrics have no {index!r}"
        if index in fields:
            text = f"metrics are a NamedTuple: write metrics.{index}"
        raise TypeError(f"{text}; the fields are {', '.join(fields)}")
    return tuple.__getitem__(metrics, index)


class StepMetrics(NamedTuple):
    """Holds the figures of one update: scalars and aux, global over ranks, the same on each.

    They are detached. Under ``torch.func`` and in forward mode they keep their derivatives.

    Attributes:
        loss: L(θ) = Σ wᵢ ℓᵢ(θ) / N at the old params, plus the microbatch term if there is one. It
            is 0 if N is 0.
        num_tokens: N = Σ wᵢ over all microbatches of all ranks. int64 for bool and int weights,
            else float64.
        num_microbatches: how many microbatches have tokens.
        grad_norm: ‖∇L(θ)‖₂, before any clipping.
        applied: False if params and state stay as they are: no tokens, or a skipped gradient. Also
            False for an N that is not finite, where the host cannot read it.
        aux: the sum of ``LossOutput.aux``, or ``()``.

    >>> import torch
    >>> from purestep import make_update_step, optim
    >>> sgd, w = optim.sgd(0.1), torch.tensor(0.0)
    >>> step = make_update_step(lambda w, x: (w - x) ** 2, sgd, weight_fn=lambda x: x > 0)
    >>> metrics = step(w, sgd.init(w), [torch.tensor([1.0, 3.0]), torch.tensor([0.0])])[2]
    >>> metrics[:5]
    (tensor(5.), tensor(2), tensor(1), tensor(4.), tensor(True))
    """

    loss: Tensor
    num_tokens: Tensor
    num_microbatches: Tensor
    grad_norm: Tensor
    applied: Tensor
    aux: Tree

    def __getitem__(self, index: Any) -> Any:
        """Returns a field by its number; a name raises ``TypeError``, which lists the fields."""
        return _read_field(self, index)


class EvalMetrics(NamedTuple):
    """Holds the figures of one evaluation: the fields of ``StepMetrics`` that need no gradient.

    >>> import torch
    >>> from purestep import make_eval_step
    >>> eval_step = make_eval_step(lambda w, x: (w - x) ** 2, weight_fn=lambda x: x > 0)
    >>> metrics = eval_step(torch.tensor(0.0), [torch.tensor([1.0, 3.0, 0.0])])
    >>> metrics.loss, metrics.num_tokens
    (tensor(5.), tensor(2))
    """

    loss: Tensor
    num_tokens: Tensor
    num_microbatches: Tensor
    aux: Tree

    def __getitem__(self, index: Any) -> Any:
        """Returns a field by its number; a name raises ``TypeError``, which lists the fields."""
        return _read_field(self, index)


class UpdateStep(Protocol[ParamsT, StateT]):
    """Makes one update: ``update_step(params, opt_state, microbatches)``.

    Returns ``(params, opt_state, metrics)``.

    >>> import torch
    >>> from purestep import make_update_step, optim
    >>> sgd, w, ones = optim.sgd(0.5), torch.tensor(0.0), torch.ones_like
    >>> step: UpdateStep = make_update_step(lambda w, x: (w - x) ** 2, sgd, weight_fn=ones)
    >>> w, opt_state, metrics = step(w, sgd.init(w), [torch.tensor([1.0, 3.0])])
    >>> w
    tensor(2.)
    """

    def __call__(
        self, params: ParamsT, opt_state: StateT, microbatches: Sequence[Microbatch], /
    ) -> tuple[ParamsT, StateT, StepMetrics]: ...
