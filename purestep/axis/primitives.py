"""The collectives: the sum, transpose, tangent and batching rule of each, defined once.

The axes differ only in where the ranks are: a dimension of ``torch.vmap``, threads, processes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

BatchRule: TypeAlias = Callable[[Tensor, int | None, int], tuple[Tensor, int | None]]


class Collective(NamedTuple):
    """Holds the name of a collective's transpose, and its batching rule under ``torch.vmap``.

    ``batch_rule(x, dim, size)`` runs the collective on a tensor whose dimension ``dim`` runs over
    ranks. It returns the result and its dimension over ranks. ``dim`` is None if x is the same
    on every rank, and the rule returns None if the result is.
    """

    transpose: str
    batch_rule: BatchRule


def _sum(x: Tensor, dim: int | None, size: int) -> Tensor:
    if dim is None:
        return x * size
    return x.sum(dim)


def _psum(x: Tensor, dim: int | None, size: int) -> tuple[Tensor, None]:
    return _sum(x, dim, size), None


def _pvary(x: Tensor, dim: int | None, size: int) -> tuple[Tensor, int | None]:
    return x.view_as(x), dim


def _all_gather(x: Tensor, dim: int | None, size: int) -> tuple[Tensor, None]:
    if dim is None:
        return x.expand(size, *x.shape), None
    return x.movedim(dim, 0), None


def _psum_scatter(x: Tensor, dim: int | None, size: int) -> tuple[Tensor, int]:
    return _sum(x, dim, size), 0


def _invariant(x: Tensor, dim: int | None, size: int) -> tuple[Tensor, None]:
    if dim is not None:
        raise ValueError(
            f"an output of out_dims=None is not the same on all {size} ranks: psum it, or give it "
            "a dimension in out_dims"
        )
    return x, None


COLLECTIVES = {
    "psum": Collective("pvary", _psum),
    "pvary": Collective("psum", _pvary),
    "all_gather": Collective("psum_scatter", _all_gather),
    "psum_scatter": Collective("all_gather", _psum_scatter),
    "invariant": Collective("invariant", _invariant),
}


class ProcessGroup(Protocol):
    """Runs collectives over ranks that run their own programs: not torch's class of this name."""

    def run(self, op: str, x: Tensor) -> Tensor:
        """Runs ``op``, as of ``Axis.apply``, on one plain tensor of each rank, and waits.

        Returns this rank's result.
        """


class _CollectiveFunction(Function):
    """Runs a collective on one tensor, with its transpose, its tangent and its batching rule.

    Ranks that run their own programs form the process group ``process_group``. Ranks of one
    program are a dimension of ``torch.vmap``: only the axis's own vmap batches ``rank_index``. Any
    other vmap is an ensemble, whose dimension passes through as the last one. With neither a
    process group nor the axis's vmap, it raises ``RuntimeError``.
    """

    @staticmethod
    def forward(
        x: Tensor,
        rank_index: Tensor | None,
        op: str,
        process_group: ProcessGroup | None,
    ) -> Tensor:
        if process_group is None:
            raise RuntimeError(
                f"{op} over an axis that is not mapped: call it inside axis.map"
            )
        return process_group.run(op, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, rank_index, ctx.op, ctx.process_group = inputs
        ctx.save_for_backward(rank_index)
        ctx.save_for_forward(rank_index)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (rank_index,) = ctx.saved_tensors
        transpose = COLLECTIVES[ctx.op].transpose
        result = apply_op(cotangent, rank_index, transpose, ctx.process_group)
        return result, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        (rank_index,) = ctx.saved_tensors
        return apply_op(tangent, rank_index, ctx.op, ctx.process_group)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        x: Tensor,
        rank_index: Any,
        op: str,
        process_group: ProcessGroup | None,
    ) -> Any:
        dim, rank_dim, *_ = in_dims
        if rank_dim is not None:
            return COLLECTIVES[op].batch_rule(x, dim, info.batch_size)
        last = x.movedim(dim, -1)
        result = apply_op(last, rank_index, op, process_group)
        return result, result.ndim - 1


def apply_function(
    x: Tensor, rank_index: Tensor | None, op: str, process_group: ProcessGroup | None
) -> Tensor:
    """Runs the collective ``op`` on one tensor, with its derivatives and its batching rule.

    ``op`` is a key of ``COLLECTIVES``, other than "invariant" if there is a ``process_group``. Its
    ranks are those of ``process_group``. If that is None, they are the dimension along which a
    ``torch.vmap`` batches ``rank_index``. Without either, it raises ``RuntimeError``.
    """
    apply: Callable[..., Tensor] = _CollectiveFunction.apply
    return apply(x, rank_index, op, process_group)


def apply_op(
    x: Tensor,
    rank_index: Tensor | None,
    op: str,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Runs a collective as ``apply_function`` does, also while ``torch.compile`` traces."""
    if torch.compiler.is_dynamo_compiling():
        # Marks ``apply_function`` for the compiler on import, which takes time.
        from purestep.axis import allow_in_graph

        return allow_in_graph.apply_collective(x, rank_index, op, process_group)
    return apply_function(x, rank_index, op, process_group)
