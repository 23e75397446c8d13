"""Where the tokens are spread: axes, and the sums over them.

An axis is an object that you hold, never a global name. Four linear laws and their transposes:

    psum          y = Σᵣ xᵣ, the same on every rank           transpose: pvary
    pvary         yᵣ = x, for each rank to use as its own     transpose: psum
    all_gather    yᵣ = (x₀, x₁, ...)                          transpose: psum_scatter
    psum_scatter  yᵣ = Σₛ xₛ[r]                               transpose: all_gather

Differentiate what each rank computes alone, and sum outside: ``psum`` of the gradients of local sums.
Where a value that all ranks share (parameters, say) enters such a program, ``pvary`` marks the place;
its transpose is the sum that an outer derivative needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import optree
import torch
from einops import rearrange
from torch import Tensor
from torch.autograd import Function

from purestep import tree
from purestep.types import Tree

InDims: TypeAlias = Any
OutDims: TypeAlias = Any


class Axis(Protocol):
    """The dimension, or dimensions, that split a batch's tokens."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def index(self) -> Tensor:
        """Which of them this is, as a scalar tensor."""

    def apply(self, law: str, x: Tensor) -> Tensor:
        """One of the four laws, of one tensor."""


def psum(x: Tree, axis: Axis) -> Tree:
    """The sum over all ranks of every leaf: the same on each rank.

    >>> axis = VmapAxis(4)
    >>> axis.map(lambda x: psum(x, axis), in_dims=0, out_dims=None)(torch.arange(4.0))
    tensor(6.)
    """
    return tree.map(lambda leaf: axis.apply("psum", _summable(leaf)), x)


def pmean(x: Tree, axis: Axis) -> Tree:
    """The mean over all ranks of every leaf. Means of means are not means: for tokens, ``psum`` and divide.

    >>> axis = VmapAxis(4)
    >>> axis.map(lambda x: pmean(x, axis), in_dims=0, out_dims=None)(torch.arange(4.0))
    tensor(1.5000)
    """
    return tree.map(lambda total: total / axis.size, psum(x, axis))


def _summable(x: Tensor) -> Tensor:
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.int64)


def pvary(x: Tree, axis: Axis) -> Tree:
    """Every leaf as it is, marked as used by each rank for itself: derivatives through it are summed.

    >>> axis = VmapAxis(4)
    >>> slope = torch.func.grad(lambda w, x: pvary(w, axis) * x)
    >>> axis.map(slope, in_dims=(None, 0), out_dims=None)(torch.tensor(1.0), torch.arange(4.0))
    tensor(6.)
    """
    return tree.map(lambda leaf: axis.apply("pvary", leaf), x)


def all_gather(x: Tree, axis: Axis, dim: int = 0, *, tiled: bool = False) -> Tree:
    """All ranks' leaves, in order of rank, stacked along a new ``dim``; ``tiled`` joins them along it.

    >>> axis = VmapAxis(2)
    >>> axis.map(lambda x: all_gather(x, axis), in_dims=0, out_dims=None)(torch.eye(2))
    tensor([[1., 0.],
            [0., 1.]])
    """

    def gather(leaf: Tensor) -> Tensor:
        stacked = axis.apply("all_gather", leaf)
        if not tiled:
            return stacked.movedim(0, dim)
        return rearrange(
            stacked.movedim(dim + 1 if dim >= 0 else dim, 1), "r d ... -> (r d) ..."
        ).movedim(0, dim)

    return tree.map(gather, x)


def psum_scatter(x: Tree, axis: Axis, dim: int = 0, *, tiled: bool = False) -> Tree:
    """The sum over all ranks of every leaf, of which rank r keeps the r-th slice along ``dim``.

    ``dim`` has one entry per rank and disappears; ``tiled`` cuts it into equal blocks instead.

    >>> axis = VmapAxis(2)
    >>> axis.map(lambda x: psum_scatter(x, axis), in_dims=0)(torch.tensor([[1, 2], [3, 4]]))
    tensor([4, 6])
    """

    def scatter(leaf: Tensor) -> Tensor:
        length = leaf.shape[dim]
        if (length % axis.size != 0) if tiled else (length != axis.size):
            wanted = "a multiple of" if tiled else "exactly"
            raise ValueError(
                f"psum_scatter over {axis} along dim={dim} needs {wanted} {axis.size} entries there, "
                f"one for each rank, but the shape is {tuple(leaf.shape)}"
            )
        blocks = _summable(leaf).movedim(dim, 0)
        if not tiled:
            return axis.apply("psum_scatter", blocks)
        blocks = rearrange(blocks, "(r d) ... -> r d ...", r=axis.size)
        return axis.apply("psum_scatter", blocks).movedim(0, dim)

    return tree.map(scatter, x)


