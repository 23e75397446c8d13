"""The arithmetic of optimizers, twice: pure on one leaf, and in place on columns of leaves.

A formula is written once, for either. It calls ``ops.add_(x, y)``, which may write to ``x``, and
goes on with what comes back. So the same lines are differentiable operations on tensors, and a few
foreach kernels for all leaves of a dtype. On the host both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from purestep.tree import foreach
from purestep.tree.foreach import Column

Number: TypeAlias = float | Tensor
"""A number for all leaves, or a scalar tensor."""


class Arithmetic(Protocol):
    """What a formula may do, on leaves or on columns of one dtype and device.

    Operations whose names end in ``_`` may write to their first argument. The formula goes on with
    what they return, in the wider dtype of both arguments. Params and state are rounded to their
    dtypes when the formula has ended.
    """

    def cast(self, x: Any, like: Any) -> Any:
        """Returns x in the dtype of ``like``; x itself if it has that."""

    def assign_(self, x: Any, y: Any) -> Any:
        """Returns the values of y, in other memory than y's if anything writes in place."""

    def add_(self, x: Any, y: Any, alpha: Number = 1) -> Any:
        """Computes x + alpha · y with one rounding. y may be a float."""

    def mul(self, x: Any, factor: Number) -> Any:
        """Computes x · factor."""

    def mul_(self, x: Any, factor: Number) -> Any:
        """Computes x · factor."""

    def div(self, x: Any, divisor: Tensor) -> Any:
        """Divides x by a scalar tensor."""

    def div_(self, x: Any, y: Any) -> Any:
        """Computes x / y, where y may be a scalar tensor."""

    def lerp(self, x: Any, y: Any, weight: Number) -> Any:
        """Computes x + weight · (y − x)."""

    def lerp_(self, x: Any, y: Any, weight: float) -> Any:
        """Computes x + weight · (y − x)."""

    def addcmul_(self, x: Any, y: Any, z: Any, value: float) -> Any:
        """Computes x + value · y · z."""

    def sqrt(self, x: Any) -> Any:
        """Computes √x, whose derivative at 0 is 0."""

    def sign(self, x: Any) -> Any:
        """Computes the sign of x."""


class LeafArithmetic:
    """Plain operations on one leaf, for every transform and compiler."""

    def cast(self, x: Tensor, like: Tensor) -> Tensor:
        """Returns x in the dtype of ``like``."""
        return x.to(like.dtype)

    def assign_(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns y, to which nothing writes."""
        return y

    def add_(self, x: Tensor, y: Tensor | float, alpha: Number = 1) -> Tensor:
        """Adds with one rounding, as kernels do with their ``alpha``."""
        if isinstance(alpha, Tensor):
            assert isinstance(y, Tensor)
            return torch.addcmul(x, y, alpha.to(torch.promote_types(x.dtype, y.dtype)))
        return torch.add(x, y, alpha=alpha)

    def mul(self, x: Tensor, factor: Number) -> Tensor:
        """Multiplies by a number, which must not promote a leaf that is a scalar."""
        return x * as_scalar(factor, x)

    mul_ = mul

    def div(self, x: Tensor, divisor: Tensor) -> Tensor:
        """Divides by a leaf or by a scalar, which must not promote either."""
        return x / as_scalar(divisor, x)

    div_ = div

    def lerp(self, x: Tensor, y: Tensor, weight: Number) -> Tensor:
        """Moves x towards y."""
        return torch.lerp(x, y, as_scalar(weight, x))

    lerp_ = lerp

    def addcmul_(self, x: Tensor, y: Tensor, z: Tensor, value: float) -> Tensor:
        """Adds a product."""
        return torch.addcmul(x, y, z, value=value)

    def sqrt(self, x: Tensor) -> Tensor:
        """Takes the root, see ``root``."""
        return root(x)

    def sign(self, x: Tensor) -> Tensor:
        """Takes the sign."""
        return x.sign()


class ForeachArithmetic:
    """Foreach kernels on columns. No operation writes to a column in half precision."""

    def cast(self, x: Column, like: Column) -> Column:
        """Returns x in the dtype of ``like``."""
        return foreach.cast(x, like)

    def assign_(self, x: Column, y: Column) -> Column:
        """Writes y over x."""
        foreach.copy_(x, y)
        return x

    def add_(self, x: Column, y: Column | float, alpha: Number = 1) -> Column:
        """Adds in place, in the wider dtype of both: CUDA's kernels take one dtype."""
        if not isinstance(y, Sequence):
            foreach.add_(x, y)
            return x
        alpha = foreach.as_number(alpha, y[0])
        if isinstance(alpha, Tensor):  # on a device, which no kernel takes as ``alpha``
            y, alpha = foreach.mul(y, alpha), 1
        if x[0].dtype != y[0].dtype:
            is_wider = torch.promote_types(x[0].dtype, y[0].dtype) == x[0].dtype
            x, y = (x, self.cast(y, x)) if is_wider else (self.cast(x, y), y)
        foreach.add_(x, y, alpha=alpha)
        return x

    def mul(self, x: Column, factor: Number) -> Column:
        """Multiplies."""
        return foreach.mul(x, foreach.as_number(factor, x[0]))

    def mul_(self, x: Column, factor: Number) -> Column:
        """Multiplies in place."""
        foreach.mul_(x, foreach.as_number(factor, x[0]))
        return x

    def div(self, x: Column, divisor: Tensor) -> Column:
        """Divides by a scalar tensor."""
        return foreach.div(x, foreach.as_number(divisor, x[0]))

    def div_(self, x: Column, y: Column | Tensor) -> Column:
        """Divides in place."""
        foreach.div_(x, foreach.as_number(y, x[0]) if isinstance(y, Tensor) else y)
        return x

    def lerp(self, x: Column, y: Column, weight: Number) -> Column:
        """Moves x towards y."""
        weight = foreach.as_number(weight, x[0])
        if isinstance(weight, Tensor):  # on a device, which no kernel takes as a weight
            return foreach.add(x, foreach.mul(foreach.sub(y, x), weight))
        return foreach.lerp(x, y, weight)

    def lerp_(self, x: Column, y: Column, weight: float) -> Column:
        """Moves x towards y in place."""
        foreach.lerp_(x, y, weight)
        return x

    def addcmul_(self, x: Column, y: Column, z: Column, value: float) -> Column:
        """Adds a product in place."""
        foreach.addcmul_(x, y, z, value=value)
        return x

    def sqrt(self, x: Column) -> Column:
        """Takes the roots: on the host by ``root``, on a device by its kernel."""
        return [root(leaf) for leaf in x] if x[0].is_cpu else foreach.sqrt(x)

    def sign(self, x: Column) -> Column:
        """Takes the signs."""
        return foreach.sign(x)


def as_scalar(value: Number, x: Tensor) -> Number:
    """Returns a number in the dtype of x: a scalar tensor may promote a leaf that is a scalar."""
    return value.to(x.dtype) if isinstance(value, Tensor) else value


def root(x: Tensor) -> Tensor:
    """Takes √x, whose derivative at 0 is 0 by selection: where no gradient came, none is made up.

    It computes by way of float64, because torch's float32 root is not correctly rounded where MKL
    takes it. What a compiler writes is the processor's root, which is.
    """
    positive = x > 0
    dtype = x.dtype if torch.compiler.is_dynamo_compiling() else torch.float64
    roots = torch.where(positive, x, 1).to(dtype).sqrt().to(x.dtype)
    return torch.where(positive, roots, 0)


LEAF = LeafArithmetic()
FOREACH = ForeachArithmetic()
