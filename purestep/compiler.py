"""What ``compile=`` does to a function: one graph of it, or a warning that says why not.

The compiler's own import takes a second, so it happens with the first function that is compiled.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from purestep.torch_private import (
    allow_hooks,
    breaks_refused,
    calls_of,
    gives_up,
    hooks_forbidden,
    in_forward_mode,
    inductor,
    is_switched_off,
    is_watched,
    options_of_mode,
    rewriting,
    transformed,
    unwatched,
)

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function to the same function, compiled: ``functools.partial(torch.compile, mode="max-autotune")``, say."""


_numbers = itertools.count()


def compile(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """``torch.compile(function, **settings)``, for what runs thousands of times: a whole update step, say.

        update_step = ps.compile(ps.make_update_step(loss_fn, optimizer, donate=True), fullgraph=True)

    Small networks want all of a step in one graph, which is compiled anew for each number of microbatches; ``compile=``
    of a step, for which True means this function, compiles what a microbatch runs, once for any number of them.

    * On CPUs of other makers than Intel, large float32 products go to oneDNN (``products.product``).
    * On any CPU, values that are costly, few and used by many, such as the powers in Adam's corrections, are computed once, not in
      every loop that uses them (``rewrites.few_once``).
    * Where there is no accelerator, what calls the kernels is compiled as well, unless ranks meet there, or embeddings have sparse
      gradients. For some operations (of linear algebra, of complex numbers) torch logs that it cannot:
      ``options={"cpp_wrapper": False}`` leaves it to Python.
    * Each function has a cache of its own: torch's belongs to the code, which all steps of a process share.
    * Before each call torch asks whether anybody has replaced a function of its own, of Python's, of optree's or of purestep's, or
      what such a function closes over; here it does not. What the loss reads, globals included, is looked at as ever.

    >>> double = compile(lambda x: 2 * x)
    """
    return _compile(_with_own_code(function), **settings)


def _compile(function: FunctionType, *, alone: bool = False, **settings: Any) -> Callable[..., Any]:
    from purestep import products, rewrites

    options: dict[str, Any] = {}
    if settings.get("backend", "inductor") == "inductor":
        options["cpp_wrapper"] = not torch.accelerator.is_available()
        options |= rewriting(rewrites.rewritten, rewrites.__file__, products.__file__)
        if "mode" in settings:
            options |= options_of_mode(settings.pop("mode"))
    options |= settings.pop("options", None) or {}
    if options.get("cpp_wrapper"):
        settings["backend"], options = inductor(options, _is_left_to_python), {}
    libraries = ("torch", "optree", "einops", __package__)
    options |= unwatched(function, libraries, alone=alone)
    return torch.compile(function, options=options, **settings)


def _is_left_to_python(graph: torch.fx.GraphModule) -> bool:
    """Whether it holds what torch cannot call from compiled code: ranks that meet, or an embedding with sparse gradients."""
    from purestep.axis import opaque

    for node in calls_of(graph):
        if node.target is opaque.apply_collective and node.args[-1] is not None:
            return True
        if "c10d" in str(node.target):
            return True
        if node.target in (functional.embedding, functional.embedding_bag):
            given = inspect.signature(node.target).bind(*node.args, **node.kwargs)
            if given.arguments.get("sparse"):
                return True
    return False


def compiled(function: Callable[..., Any], compile_: bool | Compiler = True) -> Callable[..., Any]:
    """The function as one graph, compiled by ``compile_``; as it is where that is False.

    True is ``compile``. Where there is no such graph, a warning tells why, and the function runs
    eagerly: a derivative of graphs in pieces would be left out without a word, if the function takes
    one itself. Under a transform it runs eagerly, too.

    >>> double = compiled(lambda x: 2 * x)
    >>> compiled(len, False) is len
    True
    """
    _check(compile_)
    if compile_ is False:
        return function
    graph, broken = one_graph(function, compile_, alone=False), False

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        nonlocal broken
        if torch.compiler.is_dynamo_compiling():
            return function(*args)  # A compiler around it compiles this, too.
        # A transform asks for operations one by one, and so does a dispatch mode.
        eagerly = broken or transformed() or in_forward_mode()
        if eagerly or is_watched() or is_switched_off():
            return function(*args)
        try:
            return graph(*args)
        except NoGraph as error:
            cause = error.__cause__
        # An error of the function itself is raised here, without a word about the compiler.
        result = function(*args)
        broken = True
        if cause is not None:  # None: the compiler has left the function to Python.
            warnings.warn(
                f"compile=True: torch.compile cannot make one graph of {function.__qualname__}, so "
                "from now on it runs eagerly. Change what stops it, or pass compile=False. "
                + _reason(cause),
                stacklevel=2,
            )
        return result

    return run


class NoGraph(Exception):  # noqa: N818
    """The compiler cannot make one graph of a function."""


def one_graph(
    function: Callable[..., Any], compile_: bool | Compiler, *, alone: bool = True
) -> Callable[..., Any]:
    """The function as one graph; ``NoGraph`` where there is none, before anything is computed.

    It is called where no transform is active. ``alone``: it keeps nothing for a backward pass.

    >>> from functools import partial
    >>> def branches(x):
    ...     return x + 1 if x.sum() > 0 else x
    >>> one_graph(branches, partial(torch.compile, backend="eager"))(torch.ones(2))
    Traceback (most recent call last):
    ...
    purestep.compiler.NoGraph: branches
    """
    _check(compile_)
    ours = functools.partial(_compile, alone=alone, fullgraph=True)
    compiler = ours if isinstance(compile_, bool) else compile_

    def traced(*args: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            raise NoGraph(function.__qualname__)  # The compiler has left this to Python.
        return function(*args)

    made, given_up = compiler(_with_own_code(breaks_refused(traced))), gives_up()

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        forbidden = hooks_forbidden()
        try:
            return made(*args)
        except given_up as error:
            if forbidden is None:
                allow_hooks()  # A compiler that fails inside of ``torch.func`` leaves them forbidden.
            raise NoGraph(function.__qualname__) from error

    return run


def _check(compile_: object) -> None:
    if not (isinstance(compile_, bool) or callable(compile_)):
        raise TypeError(
            "compile must be True, False or a function such as functools.partial(torch.compile, mode=...), got "
            f"{compile_!r}"
        )


def _with_own_code(function: Callable[..., Any]) -> FunctionType:
    """The same function, with a code object and a name of its own.

    The compiler keeps graphs, their number, and the sizes that vary, by code object and by name. All update steps
    of a process run the same code, so the ninth would be compiled no more, and the second with varying sizes.
    """
    if not isinstance(function, FunctionType):
        return _with_own_code(lambda *args, **kwargs: function(*args, **kwargs))
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


def _reason(error: BaseException) -> str:
    """Why the compiler has given up, in its own words, and at which line."""
    given = error if error.__cause__ is None else error.__cause__
    words, *_ = str(given).split("\n  Hint:")
    stack = getattr(given, "real_stack", None)
    if not stack:
        return words
    frame = stack[-1]
    return f"{words}\n  At {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}"