class LocalAxis:
    """One rank: all tokens are here.

    >>> psum(torch.tensor(3), LocalAxis())
    tensor(3)
    """

    size = 1

    @property
    def index(self) -> Tensor:
        """Always 0."""
        return torch.zeros((), dtype=torch.int64)

    def apply(self, law: str, x: Tensor) -> Tensor:
        """The law over a single rank."""
        return _LAWS[law].alone(x)

    def __repr__(self) -> str:
        return "LocalAxis()"


class VmapAxis:
    """``size`` ranks in one process, one ``torch.vmap`` dimension: the same program on each.

    >>> axis = VmapAxis(2)
    >>> axis.map(lambda x: x / psum(x, axis))(torch.tensor([1.0, 3.0]))
    tensor([0.2500, 0.7500])

    It nests, in other axes and in ensembles (``torch.vmap`` around or inside), under ``grad``, ``jvp`` and
    ``torch.compile``. Ranks run one and the same program: a rank with less data has microbatches whose
    weights are zero.
    """

    def __init__(self, size: int) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"VmapAxis(size={size!r}): an axis has a whole number of ranks, at least one"
            )
        self.size = size
        self._bound = threading.local()

    def map(
        self,
        fn: Callable[..., Any],
        in_dims: InDims = 0,
        out_dims: OutDims = 0,
        *,
        randomness: Literal["error", "same", "different"] = "error",
    ) -> Callable[..., Any]:
        """``fn`` run by every rank.

        ``in_dims`` and ``out_dims`` are as in ``torch.vmap``, for trees: an integer says which dimension of
        the leaves runs over ranks, None that every rank has the same. An output of ``out_dims=None`` must
        really be the same, which is checked: it comes from ``psum`` or from shared inputs. ``randomness`` is
        that of ``torch.vmap`` as well, for functions that draw from the global generator.
        """

        def mapped(*args: Any) -> Any:
            leaves, structure = tree.flatten(args)
            dims = _spread(in_dims, args, "in_dims")
            outputs: tuple[tree.Structure, list[int | None]] | None = None

            def rank(token: Tensor, *leaves: Any) -> list[Tensor]:
                nonlocal outputs
                outer = getattr(self._bound, "token", None)
                self._bound.token = token
                try:
                    output = fn(*tree.unflatten(structure, leaves))
                    output_leaves, output_structure = tree.flatten(output)
                    output_dims = _spread(out_dims, output, "out_dims")
                    outputs = output_structure, output_dims
                    return [
                        leaf if dim is not None else self.apply("invariant", leaf)
                        for leaf, dim in zip(output_leaves, output_dims, strict=True)
                    ]
                finally:
                    self._bound.token = outer

            ranks = torch.arange(self.size)
            results = torch.vmap(rank, (0, *dims), 0, randomness=randomness)(ranks, *leaves)
            assert outputs is not None
            output_structure, output_dims = outputs
            return tree.unflatten(
                output_structure,
                [
                    result[0] if dim is None else result.movedim(0, dim)
                    for result, dim in zip(results, output_dims, strict=True)
                ],
            )

        return mapped

    @property
    def index(self) -> Tensor:
        """This rank's number, 0 to size - 1: a different one on every rank of ``map``."""
        token: Tensor | None = getattr(self._bound, "token", None)
        if token is None:
            raise RuntimeError(
                f"{self} has ranks only while it maps: run the function that uses it through "
                "axis.map(fn, in_dims, out_dims)"
            )
        return token

    def apply(self, law: str, x: Tensor) -> Tensor:
        """The law over the vmap dimension of ``map``."""
        return _collective(x, self.index, law)

    def __repr__(self) -> str:
        return f"VmapAxis({self.size})"


