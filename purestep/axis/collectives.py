"""Collectives on trees, and comparisons of axes.

An axis is an object that you hold, never a global name. Four linear maps and their transposes:

    psum          y = Σᵣ xᵣ, the same on every rank           transpose: pvary
    pvary         yᵣ = x, for each rank to use as its own     transpose: psum
    all_gather    yᵣ = (x₀, x₁, ...)                          transpose: psum_scatter
    psum_scatter  yᵣ = Σₛ xₛ[r]                               transpose: all_gather

Differentiate what each rank computes alone, and sum outside: ``psum`` of the gradients of local
sums. Where a value that all ranks share (parameters, say) enters such a program, ``pvary`` marks
the place; its transpose is the sum that an outer derivative needs.
"""

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.base import Axis
from purestep.types import Tree

SUM_DTYPES = {torch.int64, *tree.FLOAT_DTYPES}
"""Leaves of these dtypes are summed as they are."""


def check_axis(axis: Axis) -> None:
    """Raises ``TypeError`` unless ``axis`` is an axis object, and says how to make one.

    Any object with the attribute ``apply`` counts as an axis, such as a module. A class does not.

    >>> check_axis("dp")
    Traceback (most recent call last):
    ...
    TypeError: axis must be an axis object, got 'dp': take ps.LocalAxis(), ps.VmapAxis(size), ...
    """
    if not hasattr(axis, "apply") or isinstance(axis, type):
        raise TypeError(
            f"axis must be an axis object, got {axis!r}: take ps.LocalAxis(), ps.VmapAxis(size), "
            'or make it of a DeviceMesh, as in ps.MeshAxis(mesh, "dp")'
        )


def shares_ranks(one: Axis, other: Axis) -> bool:
    """Returns whether two axes are equal, or have two or more ranks in common.

    Shards over one then differ along the other. Two dimensions of a mesh share only the
    rank that calls. Unknown ranks are never in common.

    >>> from purestep import VmapAxis
    >>> dp, tp = VmapAxis(2), VmapAxis(2)
    >>> shares_ranks(dp, dp), shares_ranks(dp, tp)
    (True, False)
    """
    if one == other:
        return True
    # Any two dimensions of a mesh share one rank: this one.
    shared = one.global_ranks & other.global_ranks
    return len(shared) > 1


def is_subaxis(inner: Axis, axis: Axis) -> bool:
    """Returns whether ``inner`` equals ``axis``, or is two or more ranks that all belong to it.

    They may be all of its ranks, where ``axis`` has a further dimension of size 1. An ``inner`` of
    one rank, or of unknown ranks, counts only if it equals ``axis``.

    >>> from purestep import VmapAxis
    >>> dp, tp = VmapAxis(2), VmapAxis(2)
    >>> is_subaxis(dp, dp), is_subaxis(tp, dp)
    (True, False)
    """
    if inner == axis:
        return True
    if len(inner.global_ranks) <= 1:
        return False  # They are unknown, or all axes share this one rank.
    return inner.global_ranks <= axis.global_ranks


def psum(x: Tree, axis: Axis) -> Tree:
    """Sums each leaf over all ranks, integers and bools in int64; every rank gets the same sum.

    The backward pass runs ``pvary``. In a loss, write ``pvary(psum(x, axis), axis)``: each rank
    differentiates the losses of its tokens, and ``pvary`` sums the cotangents of all ranks. Without
    it, x gets this rank's part of the gradient alone. Raises ``TypeError`` as ``check_axis`` does.

    >>> import torch
    >>> from purestep import VmapAxis
    >>> axis = VmapAxis(4)
    >>> axis.map(lambda x: psum(x, axis), in_dims=0, out_dims=None)(torch.arange(4.0))
    tensor(6.)
    """
    check_axis(axis)
    return axis.apply_tree("psum", _integers_to_int64(x))


