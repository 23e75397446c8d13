"""What ``compile=`` does to a function: one graph of it, or a warning that says why not.

The compiler's own import takes a second, so it happens with the first function that is compiled.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias

import torch

from purestep.torch_internals import (
    gives_up,
    in_forward_mode,
    is_switched_off,
    is_watched,
    transformed,
)

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function to the same function, compiled: ``functools.partial(torch.compile, mode="max-autotune")``, say."""


_numbers = itertools.count()


def compiled(function: Callable[..., Any], compile: bool | Compiler = True) -> Callable[..., Any]:
    """The function, compiled by ``compile``; as it is where that is False.

    True is ``torch.compile`` with ``products.products``. Where that cannot make one graph of the function, a
    warning tells why, and the function runs in pieces, some of them eagerly. Under a transform it runs as it is.

    >>> double = compiled(lambda x: 2 * x)
    >>> compiled(len, False) is len
    True
    """
    if not (isinstance(compile, bool) or callable(compile)):
        raise TypeError(
            "compile must be True, False or a function such as functools.partial(torch.compile, mode=...), got "
            f"{compile!r}"
        )
    if compile is False:
        return function
    apart = _apart(function)
    made = _in_one_graph(apart, function) if compile is True else compile(apart)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # A transform asks for operations one by one; whoever compiles around it compiles this, too.
        if not torch.compiler.is_dynamo_compiling() and (transformed() or in_forward_mode()):
            return function(*args, **kwargs)
        return made(*args, **kwargs)

    return run


def _apart(function: Callable[..., Any]) -> FunctionType:
    """The same function, with a code object and a name of its own.

    The compiler keeps graphs, their number, and the sizes that vary, by code object and by name. All update steps
    of a process run the same code, so the ninth would be compiled no more, and the second with varying sizes.
    """
    if not isinstance(function, FunctionType):
        return _apart(lambda *args, **kwargs: function(*args, **kwargs))
    code = function.__code__
    apart = FunctionType(
        code.replace(co_name=f"{code.co_name}_{next(_numbers)}"),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    apart.__kwdefaults__ = function.__kwdefaults__
    return apart


def _in_one_graph(apart: FunctionType, function: Callable[..., Any]) -> Callable[..., Any]:
    from purestep.products import products

    # Both of one code object: pieces begin with the graphs that the whole has.
    whole = products(apart, fullgraph=True)
    pieces = products(apart)
    no_graph, broken = gives_up(), False

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal broken
        # Where nothing is compiled at all, there is nothing to tell.
        if broken or is_watched() or is_switched_off():
            return pieces(*args, **kwargs)
        try:
            return whole(*args, **kwargs)
        except no_graph as error:
            reason = _reason(error)
        # What the function itself raises is raised here, without a word about the compiler.
        result = pieces(*args, **kwargs)
        broken = True
        warnings.warn(
            f"compile=True: torch.compile cannot make one graph of {function.__qualname__}, so from now on it runs in "
            f"pieces, some of them eagerly. Change what stops it, or pass compile=False. {reason}",
            stacklevel=2,
        )
        return result

    return run


def _reason(error: Exception) -> str:
    """Why the compiler has given up, in its own words, and at which line."""
    given = error if error.__cause__ is None else error.__cause__
    words, *_ = str(given).split("\n  Hint:")
    stack = getattr(given, "real_stack", None)
    if not stack:
        return words
    frame = stack[-1]
    return f"{words}\n  At {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}"