def _spread(dims: Any, args: Tree, name: str) -> list[int | None]:
    """The dimension of every leaf of ``args``, from a tree of dimensions that may end above the leaves."""
    structure = optree.tree_structure(dims, none_is_leaf=True, namespace=tree.NAMESPACE)
    try:
        subtrees = structure.flatten_up_to(args)
    except ValueError:
        found = tree.describe(tree.flatten(args)[1])
        raise ValueError(
            f"{name}={dims} does not fit the structure it describes: {found}"
        ) from None
    leaf_dims = optree.tree_leaves(dims, none_is_leaf=True, namespace=tree.NAMESPACE)
    return [
        dim
        for dim, subtree in zip(leaf_dims, subtrees, strict=True)
        for _ in tree.leaves_of(subtree)
    ]


class _Law(NamedTuple):
    """One collective, as it is over a single rank and over a dimension that holds all of them.

    ``across(x, dim, size)`` returns the result and its dimension over ranks. ``dim`` is None where x is
    the same on every rank, and None is returned where the result is.
    """

    transpose: str
    alone: Callable[[Tensor], Tensor]
    across: Callable[[Tensor, int | None, int], tuple[Tensor, int | None]]


def _invariant_across(x: Tensor, dim: int | None, size: int) -> tuple[Tensor, None]:
    if dim is not None:
        raise ValueError(
            f"an output of out_dims=None is not the same on all {size} ranks: psum it, or give it a "
            "dimension in out_dims"
        )
    return x, None


_LAWS = {
    "psum": _Law(
        transpose="pvary",
        alone=lambda x: x,
        across=lambda x, dim, size: (x * size if dim is None else x.sum(dim), None),
    ),
    "pvary": _Law(
        transpose="psum",
        alone=lambda x: x,
        across=lambda x, dim, size: (x.view_as(x), dim),
    ),
    "all_gather": _Law(
        transpose="psum_scatter",
        alone=lambda x: x.unsqueeze(0),
        across=lambda x, dim, size: (
            x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0),
            None,
        ),
    ),
    "psum_scatter": _Law(
        transpose="all_gather",
        alone=lambda x: x.squeeze(0),
        across=lambda x, dim, size: (x * size if dim is None else x.sum(dim), 0),
    ),
    "invariant": _Law(transpose="invariant", alone=lambda x: x, across=_invariant_across),
}


class _Collective(Function):
    """A law on one tensor, with its transpose, its tangent and its batching.

    ``token`` is batched by the axis's own vmap and by no other. Any other vmap that comes by is an
    ensemble, whose dimension is carried along behind the law's own.
    """

    @staticmethod
    def forward(x: Tensor, token: Tensor, law: str) -> Tensor:
        raise RuntimeError(f"{law} over an axis that is not being mapped: call it inside axis.map")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, token, ctx.law = inputs
        ctx.save_for_backward(token)
        ctx.save_for_forward(token)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (token,) = ctx.saved_tensors
        return _collective(cotangent, token, _LAWS[ctx.law].transpose), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        (token,) = ctx.saved_tensors
        return _collective(tangent, token, ctx.law)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, token: Tensor, law: str) -> Any:
        dim, token_dim, _ = in_dims
        if token_dim is not None:
            return _LAWS[law].across(x, dim, info.batch_size)
        result = _collective(x.movedim(dim, -1), token, law)
        return result, result.ndim - 1


def apply_collective(x: Tensor, token: Tensor, law: str) -> Tensor:
    """The law on one tensor, as autograd and functorch see it."""
    apply: Callable[[Tensor, Tensor, str], Tensor] = _Collective.apply
    return apply(x, token, law)


def _collective(x: Tensor, token: Tensor, law: str) -> Tensor:
    if torch.compiler.is_compiling():
        # Marks ``apply_collective`` for the compiler on import, which only a compiler needs to pay for.
        from purestep import opaque

        return opaque.apply_collective(x, token, law)
    return apply_collective(x, token, law)
