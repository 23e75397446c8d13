"""What a tree is, all of it that its values leave open, and what follows from that alone: worked out once."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from purestep import pieces, tree
from purestep.torch_internals import foreach_clone
from purestep.types import Tree

MOST = 64
"""Forms that are remembered, and results for each function of them. A step meets two or three."""

Kind: TypeAlias = tuple[Any, ...]
"""A tensor's class, dtype, device, whether it requires grad, layout and shape; of other leaves what ``tree.kind`` says."""


@dataclass(frozen=True, eq=False)
class Form:
    """A tree but for its values, to know it again. Never build a tree of its structure: see ``Flat``.

    Equal forms are one and the same object, so that what follows from one is found by it. A form whose structure might hold
    tensors is not kept, and has no hash. ``plain`` says that all leaves are tensors of no class that makes its own attributes,
    ``spread`` how each leaf is spread over an axis: empty where none is.
    """

    structure: tree.Structure
    kinds: tuple[Kind, ...]
    plain: bool
    requires_grad: bool
    dtypes: tuple[torch.dtype, ...]
    devices: frozenset[torch.device]
    spread: pieces.Spread


class _Passing(Form):
    """One that is not kept: nothing that follows from it is remembered, either."""

    __hash__ = None  # type: ignore[assignment]


class Flat(NamedTuple):
    """A tree, flattened.

    The structure is its own: that of its form may be of an earlier tree, which was equal, but had its keys in a different order.
    """

    leaves: list[Any]
    structure: tree.Structure
    form: Form

    def tree(self, leaves: Sequence[Any] | None = None) -> Tree:
        """The tree again, of these leaves (None: of its own)."""
        return tree.unflatten(self.structure, self.leaves if leaves is None else leaves)


def flat(whole: Tree) -> Flat:
    """The leaves and the form of a tree.

    >>> flat({"w": 1, "b": 2}).leaves
    [2, 1]
    >>> flat({"w": torch.ones(2)}).form is flat({"w": torch.zeros(2)}).form
    True
    """
    leaves, structure = tree.flatten(whole)
    return Flat(leaves, structure, _form_of(leaves, structure))


def without_shards(given: Flat, but: Collection[Any] = ()) -> Flat:
    """The same tree with what it holds in the place of each ``Shard``, but for those over these axes.

    >>> from purestep import LocalAxis
    >>> without_shards(flat({"w": pieces.Shard(torch.ones(2), LocalAxis(), (2,))})).tree()
    {'w': tensor([1., 1.])}
    """
    leaves, _, form = given
    if not form.spread:
        return given

    def is_leaf(node: Any) -> bool:
        return pieces.is_shard(node) and node.axis not in but

    nodes, structure = tree.flatten(given.tree(), is_leaf=is_leaf)
    bare = [node.piece if is_leaf(node) else node for node in nodes]
    structure = tree.flatten(tree.unflatten(structure, bare))[1]
    own = [pieces.own(leaf, place) for leaf, place in zip(leaves, form.spread, strict=True)]
    return Flat(own, structure, form)


def copied(given: Flat) -> Flat:
    """The same values in memory of its own, on the host copied by one kernel.

    >>> one = flat({"w": torch.ones(2)})
    >>> copied(one).leaves[0].add_(1), one.leaves
    (tensor([2., 2.]), [tensor([1., 1.])])
    """
    leaves, _, form = given
    if form.plain and leaves and {device.type for device in form.devices} == {"cpu"}:
        return given._replace(leaves=[*foreach_clone(leaves)])
    return given._replace(leaves=[leaf.clone() for leaf in leaves])


def _form_of(leaves: Sequence[Any], structure: tree.Structure) -> Form:
    if torch.compiler.is_dynamo_compiling():
        return _made(structure, tuple([_kind(leaf) for leaf in leaves]))
    try:
        kinds = tuple(map(_kind_of_tensor, leaves))
    except (AttributeError, RuntimeError):  # no tensor, or one without a shape
        kinds = tuple(map(_kind, leaves))
    try:
        return _remembered(structure, kinds)
    except Exception:
        # What stands in the structure need not be hashable, nor comparable with others, nor ours to keep alive.
        return _made(structure, kinds)


_kind_of_tensor = attrgetter("__class__", "dtype", "device", "requires_grad", "layout", "shape")


def _kind(leaf: Any) -> Kind:
    if not isinstance(leaf, Tensor):
        return (tree.kind(leaf),)
    shape = () if leaf.is_nested else leaf.shape
    return type(leaf), leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout, shape


def _made(structure: tree.Structure, kinds: tuple[Kind, ...], make: type[Form] = _Passing) -> Form:
    tensors: Any = [kind for kind in kinds if len(kind) > 1]
    classes, dtypes, devices, flags = [*zip(*tensors, strict=True)][:4] or [()] * 4
    return make(
        structure,
        kinds,
        plain=len(tensors) == len(kinds) and {*classes} <= {Tensor, torch.nn.Parameter},
        requires_grad=True in flags,
        dtypes=dtypes,
        devices=frozenset(devices),
        spread=pieces.spread(structure),
    )


@functools.lru_cache(MOST)
def _remembered(structure: tree.Structure, kinds: tuple[Kind, ...]) -> Form:
    def refuse(kind: type, data: Any, children: tuple[str, ...]) -> str:
        if not _holds_no_tensor(data):
            raise TypeError(f"{kind.__name__} may hold tensors, and would keep them alive here")
        return "*"

    structure.walk(["*"] * structure.num_leaves, refuse)
    return _made(structure, kinds, Form)


PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)
NAMED_BY_TORCH = (torch.dtype, torch.layout, torch.memory_format)


def _holds_no_tensor(value: Any) -> bool:
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_holds_no_tensor, value))
    if isinstance(value, types.FunctionType):
        held = value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__
        return not held
    if isinstance(value, types.BuiltinFunctionType):
        value = value.__self__
    # Classes of your own that are derived from these may hold anything.
    return type(value) in PLAIN or isinstance(
        value, (*NAMED_BY_TORCH, type, types.ModuleType, Enum)
    )


Function = TypeVar("Function", bound=Callable[..., Any])


def once(function: Function) -> Function:
    """A function of forms and settings alone, whose results are remembered."""
    remembered = functools.lru_cache(MOST)(function)

    @functools.wraps(function)
    def look(*given: Any) -> Any:
        # A compiler would warn that it looks through the memory, which it has no use for.
        if torch.compiler.is_dynamo_compiling():
            return function(*given)
        try:
            return remembered(*given)
        except TypeError:  # A form has no hash; or the function raises it, as it will again.
            return function(*given)

    return cast("Function", look)


@once
def forms_within(form: Form) -> tuple[Form, ...]:
    """The forms of the children of its container."""
    make, start, forms = _remembered if isinstance(form, Hashable) else _made, 0, []
    for child in form.structure.children():
        stop = start + child.num_leaves
        forms.append(make(child, form.kinds[start:stop]))
        start = stop
    return tuple(forms)
