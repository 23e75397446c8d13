"""The dicts in which a module would keep hooks: where it has none, its copies share them.

A layer has eleven such dicts. To copy them at each call takes three times as long as to copy all
else, most of it in Python's garbage collector.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from torch.nn import Module
from torch.utils.hooks import RemovableHandle


class NoHooks(OrderedDict[int, Any]):
    """Holds no hooks, and raises ``ValueError`` where one is registered."""

    def __setitem__(self, key: int, hook: Any) -> None:
        raise ValueError(
            "a call of apply registers a hook on a module, as its first call did not: register it "
            "before from_module, or make another apply for such calls"
        )

    def __reduce__(self) -> Any:
        # Of copies and pickles of ``apply``, too, whose calls share it in turn.
        return NoHooks, ()


def find_empty_dicts(module: Module) -> Iterator[OrderedDict[int, Any]]:
    """Yields the empty dicts of torch's own hooks, of all parts of a module.

    >>> len([*find_empty_dicts(Module())])
    11
    """
    # Those of torch's own: a module may have other dicts, which its calls fill.
    plain = vars(Module())
    names = [name for name, value in plain.items() if type(value) is OrderedDict]
    for part in module.modules():
        for name in names:
            value = vars(part).get(name)
            if type(value) is OrderedDict and not value:
                yield value


def give_dicts(attributes_of_parts: Iterable[dict[str, Any]]) -> None:
    """Replaces, in place, each ``NoHooks`` in these dicts of attributes by an ``OrderedDict``."""
    for attributes in attributes_of_parts:
        for name, value in attributes.items():
            if type(value) is NoHooks:
                attributes[name] = OrderedDict()


def count_registered() -> int:
    """Returns how many handles of hooks this process has made so far, removed ones included.

    It counts each ``RemovableHandle``: of hooks of modules, tensors, optimizers and nodes of
    autograd. A hook may have several.
    """
    number: int = RemovableHandle.next_id
    return number
