"""Defines the arithmetic of optimizers twice: pure on one leaf, and in place on columns of leaves.

A formula is written once for both: it calls an operation such as ``ops.add_(x, y)``, which may
write to ``x``, and continues with the result. So the same lines are differentiable operations on
tensors, and a few foreach kernels for all leaves of a dtype. On the host both give the same bits.
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
    """Lists the operations of a formula, on leaves or on columns of one dtype and device.

    Operations whose names end in ``_`` may write to their first argument, and the formula continues
    with the result. The result of ``add_`` has the wider dtype of both arguments. Other arithmetic
    takes leaves or columns of one dtype. Params and state are rounded to their dtypes when the
    formula has ended.
    """

    def cast(self, x: Any, like: Any) -> Any:
        """Returns x in the dtype of ``like``; x itself if it has that."""

    def assign_(self, x: Any, y: Any) -> Any:
        """Returns y's values: in the memory of x, or y itself if no operation writes in place."""

    def add_(self, x: Any, y: Any, alpha: Number = 1) -> Any:
        """Computes x + alpha · y, with one rounding unless alpha is a tensor on a device.

        y may be a float if alpha is 1. The result may be in the memory of x.
        """

    def mul(self, x: Any, factor: Number) -> Any:
        """Computes x · factor, in new memory."""

    def mul_(self, x: Any, factor: Number) -> Any:
        """Computes x · factor, perhaps in the memory of x."""

    def div(self, x: Any, divisor: Tensor) -> Any:
        """Computes x / divisor in new memory; divisor is a scalar tensor."""

    def div_(self, x: Any, y: Any) -> Any:
        """Computes x / y, perhaps in the memory of x; y is like x, or a scalar tensor."""

    def lerp(self, x: Any, y: Any, weight: Number) -> Any:
        """Computes x + weight · (y − x), in new memory."""

    def lerp_(self, x: Any, y: Any, weight: float) -> Any:
        """Computes x + weight · (y − x), perhaps in the memory of x."""

    def addcmul_(self, x: Any, y: Any, z: Any, value: float) -> Any:
        """Computes x + value · y · z, perhaps in the memory of x."""

    def sqrt(self, x: Any) -> Any:
        """Computes √x, in new memory.

        Its derivative at 0 is 0, as that of ``safe_sqrt``. Columns on a device take a foreach
        kernel instead, without this.
        """

    def sign(self, x: Any) -> Any:
        """Computes the sign of x, in new memory."""


