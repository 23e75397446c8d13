"""``VmapAxis``: the ranks of one process, as a dimension of ``torch.vmap``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from purestep import tree
from purestep.axis.primitives import apply_op
from purestep.types import Tree


class VmapAxis:
    """Simulates ranks in one process, as one ``torch.vmap`` dimension: each runs the same program.

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
        """Makes a function of positional arguments that runs ``fn`` on every rank.

        ``in_dims`` and ``out_dims`` are as in ``torch.vmap``, for trees. An integer is the
        dimension of the leaves that runs over ranks. None means that every rank has the same. An
        output of ``out_dims=None`` must come from ``psum``, ``all_gather``, shared inputs or
        constant tensors. Others raise ``ValueError``, even if their values agree. So does a tree of
        dims that is no prefix.

        ``randomness`` is that of ``torch.vmap`` as well, for functions that draw from the global
        generator.
        """

        def mapped(*args: Any) -> Any:
            leaves, spec = tree.flatten(args)
            # The trace of ``fn`` leaves here what vmap does not return: no tensors.
            output_spec: list[tree.TreeSpec] = []
            output_dims: list[int | None] = []

            def run_rank(rank_index: Tensor, *leaves: Any) -> list[Tensor]:
                with bind_rank_indices([self], [rank_index]):
                    output = fn(*tree.unflatten(spec, leaves))
                    outputs, spec_of_output = tree.flatten(output)
                    output_spec[:] = [spec_of_output]
                    output_dims[:] = _broadcast_dims(out_dims, output, "out_dims")
                    for index, dim in enumerate(output_dims):
                        if dim is None:
                            outputs[index] = self.apply("invariant", outputs[index])
                    return outputs

            leaf_dims = _broadcast_dims(in_dims, args, "in_dims")
            run = torch.vmap(run_rank, (0, *leaf_dims), randomness=randomness)
            results = run(torch.arange(self.size), *leaves)
            for index, dim in enumerate(output_dims):
                if dim is None:
                    results[index] = results[index][0]
                else:
                    results[index] = results[index].movedim(0, dim)
            return tree.unflatten(output_spec[0], results)

        return mapped

    @property
    def index(self) -> Tensor:
        """Returns this rank's index, below the size; raises ``RuntimeError`` outside of ``map``."""
        rank_index = _rank_indices().get(self)
        if rank_index is None:
            raise RuntimeError(
                f"{self} has ranks only while it maps: run the function that uses it through "
                "axis.map(fn, in_dims, out_dims)"
            )
        return rank_index

    def apply(self, op: str, x: Tensor) -> Tensor:
        """Runs a collective over the ranks of ``map``, and returns the result of this rank.

        ``op`` is as in ``Axis.apply``, or "invariant": that returns ``x``, but raises
        ``ValueError`` if ``x`` may differ between ranks. Raises ``RuntimeError`` outside of
        ``map``.
        """
        return apply_op(x, self.index, op)

    def apply_tree(self, op: str, x: Tree) -> Tree:
        """Runs psum or pvary on every leaf; a leaf outside of ``map`` raises ``RuntimeError``."""
        return tree.map(lambda leaf: self.apply(op, leaf), x)

    def __repr__(self) -> str:
        return f"VmapAxis({self.size})"


_thread = threading.local()


def _rank_indices() -> dict[VmapAxis, Tensor]:
    """Returns the rank index of each axis that maps in this thread."""
    indices: dict[VmapAxis, Tensor] = getattr(_thread, "rank_indices", {})
    return indices


@contextmanager
def bind_rank_indices(
    axes: Sequence[VmapAxis], indices: Sequence[Tensor]
) -> Iterator[None]:
    """Sets the rank indices of axes in this thread, inside the ``with``; other axes keep theirs.

    Afterwards, all have the indices of before.
    """
    outer = _rank_indices()
    _thread.rank_indices = outer | dict(zip(axes, indices, strict=True))
    try:
        yield
    finally:
        _thread.rank_indices = outer


def _broadcast_dims(dims: Any, args: Tree, name: str) -> list[int | None]:
    """Returns the dimension of every leaf of ``args``; the tree ``dims`` may be a prefix of it.

    A None in ``dims`` is the dimension None, and one in ``args`` is no leaf. Raises ``ValueError``,
    which calls ``dims`` by ``name``, if it does not fit.
    """
    try:
        # A None in ``dims`` is a value, and one in ``args`` an empty subtree.
        leaf_dims = optree.broadcast_prefix(
            dims, args, none_is_leaf=True, namespace=tree.NAMESPACE
        )
    except ValueError:
        _, spec = tree.flatten(args)
        text = tree.format_spec(spec)
        raise ValueError(f"{name}={dims} does not fit a tree like {text}") from None
    leaves = optree.tree_leaves(args, none_is_leaf=True, namespace=tree.NAMESPACE)
    pairs = zip(leaf_dims, leaves, strict=True)
    return [dim for dim, leaf in pairs if leaf is not None]
