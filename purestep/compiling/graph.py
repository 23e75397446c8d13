"""What ``compile=`` does to a function: one graph of it, or a warning that says why not.

The compiler's own import takes a second, so it happens with the first function that is compiled.
"""

import functools
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from purestep.torch_private import forward_level, transformed

Compiler: TypeAlias = Callable[..., Callable[..., Any]]
"""``torch.compile`` or what is called like it: ``partial(torch.compile, mode="max-autotune")``."""

_NAMES = "(torch|optree|einops|purestep)"
LIBRARIES = re.compile(
    rf"G\['(__builtins_dict__|__import_{_NAMES}(_dot_|'))|__import__\('{_NAMES}'\)|^G\['(?!__)"
    r"|^G\['___unnamed_scope_\w+'\]\['_tuple_new'\]|^G\['_\d+_c\d+'\]\.Tensor$"
)
"""Names by which the compiler refers to globals of libraries, NamedTuples and ``torch.Tensor``.

Names without underscores are those of this module, where each compiled function begins.
"""

_NO_HOOKS = (
    "compile=True takes no saved_tensors_hooks around a step, such as save_on_cpu: "
    "leave them out, or pass compile=False"
)

_numbers = itertools.count()


def compile(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Compiles a whole update step, or any function that runs often: ``torch.compile`` with other
    options.

        step = ps.make_update_step(loss_fn, optimizer, donate=True)
        step = ps.compile(step, fullgraph=True)

    A small network runs fastest if the whole step is one graph. Each number of microbatches makes a
    graph. For large networks use ``make_update_step(compile=True)``, which compiles one microbatch
    once, for any number of them.

    * Each function has its own cache, and sizes may vary. torch shares one cache among all steps.
    * torch checks guards before each call. Guards on globals of torch, optree, einops, purestep and
      Python are left out. Guards on what the loss reads stay, its globals included.
    * Without an accelerator and process groups, ``cpp_wrapper`` also compiles what calls the
      kernels. Embeddings with sparse gradients need ``options={"cpp_wrapper": False}``.
    * Graphs for CPUs are rewritten (``purestep.compiling.cpu``).

    Your ``options=`` override these. ``mode=`` replaces them, since torch takes only one of the
    two.

    >>> double = compile(lambda x: 2 * x)
    """
    options: dict[str, Any] = {"guard_filter_fn": drop_library_guards}
    if settings.get("backend", "inductor") == "inductor":
        from purestep.compiling import cpu

        options |= cpu.options()
    if settings.get("mode") is None:
        settings["options"] = options | (settings.get("options") or {})
    return torch.compile(with_own_cache(function), **settings)


def drop_library_guards(guards: Sequence[Any]) -> list[bool]:
    """Which guards stay: all but those on globals of libraries (a ``guard_filter_fn``)."""
    return [not LIBRARIES.search(guard.name) for guard in guards]


def drop_guards(guards: Sequence[Any]) -> list[bool]:
    """The same, less those on transforms and on hooks: of each, ``one_graph`` runs in none."""
    kinds = ("FUNCTORCH_STACK_MATCH", "AUTOGRAD_SAVED_TENSORS_HOOKS")
    kept = zip(drop_library_guards(guards), guards, strict=True)
    return [keep and guard.guard_type not in kinds for keep, guard in kept]


def compile_or_call(
    function: Callable[..., Any], compile_: bool | Compiler = True
) -> Callable[..., Any]:
    """The function as one graph, compiled by ``compile_``; as it is where that is False.

    True is ``compile``. Where there is no such graph, a warning says why, and the function runs
    eagerly: graphs in pieces would lose derivatives that the function takes. It runs eagerly under
    transforms and dispatch modes, too, which ask for operations one by one.

    >>> double = compile_or_call(lambda x: 2 * x)
    >>> compile_or_call(len, False) is len
    True
    """
    if compile_ is False:
        return function
    return with_fallback(one_graph(function, compile_), function)


def with_fallback(
    graph: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """``graph``, and ``plain`` from the call on at which ``NoGraph`` says that there is none."""
    broken = False

    def run(*args: Any) -> Any:
        nonlocal broken
        if torch.compiler.is_dynamo_compiling():
            return plain(*args)  # A compiler around it compiles this, too.
        if broken or transformed() or forward_level() >= 0:
            return plain(*args)
        try:
            return graph(*args)
        except NoGraph as error:
            refused = error
        # An error of the loss itself is raised here, without a word about the compiler.
        result = plain(*args)
        if refused.__cause__ is not None:  # None: the compiler is switched off.
            broken = True
            warnings.warn(
                f"compile=True: torch.compile cannot make one graph of {refused}, so from now on "
                "it runs eagerly. Change what stops it, or pass compile=False. "
                + _reason(refused.__cause__),
                stacklevel=2,
            )
        return result

    return run


class NoGraph(Exception):  # noqa: N818
    """The compiler cannot make one graph of a function."""


def one_graph(
    function: Callable[..., Any], compile_: bool | Compiler
) -> Callable[..., Any]:
    """The function as one graph; ``NoGraph`` where there is none, before anything is computed.

    It is called where no transform is active.

    >>> from functools import partial
    >>> def branches(x):
    ...     return x + 1 if x.sum() > 0 else x
    >>> one_graph(branches, partial(torch.compile, backend="eager"))(torch.ones(2))
    Traceback (most recent call last):
    ...
    purestep.compiling.graph.NoGraph: branches
    """
    _check(compile_)

    def traced(*args: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            raise NoGraph(_name(function))  # The compiler has left this to Python.
        return function(*args)

    if isinstance(compile_, bool):
        made = compile(traced, fullgraph=True, options={"guard_filter_fn": drop_guards})
    else:
        made = compile_(with_own_cache(traced), fullgraph=True)

    def run(*args: Any) -> Any:
        # A compiler that fails inside of torch.func leaves hooks disabled; this restores them.
        try:
            with disable_saved_tensors_hooks(_NO_HOOKS):
                return made(*args)
        except Exception as error:
            if not _is_the_compilers(error):
                raise
            raise NoGraph(_name(function)) from error

    return run


class flat_linear(TorchFunctionMode):  # noqa: N801
    """A context for traces, in which ``F.linear`` with a bias takes its input as rows.

    Under ``torch.func.vjp`` the compiler fixes the sizes of an input of three and more dimensions:
    there would be a graph for every number of rows, and for every length.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        function = _linear_of_rows if func is functional.linear else func
        return function(*args, **(kwargs or {}))


def _linear_of_rows(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    flat = bias is not None and input.ndim > 2
    made: Tensor = functional.linear(
        input.flatten(0, -2) if flat else input, weight, bias
    )
    return made.unflatten(0, input.shape[:-1]) if flat else made


def _check(compile_: object) -> None:
    if not (isinstance(compile_, bool) or callable(compile_)):
        raise TypeError(
            "compile must be True, False or a function such as "
            f"functools.partial(torch.compile, mode=...), got {compile_!r}"
        )


def with_own_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, as code with a name that no other function has.

    By code the compiler keeps graphs and counts them, by name the sizes that vary. All update steps
    run the same code: the ninth would be compiled no more, the second with sizes that vary.
    ``isolate_recompiles`` sees to graphs alone.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"call_{next(_numbers)}")
    return functools.update_wrapper(call, function, updated=())


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _is_the_compilers(error: BaseException) -> bool:
    """Whether the compiler raised it; errors of torch.compile have no public names."""
    theirs = ("torch._dynamo.", "torch._inductor.")
    return any(kind.__module__.startswith(theirs) for kind in type(error).__mro__)


def _reason(error: BaseException) -> str:
    """Why the compiler has given up, in its own words, and at which line."""
    cause = error.__cause__ or error
    words, *_ = str(cause).split("\n  Hint:")
    stack = getattr(cause, "real_stack", None)
    if not stack:
        return words
    frame = stack[-1]
    return f"{words}\n  At {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}"
