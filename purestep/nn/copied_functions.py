"""Copies of a module's functions that find layers through a closure or through defaults.

    module.act = lambda x: layer(x)

A copy has the code of the original, and other cells, which refer weakly to the copies of the
layers. Else a module that holds such a function would be part of a cycle, and its params would wait
for Python's garbage collector.
"""

from __future__ import annotations

from inspect import Signature, signature
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from purestep.nn.traced_objects import bind_method
from purestep.torch_private import checkpoint_frame


def contents_of(cell: CellType) -> tuple[Any, ...]:
    """Returns a cell's content in a tuple, or an empty tuple.

    It is empty unless the content is a module, a tensor or a function. A method of one of these, or
    a weak reference to one, is a content, too.
    """
    content = _read_cell(cell)
    owner = content
    if isinstance(content, MethodType):
        owner = content.__self__
    elif isinstance(content, ref):
        owner = content()
    # Not any object: a trainer, say, leads to all that the program has.
    return (content,) if isinstance(owner, Module | Tensor | FunctionType) else ()


def _read_cell(cell: CellType) -> Any:
    """Returns a cell's content; None if its variable is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def parts_of_function(function: FunctionType) -> list[Any]:
    """Lists a function's keyword-only defaults, then the tuple of other defaults, then its cells.

    Each keyword-only default and each cell is one entry. The tuple is one entry, even if it is
    empty.
    """
    defaults = function.__defaults__ or ()
    keyword_defaults = function.__kwdefaults__ or {}
    cells = function.__closure__ or ()
    return [*keyword_defaults.values(), defaults, *cells]


class FunctionTemplate(NamedTuple):
    """Describes a function without its defaults and closure, which may lead to a module."""

    code: Any
    namespace: dict[str, Any]
    name: str
    qualified_name: str
    keyword_names: tuple[str, ...]
    signature: Signature

    @staticmethod
    def of(function: FunctionType) -> FunctionTemplate:
        """Makes a template of a function's code, global names, names and signature.

        In the signature, ``...`` stands for a default that is a module, tensor or function.
        """
        full = signature(function)
        parameters = []
        for parameter in full.parameters.values():
            if isinstance(
                parameter.default, Module | Tensor | FunctionType | MethodType
            ):
                parameter = parameter.replace(default=...)
            parameters.append(parameter)
        return FunctionTemplate(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__qualname__,
            tuple(function.__kwdefaults__ or ()),
            full.replace(parameters=parameters),
        )


class CopiedFunction:
    """Calls the code of a function with other defaults and cells.

    ``parts`` are these, in the order of ``parts_of_function``. The cells refer to modules weakly.
    If a checkpoint calls the function, it keeps the modules until it calls it again, in the
    backward pass.
    """

    def __init__(
        self,
        template: FunctionTemplate,
        *parts: Any,
    ) -> None:
        names = template.keyword_names
        self._template = template
        self._keyword_defaults = dict(zip(names, parts, strict=False))
        self._defaults, *self._cells = parts[len(names) :]
        self.__name__ = template.name
        self.__qualname__ = template.qualified_name
        self.__signature__ = template.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        template = self._template
        cells = tuple(_hold_strongly(cell) for cell in self._cells)
        if not torch.compiler.is_dynamo_compiling():
            _keep_for_recomputation(cells)
        function = FunctionType(
            template.code, template.namespace, template.name, self._defaults, cells
        )
        function.__kwdefaults__ = self._keyword_defaults
        if any(_is_dropped(cell) for cell in self._cells):
            return _call_without_layers(function, args, kwargs)
        return function(*args, **kwargs)


def _keep_for_recomputation(cells: tuple[CellType, ...]) -> None:
    """Keeps cells alive until the graph of the innermost checkpoint is freed.

    Does nothing unless a checkpoint is in its first run. A checkpoint calls its function again in
    the backward pass, after ``apply`` has returned. Then nothing else keeps the copied layers.
    """
    frame = checkpoint_frame()
    if frame is not None:
        vars(frame).setdefault("_cells_of_purestep", []).append(cells)


def _call_without_layers(function: FunctionType, args: Any, kwargs: Any) -> Any:
    """Calls a function whose closure has lost a layer, so that a cell of it is empty.

    Raises ``ReferenceError`` for a ``NameError`` that names a free variable of the function, as
    one for such a cell does. Other errors pass, and so does what a generator raises later.
    """
    try:
        return function(*args, **kwargs)
    except NameError as error:
        if error.name not in function.__code__.co_freevars:
            raise
        raise ReferenceError(
            "a function of a module is called after apply has returned, as by a hook of a tensor, "
            "and finds a layer through its closure. Give it what it needs as arguments, or as "
            "tensors in its closure"
        ) from error


class _Weak(NamedTuple):
    """Holds a module, or its method by this function, and does not keep the module alive.

    It is no plain weak reference, since a function may hold one of those itself.
    """

    module: ref[Module]
    function: Any = None


def hold_weakly(content: Any) -> Any:
    """Returns a module or its bound method as ``_Weak``, and any other content as it is."""
    if isinstance(content, Module):
        return _Weak(ref(content))
    if isinstance(content, MethodType) and isinstance(content.__self__, Module):
        return _Weak(ref(content.__self__), content.__func__)
    return content


def _hold_strongly(cell: CellType) -> CellType:
    """Returns a new cell of the module or method that a cell holds weakly; else the cell itself.

    The new cell is empty if the module has been dropped, as after a call of ``apply``.
    """
    content = _read_cell(cell)
    if not isinstance(content, _Weak):
        return cell
    module = content.module()
    if module is None:
        return CellType()
    if content.function is None:
        return CellType(module)
    return CellType(bind_method(content.function, module))


def _is_dropped(cell: CellType) -> bool:
    """Returns whether a cell holds weakly what has been dropped."""
    content = _read_cell(cell)
    return isinstance(content, _Weak) and content.module() is None
