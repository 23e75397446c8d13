"""The laws of the collectives: each one's sum, transpose, tangent and batching, written once.

The axes differ only in where the ranks are: a dimension of ``torch.vmap``, threads, processes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function


class Collective(NamedTuple):
    """One collective, as it is over a dimension that holds all ranks.

    ``across(x, dim, size)`` returns the result and its dimension over ranks. ``dim`` is None where
    x is the same on every rank, and None is returned where the result is.
    """

    transpose: str
    across: Callable[[Tensor, int | None, int], tuple[Tensor, int | None]]


def _sum(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x * size if dim is None else x.sum(dim)


def _stack(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _invariant(x: Tensor, dim: int | None, size: int) -> tuple[Tensor, None]:
    if dim is not None:
        raise ValueError(
            f"an output of out_dims=None is not the same on all {size} ranks: psum it, or give it "
            "a dimension in out_dims"
        )
    return x, None


COLLECTIVES = {
    "psum": Collective("pvary", lambda x, dim, size: (_sum(x, dim, size), None)),
    "pvary": Collective("psum", lambda x, dim, size: (x.view_as(x), dim)),
    "all_gather": Collective(
        "psum_scatter", lambda x, dim, size: (_stack(x, dim, size), None)
    ),
    "psum_scatter": Collective(
        "all_gather", lambda x, dim, size: (_sum(x, dim, size), 0)
    ),
    "invariant": Collective("invariant", _invariant),
}


class ProcessGroup(Protocol):
    """Ranks that run their own programs: they meet for a law on one plain tensor each."""

    def meet(self, law: str, x: Tensor) -> Tensor: ...


class _CollectiveFunction(Function):
    """A law on one tensor, with its transpose, its tangent and its batching.

    Ranks that run their own programs meet in ``where``. Ranks of one program are a dimension of
    ``torch.vmap``: ``token`` is batched by the axis's own vmap and by no other. Any other vmap is
    an ensemble, whose dimension is carried along behind the law's own.
    """

    @staticmethod
    def forward(
        x: Tensor, token: Tensor | None, law: str, where: ProcessGroup | None
    ) -> Tensor:
        if where is None:
            raise RuntimeError(
                f"{law} over an axis that is not mapped: call it inside axis.map"
            )
        return where.meet(law, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, token, ctx.law, ctx.where = inputs
        ctx.save_for_backward(token)
        ctx.save_for_forward(token)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (token,) = ctx.saved_tensors
        return (
            apply_op(cotangent, token, COLLECTIVES[ctx.law].transpose, ctx.where),
            None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        (token,) = ctx.saved_tensors
        return apply_op(tangent, token, ctx.law, ctx.where)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        x: Tensor,
        token: Any,
        law: str,
        where: ProcessGroup | None,
    ) -> Any:
        dim, token_dim, _, _ = in_dims
        if token_dim is not None:
            return COLLECTIVES[law].across(x, dim, info.batch_size)
        result = apply_op(x.movedim(dim, -1), token, law, where)
        return result, result.ndim - 1


def apply_function(
    x: Tensor, token: Tensor | None, law: str, where: ProcessGroup | None
) -> Tensor:
    """The law on one tensor, as autograd and functorch see it."""
    apply: Callable[..., Tensor] = _CollectiveFunction.apply
    return apply(x, token, law, where)


def apply_op(
    x: Tensor, token: Tensor | None, law: str, where: ProcessGroup | None = None
) -> Tensor:
    """The law on one tensor, as a compiler sees it too."""
    if torch.compiler.is_dynamo_compiling():
        # Marks ``apply_function`` for the compiler on import, which takes time.
        from purestep.axis import allow_in_graph

        return allow_in_graph.apply_collective(x, token, law, where)
    return apply_function(x, token, law, where)