def _integers_to_int64(x: Tree) -> Tree:
    """Casts bools and integers to int64, so that sums do not overflow; other leaves stay."""

    def cast(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point() or leaf.is_complex():
            return leaf
        return leaf.long()

    dtypes = {leaf.dtype for leaf in tree.leaves(x)}
    if dtypes <= SUM_DTYPES:
        return x
    return tree.map(cast, x)


def pmean(x: Tree, axis: Axis) -> Tree:
    """Takes the mean of each leaf over all ranks; that of integers and bools is a float.

    Each rank counts alike. For a mean over tokens, ``psum`` the sums and the counts, and divide.
    Raises ``TypeError`` as ``check_axis`` does.

    >>> import torch
    >>> from purestep import VmapAxis
    >>> axis = VmapAxis(4)
    >>> axis.map(lambda x: pmean(x, axis), in_dims=0, out_dims=None)(torch.arange(4.0))
    tensor(1.5000)
    """
    return tree.map(lambda total: total / axis.size, psum(x, axis))


def pvary(x: Tree, axis: Axis) -> Tree:
    """Returns the tree as it is, and sums its gradients over all ranks in the backward pass.

    Use it for a parameter that all ranks share and each rank uses for itself. Raises ``TypeError``
    as ``check_axis`` does.

    >>> import torch
    >>> from purestep import VmapAxis
    >>> axis = VmapAxis(4)
    >>> slope = torch.func.grad(lambda w, x: pvary(w, axis) * x)
    >>> axis.map(slope, in_dims=(None, 0), out_dims=None)(torch.tensor(1.0), torch.arange(4.0))
    tensor(6.)
    """
    check_axis(axis)
    return axis.apply_tree("pvary", x)


def all_gather(x: Tree, axis: Axis, dim: int = 0, *, tiled: bool = False) -> Tree:
    """Stacks each leaf of all ranks along a new ``dim``, in order of rank.

    ``tiled`` concatenates them along an existing ``dim`` instead. Every rank gets the same. A leaf
    needs one shape on all ranks. The backward pass runs ``psum_scatter``. Raises ``TypeError`` as
    ``check_axis`` does.

    >>> import torch
    >>> from purestep import VmapAxis
    >>> axis = VmapAxis(2)
    >>> axis.map(lambda x: all_gather(x, axis), in_dims=0, out_dims=None)(torch.eye(2))
    tensor([[1., 0.],
            [0., 1.]])
    """
    check_axis(axis)

    def gather(leaf: Tensor) -> Tensor:
        stacked = axis.apply("all_gather", leaf)
        if tiled:
            return torch.cat(stacked.unbind(), dim)
        return stacked.movedim(0, dim)

    return tree.map(gather, x)


def psum_scatter(x: Tree, axis: Axis, dim: int = 0, *, tiled: bool = False) -> Tree:
    """Sums each leaf over all ranks, and keeps this rank's slice of the sum along ``dim``.

    ``dim`` has one entry per rank, and disappears. With ``tiled`` it stays: it is cut into equal
    blocks, one per rank. A ``dim`` whose size does not fit raises ``ValueError``, and a missing one
    ``IndexError``. Integers and bools are summed in int64. The backward pass runs ``all_gather``.
    Raises ``TypeError`` as ``check_axis`` does.

    >>> import torch
    >>> from purestep import VmapAxis
    >>> axis = VmapAxis(2)
    >>> axis.map(lambda x: psum_scatter(x, axis), in_dims=0)(torch.tensor([[1, 2], [3, 4]]))
    tensor([4, 6])
    """
    check_axis(axis)

    def scatter(leaf: Tensor) -> Tensor:
        length = leaf.size(dim)
        if tiled:
            condition = "a multiple of"
            fits = length % axis.size == 0
        else:
            condition = "exactly"
            fits = length == axis.size
        if not fits:
            raise ValueError(
                f"psum_scatter over {axis} along dim={dim} needs {condition} {axis.size} entries "
                f"there, one for each rank, but the shape is {tuple(leaf.shape)}"
            )
        # ``unflatten`` puts a new dimension behind a negative one.
        rank_dim = dim % leaf.ndim
        blocks = _integers_to_int64(leaf)
        if tiled:
            block_len = length // axis.size
            blocks = blocks.unflatten(rank_dim, (axis.size, block_len))
        blocks = blocks.movedim(rank_dim, 0)
        return axis.apply("psum_scatter", blocks)

    return tree.map(scatter, x)
