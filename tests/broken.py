"""Losses, containers and tensors that raise, each at a place of its own, or are of a different kind than those of other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import optree
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from tests.uneven import Batch, loss_fn, loss_with_aux


class Killed(BaseException):
    """No ``Exception``, as torch's ``CheckpointException`` is none."""


def raising(
    function: Callable[..., Any], at: int, kind: type[BaseException] = ArithmeticError
) -> Callable[..., Any]:
    """The function, which raises at this call."""
    calls = itertools.count()

    def raises(*args: Any) -> Any:
        if next(calls) == at:
            raise kind("θ ≠ θ")
        return function(*args)

    return raises


def unreadable(*_: Any) -> Tensor:
    """A file's name need not be text."""
    raise OSError("no file caf\udce9")


class _BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, kind: type[BaseException]) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kind = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ctx.kind("no way back")


def broken_backward(
    params: Any, microbatch: Batch, kind: type[BaseException] = ArithmeticError
) -> ps.LossTerms:
    """The gradient of w is found, and may be on its way already, when that of b raises."""
    broken: Tensor = _BrokenBackward.apply(params["b"], kind)
    return loss_with_aux({"w": params["w"], "b": broken}, microbatch)


def interrupted_backward(params: Any, microbatch: Batch) -> ps.LossTerms:
    """The same, where somebody has had enough."""
    return broken_backward(params, microbatch, KeyboardInterrupt)


class Tail(list[Batch]):
    """Microbatches whose end raises: their gradients may be on their way already."""

    def __iter__(self) -> Iterator[Batch]:
        yield from super().__iter__()
        raise ArithmeticError("θ ≠ θ")


class Opaque:
    """A container that does not tell what it holds."""


def _untold(_: Opaque) -> NoReturn:
    raise ArithmeticError("θ ≠ θ")


register: Any = optree.register_pytree_node
register(Opaque, _untold, lambda *_: Opaque(), namespace=tree.NAMESPACE)


class Unruly(Tensor):
    """A tensor that cannot be packed with others."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.reshape:
            raise ArithmeticError("θ ≠ θ")
        return super().__torch_function__(func, types, args, kwargs)


def unruly_aux(params: Any, microbatch: Batch) -> ps.LossTerms:
    """An aux of the same kind, of a class that raises where it is packed."""
    terms = loss_with_aux(params, microbatch)
    return terms._replace(aux={**terms.aux, "sum": terms.aux["sum"].detach().as_subclass(Unruly)})


class Indescribable:
    """What stands beside leaves, and cannot be told."""

    def __repr__(self) -> str:
        raise KeyboardInterrupt("θ ≠ θ")

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


class Labelled:
    """A container with something beside its leaf."""

    def __init__(self, value: Any) -> None:
        self.value = value


register(
    Labelled, lambda x: ((x.value,), Indescribable(), None), lambda _, x: Labelled(x[0]),
    namespace=tree.NAMESPACE,
)  # fmt: skip


def indescribable_aux(params: Any, microbatch: Batch) -> ps.LossTerms:
    """An aux that is added up, and raises where it is described."""
    terms = loss_with_aux(params, microbatch)
    return terms._replace(aux=Labelled(terms.aux))


def hooked(params: Any, microbatch: Batch) -> ps.LossTerms:
    """A hook that raises in the backward pass, where there is one."""

    def raises(grad: Tensor) -> NoReturn:
        raise ArithmeticError("θ ≠ θ")

    if params["w"].requires_grad:
        params["w"].register_hook(raises)
    return loss_with_aux(params, microbatch)


class Large(Tensor):
    """Params for whose gradients there is no memory."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.new_empty:
            raise MemoryError("θ ≠ θ")
        return super().__torch_function__(func, types, args, kwargs)


def without_aux(params: Any, microbatch: Batch) -> ps.LossTerms:
    """Another structure of aux."""
    return ps.LossTerms(loss_fn(params, microbatch))


def aux_as(dtype: torch.dtype, *shape: int) -> Callable[..., ps.LossTerms]:
    """Another kind of aux."""

    def loss(params: Any, microbatch: Batch) -> ps.LossTerms:
        terms = loss_with_aux(params, microbatch)
        return terms._replace(aux={**terms.aux, "sum": torch.zeros(shape, dtype=dtype)})

    return loss


def of_float_losses(params: Any, microbatch: Batch) -> ps.LossTerms:
    """Another dtype of the losses."""
    terms = loss_with_aux(params, microbatch)
    return terms._replace(tokens=terms.tokens.float())
