"""A whole data-parallel group in one process: ranks as a dimension of ``torch.vmap``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from purestep import tree
from purestep.axis.primitives import apply_op
from purestep.types import Tree


class VmapAxis:
    """``size`` ranks in one process, as one ``torch.vmap`` dimension: each runs the same program.

    >>> from purestep import psum
    >>> axis = VmapAxis(2)
    >>> axis.map(lambda x: x / psum(x, axis))(torch.tensor([1.0, 3.0]))
    tensor([0.2500, 0.7500])

    It nests, in other axes and in ensembles (``torch.vmap`` around or inside), under ``grad``,
    ``jvp`` and ``torch.compile``. Ranks run one and the same program: a rank with less data has
    microbatches whose weights are zero.
    """

    is_multi_program = False
    global_ranks: frozenset[int] = frozenset()

    def __init__(self, size: int) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"VmapAxis(size={size!r}): an axis has a whole number of ranks, at least one"
            )
        self.size = size

    def map(
        self,
        fn: Callable[..., Any],
        in_dims: Any = 0,
        out_dims: Any = 0,
        *,
        randomness: Literal["error", "same", "different"] = "error",
    ) -> Callable[..., Any]:
        """``fn`` run by every rank.

        ``in_dims`` and ``out_dims`` are as in ``torch.vmap``, for trees: an integer says which
        dimension of the leaves runs over ranks, None that every rank has the same. An output of
        ``out_dims=None`` must really be the same, which is checked: it comes from ``psum`` or from
        shared inputs. ``randomness`` is that of ``torch.vmap`` as well, for functions that draw
        from the global generator.
        """

        def mapped(*args: Any) -> Any:
            leaves, structure = tree.flatten(args)
            shape: list[Any] = []

            def rank(token: Tensor, *leaves: Any) -> list[Tensor]:
                with bind_rank_indices([self], [token]):
                    output = fn(*tree.unflatten(structure, leaves))
                    dims = _broadcast_dims(out_dims, output, "out_dims")
                    outputs, shape[:] = (
                        tree.leaves(output),
                        (tree.flatten(output)[1], dims),
                    )
                    return [
                        leaf if dim is not None else self.apply("invariant", leaf)
                        for leaf, dim in zip(outputs, dims, strict=True)
                    ]

            in_dims_ = (0, *_broadcast_dims(in_dims, args, "in_dims"))
            run = torch.vmap(rank, in_dims_, randomness=randomness)
            results = run(torch.arange(self.size), *leaves)
            output_structure, dims = shape
            for at, dim in enumerate(dims):
                results[at] = (
                    results[at][0] if dim is None else results[at].movedim(0, dim)
                )
            return tree.unflatten(output_structure, results)

        return mapped

    @property
    def index(self) -> Tensor:
        """This rank's number, 0 to size - 1: a different one on every rank of ``map``."""
        token = _rank_indices().get(self)
        if token is None:
            raise RuntimeError(
                f"{self} has ranks only while it maps: run the function that uses it through "
                "axis.map(fn, in_dims, out_dims)"
            )
        return token

    def apply(self, law: str, x: Tensor) -> Tensor:
        """The law over the vmap dimension of ``map``."""
        return apply_op(x, self.index, law)

    def apply_tree(self, law: str, x: Tree) -> Tree:
        """psum or pvary of every leaf."""
        return tree.map(partial(self.apply, law), x)

    def __repr__(self) -> str:
        return f"VmapAxis({self.size})"


_thread = threading.local()


def _rank_indices() -> dict[VmapAxis, Tensor]:
    """Of each axis that maps in this thread, what says which rank this is."""
    tokens: dict[VmapAxis, Tensor] = getattr(_thread, "tokens", {})
    return tokens


def mapped_axes() -> list[VmapAxis]:
    """The axes that map in this thread."""
    return [*_rank_indices()]


@contextmanager
def bind_rank_indices(
    axes: Sequence[VmapAxis], tokens: Sequence[Tensor]
) -> Iterator[None]:
    """Within it, these tokens are the axes' indices: while an axis maps, or is recomputed."""
    outer = _rank_indices()
    _thread.tokens = outer | dict(zip(axes, tokens, strict=True))
    try:
        yield
    finally:
        _thread.tokens = outer


def _broadcast_dims(dims: Any, args: Tree, name: str) -> list[int | None]:
    """The dimension of every leaf of ``args``, from a tree of dimensions that may be a prefix."""
    try:
        found = optree.broadcast_prefix(
            dims, args, none_is_leaf=True, namespace=tree.NAMESPACE
        )
    except ValueError:
        wanted = tree.format_spec(tree.flatten(args)[1])
        raise ValueError(f"{name}={dims} does not fit a tree like {wanted}") from None
    leaves = optree.tree_leaves(args, none_is_leaf=True, namespace=tree.NAMESPACE)
    return [dim for dim, leaf in zip(found, leaves, strict=True) if leaf is not None]