class LeafArithmetic:
    """Computes by plain operations on one leaf, which every transform and compiler follows.

    No operation writes in place, also not those whose names end in ``_``.
    """

    def cast(self, x: Tensor, like: Tensor) -> Tensor:
        """Returns x in the dtype of ``like``; x itself if it has that."""
        return x.to(like.dtype)

    def assign_(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns y itself: no operation on a leaf writes in place."""
        return y

    def add_(self, x: Tensor, y: Tensor | float, alpha: Number = 1) -> Tensor:
        """Computes x + alpha · y in new memory, with one rounding, as foreach kernels do.

        y may be a float only if alpha is no tensor.
        """
        if not isinstance(alpha, Tensor):
            return torch.add(x, y, alpha=alpha)
        assert isinstance(y, Tensor)
        dtype = torch.promote_types(x.dtype, y.dtype)
        return torch.addcmul(x, y, alpha.to(dtype))

    def mul(self, x: Tensor, factor: Number) -> Tensor:
        """Computes x · factor in new memory; a tensor factor is cast to the dtype of x first."""
        return x * as_scalar(factor, x)

    mul_ = mul

    def div(self, x: Tensor, divisor: Tensor) -> Tensor:
        """Divides x, in new memory, by a leaf or scalar tensor, cast to the dtype of x first."""
        return x / as_scalar(divisor, x)

    div_ = div

    def lerp(self, x: Tensor, y: Tensor, weight: Number) -> Tensor:
        """Computes x + weight · (y − x) in new memory; a tensor weight is cast to x's dtype."""
        return torch.lerp(x, y, as_scalar(weight, x))

    lerp_ = lerp

    def addcmul_(self, x: Tensor, y: Tensor, z: Tensor, value: float) -> Tensor:
        """Computes x + value · y · z in new memory."""
        return torch.addcmul(x, y, z, value=value)

    def sqrt(self, x: Tensor) -> Tensor:
        """Computes √x in new memory; its derivative at 0 is 0: see ``safe_sqrt``."""
        return safe_sqrt(x)

    def sign(self, x: Tensor) -> Tensor:
        """Computes the sign of x, in new memory."""
        return x.sign()


class ForeachArithmetic:
    """Computes as ``LeafArithmetic``, by foreach kernels on columns of one dtype and device."""

    def cast(self, x: Column, like: Column) -> Column:
        """Returns x in the dtype of ``like``; x itself if it has that."""
        return foreach.cast(x, like)

    def assign_(self, x: Column, y: Column) -> Column:
        """Writes y over x in place, and returns x."""
        foreach.copy_(x, y)
        return x

    def add_(self, x: Column, y: Column | float, alpha: Number = 1) -> Column:
        """Returns x + alpha · y: in place if y's dtype is not wider, else in new memory like y.

        Unequal dtypes must have a wider one. A float y is added in place; alpha is then not used.
        """
        if not isinstance(y, Sequence):
            foreach.add_(x, y)
            return x
        alpha = foreach.as_number(alpha, y[0])
        if isinstance(alpha, Tensor):
            # It lies on a device, and no kernel takes it as ``alpha``.
            y = foreach.mul(y, alpha)
            alpha = 1
        if x[0].dtype != y[0].dtype:
            # CUDA's kernels take one dtype.
            wider_dtype = torch.promote_types(x[0].dtype, y[0].dtype)
            if x[0].dtype == wider_dtype:
                y = foreach.cast(y, x)
            else:
                x = foreach.cast(x, y)
        foreach.add_(x, y, alpha=alpha)
        return x

    def mul(self, x: Column, factor: Number) -> Column:
        """Computes x · factor, in new memory."""
        factor = foreach.as_number(factor, x[0])
        return foreach.mul(x, factor)

    def mul_(self, x: Column, factor: Number) -> Column:
        """Multiplies x in place, and returns it."""
        factor = foreach.as_number(factor, x[0])
        foreach.mul_(x, factor)
        return x

    def div(self, x: Column, divisor: Tensor) -> Column:
        """Divides x by a scalar tensor, in new memory."""
        number = foreach.as_number(divisor, x[0])
        return foreach.div(x, number)

    def div_(self, x: Column, y: Column | Tensor) -> Column:
        """Divides x in place by a column or a scalar tensor, and returns it."""
        if isinstance(y, Tensor):
            foreach.div_(x, foreach.as_number(y, x[0]))
        else:
            foreach.div_(x, y)
        return x

    def lerp(self, x: Column, y: Column, weight: Number) -> Column:
        """Computes x + weight · (y − x), in new memory."""
        weight = foreach.as_number(weight, x[0])
        if not isinstance(weight, Tensor):
            return foreach.lerp(x, y, weight)
        # It lies on a device, and no kernel takes it as a weight.
        difference = foreach.sub(y, x)
        return foreach.add(x, foreach.mul(difference, weight))

    def lerp_(self, x: Column, y: Column, weight: float) -> Column:
        """Moves x to x + weight · (y − x) in place, and returns it."""
        foreach.lerp_(x, y, weight)
        return x

    def addcmul_(self, x: Column, y: Column, z: Column, value: float) -> Column:
        """Adds value · y · z to x in place, and returns it."""
        foreach.addcmul_(x, y, z, value=value)
        return x

    def sqrt(self, x: Column) -> Column:
        """Computes √x in new memory: on the host by ``safe_sqrt``, on a device by its kernel."""
        if x[0].is_cpu:
            return [safe_sqrt(leaf) for leaf in x]
        return foreach.sqrt(x)

    def sign(self, x: Column) -> Column:
        """Computes the signs of x, in new memory."""
        return foreach.sign(x)


def as_scalar(value: Number, x: Tensor) -> Number:
    """Returns a scalar tensor in the dtype of x, and a float as it is.

    Without the cast, a tensor of a wider dtype would promote an x that is a scalar, too.
    """
    if isinstance(value, Tensor):
        return value.to(x.dtype)
    return value


def safe_sqrt(x: Tensor) -> Tensor:
    """Computes √x, whose derivative at 0 is 0, not infinite.

    It computes by way of float64, because torch's float32 root is not correctly rounded where MKL
    takes it. Compiled code calls the processor's root, which is.
    """
    is_zero = x == 0
    dtype = torch.float64
    if torch.compiler.is_dynamo_compiling():
        dtype = x.dtype
    # The root of 1 where x is 0: a selection multiplies the derivative there by zero, and the
    # derivative of √x at 0 is infinite.
    nonzero = torch.where(is_zero, 1, x)
    roots = nonzero.to(dtype).sqrt().to(x.dtype)
    return torch.where(is_zero, 0, roots)


LEAF = LeafArithmetic()
FOREACH = ForeachArithmetic()
