"""Whether all ranks gather the same leaves, in the same order.

A collective meets whatever the other ranks call at that time. So ranks compare what they are about
to gather: outside of a step in each call; in the losses of a step, before each collective of the
first update with params of one structure. Of later updates they compare the order at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from purestep import tree
from purestep.axis import agreement
from purestep.axis.protocol import Axis
from purestep.tree.shard import Place, Shard, is_shard
from purestep.types import Params

WHAT = "what they gather next, or scatter (add 0 * w.sum() where a loss may not depend on w)"


def agree(axis: Axis, *lines: str) -> None:
    """Raises on all ranks where these lines are not the same on each.

    >>> from purestep.testing import ThreadAxis
    >>> axis = ThreadAxis(2)
    >>> axis.map(lambda name: agree(axis, name))(["v", "w"])
    Traceback (most recent call last):
    ...
    ValueError: the ranks of ThreadAxis(2) disagree on what they gather next, or scatter (add ...
    """
    ranks: Any = axis
    described = agreement.Described(agreement.digest(*lines), (*lines, ""), ())
    sent = axis.apply("psum", agreement.message(ranks, True, described.number))
    agreement.hear(ranks, sent.tolist(), axis.size, {WHAT: described}, ask=True)


class Order:
    """What a rank's losses have gathered and scattered in one update, leaf by leaf."""

    def __init__(self, axis: Axis, *, compare: bool) -> None:
        self._axis, self._compare = axis, compare
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        """Takes the next one, before it begins."""
        self._lines.append(f"{len(self._lines) + 1}. {line}")
        if self._compare:
            agree(self._axis, self._lines[-1])

    def end(self) -> list[str]:
        """All of them, where no rank has more to come."""
        if self._compare:
            agree(self._axis, "the end of its losses")
        return self._lines


class Noted:
    """The axis of one leaf among the params of a loss: it says which leaf is gathered."""

    def __init__(self, axis: Axis, leaf: str, order: Order) -> None:
        self._noted, self.leaf, self.order = axis, leaf, order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._noted, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._noted == (other._noted if isinstance(other, Noted) else other))

    def __hash__(self) -> int:
        return hash(self._noted)

    def __repr__(self) -> str:
        return repr(self._noted)


def noted(params: Params, axis: Axis, *, compare: bool) -> tuple[Params, Order]:
    """Params whose sharded leaves tell the order in which a loss gathers them."""
    order, lines = Order(axis, compare=compare), agreement.described("params", params).lines

    def named(node: Any, line: str) -> Any:
        if not is_shard(node):
            return node
        known: Any = Noted(node.axis, line.split(": ")[0], order)
        return Shard(node.piece, known, node.shape, node.dim)

    nodes, structure = tree.flatten(params, is_leaf=is_shard)
    return tree.unflatten(structure, [*map(named, nodes, lines)]), order


def note(law: str, places: Sequence[Place]) -> None:
    """Tells that these leaves are about to be gathered or scattered."""
    leaves = [place.axis for place in places if isinstance(place.axis, Noted)]
    if leaves:
        leaves[0].order.add(f"{law} of {', '.join(each.leaf for each in leaves)}")
