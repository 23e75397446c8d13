"""A number for the structure of a tree and for what its leaves are, the same in every process.

What stands in no leaf belongs to the structure: the keys of a dict, and what classes of your own keep beside
their leaves (``act`` in ``Layer(w=tensor, act=torch.relu)``). It may be anything, so it is told by what it is
and never by where it lies: no addresses, no order of a set, no index of a device, and nothing that an object
without an equality of its own holds.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from purestep import pieces, tree
from purestep.form import NAMED_BY_TORCH, PLAIN, Form, flat, once
from purestep.types import Tree


def fingerprint(value: Tree) -> int:
    """The number, from 0 to 2⁶⁴ - 1. A structure is described once, and known again by its equality.

    >>> fingerprint({"w": torch.zeros(2)}) == fingerprint({"w": torch.ones(2)})
    True
    >>> fingerprint({"w": torch.zeros(2)}) == fingerprint({"w": torch.zeros(3)})
    False
    """
    return _number(flat(value).form)


@once
def _number(form: Form) -> int:
    # Pieces are as long as they are; the structure says of what.
    spread = form.spread or [None] * len(form.kinds)
    words = [
        kind[0]
        if len(kind) == 1
        else f"{kind[1]} of shape {tuple(kind[-1])}"
        if place is None
        else f"{kind[1]}"
        for kind, place in zip(form.kinds, spread, strict=True)
    ]
    digest = _sha256(f"{describe(form.structure)} {words}")
    return int.from_bytes(digest[:8], "big")


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="backslashreplace")).digest()


def describe(structure: tree.Structure) -> str:
    """``tree.describe``, in words that every process has for it.

    >>> describe(tree.flatten({"w": 1.0, "layers": [2.0, None]})[1])
    "{'layers': [*, None], 'w': *}"
    """
    axes: dict[int, str] = {}
    text: str = structure.walk(["*"] * structure.num_leaves, functools.partial(_node, axes))
    return text


def _node(axes: dict[int, str], kind: type, data: Any, children: tuple[str, ...]) -> str:
    """A node of a structure, from its children's descriptions; ``axes`` are those described already."""
    name = kind.__qualname__
    if kind is pieces.Shard:
        # One axis stands in many nodes.
        axis = axes.get(id(data.axis)) or axes.setdefault(id(data.axis), said(data.axis))
        return f"{name}[{axis}, {data.shape}, {data.dim}]({', '.join(children)})"
    if kind is types.NoneType:
        return "None"
    if kind is list:
        return f"[{', '.join(children)}]"
    if kind is tuple:
        return f"({', '.join(children)}{',' * (len(children) == 1)})"
    if kind in (dict, OrderedDict, defaultdict):
        *how, keys = data if kind is defaultdict else (data,)
        pairs = zip(map(said, keys), children, strict=True)
        items = f"{{{', '.join(f'{key}: {child}' for key, child in pairs)}}}"
        return items if kind is dict else f"{name}({', '.join([*map(said, how), items])})"
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        fields = zip(kind._fields, children, strict=True)
        return f"{name}({', '.join(f'{field}={child}' for field, child in fields)})"
    return f"{name}[{said(data)}]({', '.join(children)})"


def said(value: Any, around: tuple[int, ...] = ()) -> str:
    """Anything at all, in words that every process has for it.

    >>> said({"b", "a"}), said(torch.relu), said(functools.partial(sorted, reverse=True))
    ("set('a', 'b')", 'torch._VariableFunctionsClass.relu', "partial(builtins.sorted, (), {'reverse': True})")
    """
    kind = type(value)
    if id(value) in around:
        return f"{kind.__qualname__}(...)"
    part = functools.partial(said, around=(*around, id(value)))

    if kind in PLAIN or isinstance(value, NAMED_BY_TORCH):
        return repr(value)
    if isinstance(value, Enum):
        return f"{kind.__qualname__}.{value.name}"
    if isinstance(value, Tensor):
        return tree.kind(value)
    if isinstance(value, torch.device):
        return f"device {value.type}"  # Each rank has an index of its own.
    if isinstance(value, (set, frozenset)):
        return f"{kind.__qualname__}({', '.join(sorted(map(part, value)))})"
    if isinstance(value, Mapping):
        items = ", ".join(sorted(f"{part(key)}: {part(held)}" for key, held in value.items()))
        return f"{'' if kind is dict else kind.__qualname__}{{{items}}}"
    if isinstance(value, (tuple, list, deque)):
        items = ", ".join(map(part, value))
        return f"{'' if kind is tuple else kind.__qualname__}({items})"
    if isinstance(value, functools.partial):
        return f"partial({part(value.func)}, {part(value.args)}, {part(value.keywords)})"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, types.MethodType):
        return f"{part(value.__self__)}.{value.__name__}"
    if isinstance(value, types.FunctionType):
        return _name(value) + _code(value.__code__)
    if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType, type)):
        return _name(value)
    if isinstance(value, torch.nn.Module):
        return f"{kind.__qualname__}{part({p: type(m) for p, m in value.named_modules() if p})}"
    equality: Any = kind.__eq__
    if equality is object.__eq__:
        return _name(value) if isinstance(getattr(value, "__name__", None), str) else _name(kind)
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.compare]
        return f"{_name(kind)}{part({name: getattr(value, name, None) for name in fields})}"
    return f"{_name(kind)} {_words(value)}"


def _name(value: Any) -> str:
    """Where it was defined. The program itself has a different name in processes that it spawns."""
    module = getattr(value, "__module__", None) or getattr(
        type(getattr(value, "__self__", None)), "__module__", ""
    )
    name = getattr(value, "__qualname__", None) or value.__name__
    return f"{module}.{name}".removeprefix("__mp_main__.").removeprefix("__main__.")


def _code(code: types.CodeType) -> str:
    """What a function does, for functions of one name. What it closes over is not compared."""
    constants = [
        _code(constant) if isinstance(constant, types.CodeType) else said(constant)
        for constant in code.co_consts
    ]
    return f"#{_sha256(f'{code.co_code.hex()} {code.co_names} {constants}').hex()[:8]}"


def _words(value: Any) -> str:
    """What it says of itself: without addresses, and in order, since it may list a set."""
    try:
        text = without_addresses(repr(value))
    except Exception:
        return ""
    return " ".join(sorted(re.findall(r"[\w.+-]+", text)))


def without_addresses(text: str) -> str:
    """The text of a ``repr``, without where in memory things lie."""
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", text)
