"""Losses, containers and tensors that raise, each at another place of a step."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.uneven import Batch, loss_fn


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


class _BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: type[BaseException]) -> Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ctx.kind("no way back")


def broken_backward(kind: type[BaseException]) -> Callable[[Any, Batch], Tensor]:
    """The gradient of w is found, and may be on its way already, when that of b raises."""

    def loss(params: Any, microbatch: Batch) -> Tensor:
        broken: Tensor = _BrokenBackward.apply(params["b"], kind)
        return loss_fn({"w": params["w"], "b": broken}, microbatch)

    return loss


class Tail(list[Batch]):
    """Microbatches whose end raises: their gradients may be on their way already."""

    def __iter__(self) -> Iterator[Batch]:
        yield from super().__iter__()
        raise ArithmeticError("θ ≠ θ")


class Unruly(Tensor):
    """A tensor that cannot be packed with others."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.reshape:
            raise ArithmeticError("θ ≠ θ")
        return super().__torch_function__(func, types, args, kwargs)
