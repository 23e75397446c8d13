"""Compiles a function to one graph, or warns why there is none.

The compiler's own import takes a second, so it happens with the first function that is compiled.
"""

import builtins
import functools
import itertools
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from purestep.stacked import Stacked
from purestep.torch_private import (
    enable_saved_tensors_hooks,
    forward_level,
    has_transforms,
    why_hooks_are_disabled,
)

Compiler: TypeAlias = Callable[..., Callable[..., Any]]
"""``torch.compile`` or what is called like it: ``partial(torch.compile, dynamic=False)``."""

_NAMES = "(torch|optree|einops|purestep)"
LIBRARIES = re.compile(
    rf"G\['(__builtins_dict__|__import_{_NAMES}(_dot_|'))|__import__\('{_NAMES}'\)"
    r"|^G\['___unnamed_scope_\w+'\]\['_tuple_new'\]|^G\['_\d+_c\d+'\]\.Tensor$"
)
"""Names by which the compiler refers to globals of libraries, NamedTuples and ``torch.Tensor``."""

_NO_HOOKS = (
    "compile=True takes no saved_tensors_hooks around a step, such as save_on_cpu: "
    "leave them out, or pass compile=False"
)

_numbers = itertools.count()

_outer: list[None] = []
"""Stays empty. A compiler refuses a change of it in the body of an operator."""


def compile_function(
    function: Callable[..., Any], **settings: Any
) -> Callable[..., Any]:
    """Compiles a function by ``torch.compile`` with the options that ``ps.compile`` names.

    ``settings`` are arguments of ``torch.compile``: ``options=`` overrides these options, and
    ``mode=`` replaces them. Another ``backend=`` gets the filter of guards alone. Where
    ``cpp_wrapper`` fails with ``fullgraph=True``, the function is compiled again without it. Each
    call marks the leaves of ``Stacked`` arguments, so that their number of microbatches may vary.

    >>> double = compile_function(lambda x: 2 * x)
    """
    options: dict[str, Any] = {"guard_filter_fn": drop_library_guards}
    if settings.get("backend", "inductor") == "inductor":
        from purestep.compiling import cpu

        options |= cpu.inductor_options()
    if settings.get("mode") is None:
        settings["options"] = options | (settings.get("options") or {})
    own_options = settings.get("options") or {}

    def make_graph() -> Callable[..., Any]:
        # A copy: torch takes the filter of guards out of the options that it gets.
        options_once = {"options": {**own_options}} if own_options else {}
        compiled: Callable[..., Any] = torch.compile(
            _with_own_cache(function), **{**settings, **options_once}
        )
        return compiled

    graph = make_graph()

    @functools.wraps(graph)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal graph
        for arg in (*args, *kwargs.values()):
            if type(arg) is Stacked:
                arg.let_length_vary()
        reason = why_hooks_are_disabled()
        try:
            return graph(*args, **kwargs)
        except Exception as error:
            if reason is None:
                enable_saved_tensors_hooks()
            # Without ``fullgraph``, the first of several graphs may have written to its inputs.
            may_retry = settings.get("fullgraph") and own_options.get("cpp_wrapper")
            if not (may_retry and _is_of_backend(error)):
                raise
        # torch 2.11 fails with it on ``scan``, which your code may call, too: only the error tells.
        own_options["cpp_wrapper"] = False
        graph = make_graph()
        return graph(*args, **kwargs)

    return run


def _is_of_backend(error: Exception) -> bool:
    """Returns whether an error says that the compiler's backend failed to compile a graph.

    Nothing has been computed then, if ``fullgraph`` is set. Otherwise earlier graphs may have run.
    """
    return type(error).__name__ in ("InductorError", "BackendCompilerFailed")


def drop_library_guards(guards: Sequence[Any]) -> list[bool]:
    """Returns whether each guard stays: False for those on globals of libraries."""
    return [not LIBRARIES.search(guard.name) for guard in guards]


def drop_guards(guards: Sequence[Any]) -> list[bool]:
    """Returns whether each guard stays: False for those on libraries, transforms and hooks.

    Guards on libraries are those that ``drop_library_guards`` drops. The graphs of
    ``compile_one_graph`` run under no transform, and under no hooks on saved tensors.
    """
    dropped = ("FUNCTORCH_STACK_MATCH", "AUTOGRAD_SAVED_TENSORS_HOOKS")
    keep = []
    for guard, is_kept in zip(guards, drop_library_guards(guards), strict=True):
        keep.append(is_kept and guard.guard_type not in dropped)
    return keep


def compile_or_fall_back(
    function: Callable[..., Any], compile_: bool | Compiler = True
) -> Callable[..., Any]:
    """Compiles a function to one graph, by ``compile_``; returns it unchanged if that is False.

    True is ``compile_function``. Where there is no graph, a warning says why, and the function runs
    eagerly: graphs in pieces would lose derivatives that the function takes. It runs eagerly under
    transforms and dispatch modes, too, which ask for operations one by one. The result takes
    positional arguments. A ``compile_`` that is neither a bool nor a function raises ``TypeError``.

    >>> double = compile_or_fall_back(lambda x: 2 * x)
    >>> compile_or_fall_back(len, False) is len
    True
    """
    if compile_ is False:
        return function
    return with_fallback(compile_one_graph(function, compile_), function)


def with_fallback(
    graph: Callable[..., Any], plain: Callable[..., Any], *, warns: bool = True
) -> Callable[..., Any]:
    """Makes a function that runs ``graph``, and ``plain`` from the call on that raises ``NoGraph``.

    That call runs ``plain``, too, and a warning then says why. There is none if ``warns`` is False,
    as where ``plain`` is compiled in another way. If ``plain`` raises in that call, there is no
    warning either, and the next call runs ``graph`` again. If ``NoGraph`` has no cause, as where
    the compiler is switched off, ``plain`` runs in this call alone, without a warning.

    ``plain`` also runs under transforms and dual numbers, and in traces. The function takes
    positional arguments.
    """
    broken = False

    def run(*args: Any) -> Any:
        nonlocal broken
        if torch.compiler.is_dynamo_compiling():
            # A compiler around this one compiles the function, too.
            return plain(*args)
        if broken or has_transforms() or forward_level() >= 0:
            return plain(*args)
        try:
            return graph(*args)
        except NoGraph as error:
            no_graph = error
        # An error of the loss itself is raised here, without a word about the compiler.
        result = plain(*args)
        cause = no_graph.__cause__
        # There is no cause where the compiler is switched off.
        broken = cause is not None
        if cause is not None and warns:
            warnings.warn(
                f"compile=True: torch.compile cannot make one graph of {no_graph}, so from now on "
                f"it runs eagerly. Change what stops it, or pass compile=False. {_explain(cause)}",
                stacklevel=2,
            )
        return result

    return run


class NoGraph(Exception):  # noqa: N818
    """Says that the compiler cannot make one graph of a function."""


def compile_one_graph(
    function: Callable[..., Any],
    compile_: bool | Compiler,
    *,
    may_fix_sizes: bool = True,
) -> Callable[..., Any]:
    """Makes a function that runs one graph; its call raises ``NoGraph`` where there is none.

    ``NoGraph`` is raised before anything is computed, unless a backend runs the graph uncompiled,
    and fails at a checkpoint. It also stands for an error that the function raises in a trace.
    Other errors get a note, and are raised as they are: the graph has run by then.

    The function takes positional arguments, where no transform is active. It raises
    ``RuntimeError`` under the caller's ``saved_tensors_hooks``, until its own graph has needed
    hooks, as for a checkpoint that the backend runs uncompiled.

    With ``may_fix_sizes``, sizes that the compiler cannot let vary have a graph each; without it,
    ``NoGraph`` is raised. A ``compile_`` of False compiles like True; one that is neither a bool
    nor a function raises ``TypeError``.

    >>> from functools import partial
    >>> def branches(x):
    ...     return x + 1 if x.sum() > 0 else x
    >>> compile_one_graph(branches, partial(torch.compile, backend="eager"))(torch.ones(2))
    Traceback (most recent call last):
    ...
    purestep.compiling.graph.NoGraph: branches
    """
    _check_compile(compile_)

    def traced(*args: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            # The compiler has left this call to Python.
            raise NoGraph(_name_of(function))
        return function(*args)

    way = Way(may_fix_sizes=may_fix_sizes)
    graph = _compile_fully(traced, compile_, way)

    def run(*args: Any) -> Any:
        nonlocal graph, way
        # It raises if the caller has hooks. A compiler that fails inside of torch.func leaves them
        # disabled; this restores them.
        with way.forbid_hooks(_NO_HOOKS):
            try:
                return graph(*args)
            except NoGraph:
                raise
            except Exception as raised:
                error = raised
        other = _another_way(error, way)
        if other == way:
            if not _means_no_graph(error):
                # To run again here could write twice to data, and launch collectives twice.
                error.add_note(
                    f"The graph of {_name_of(function)} that compile=True made has raised this. If "
                    "compile=False takes the same step, it is an error of torch's compiler."
                )
            raise_no_graph(function, error)
        way = other
        graph = _compile_fully(traced, compile_, way)
        return run(*args)

    return run


def raise_no_graph(function: Callable[..., Any], error: Exception) -> NoReturn:
    """Raises ``NoGraph`` if ``error`` rose while the compiler worked, else raises ``error``.

    It also raises ``NoGraph`` if a backend ran the graph uncompiled, and failed at a checkpoint.
    The error is the cause of ``NoGraph``, whose message is the name of ``function``. The function
    itself may have raised it in a trace: only an eager run shows that.
    """
    if _means_no_graph(error):
        raise NoGraph(_name_of(function)) from error
    raise error


def _means_no_graph(error: Exception) -> bool:
    """Returns whether an error rose while the compiler worked, or refuses a checkpoint.

    A backend that runs the graph by torch itself meets the checkpoint in the forward pass, where
    ``torch.func`` refuses it. Other errors of a graph that runs do not count.
    """
    is_checkpoint = "don't yet support saved tensor hooks" in str(error)
    return is_checkpoint or is_compiler_error(error) or _rose_in_the_compiler(error)


def _rose_in_the_compiler(error: Exception) -> bool:
    """Returns whether the traceback of an error leads through Dynamo, torch's compiler.

    The class of an error does not tell: some of the compiler's are plain ``AssertionError``, as
    those about ``torch.cond``. An error that a function raises while it is traced counts, too.
    """
    frames = traceback.walk_tb(error.__traceback__)
    files = {frame.f_code.co_filename for frame, _ in frames}
    return any(file.endswith("_dynamo/convert_frame.py") for file in files)


class Way(NamedTuple):
    """Holds how a function is compiled, and its graph called."""

    dynamic: bool | None = None
    """Whether sizes may vary; None leaves that to the compiler."""
    forbid_hooks: Callable[[str], AbstractContextManager[Any]] = (
        disable_saved_tensors_hooks
    )
    may_fix_sizes: bool = True
    """Whether sizes that cannot vary may have a graph each."""


def _another_way(error: Exception, way: Way) -> Way:
    """Returns a way to compile in which this error may not come again; else the same way."""
    text = str(error)
    # Some kernels take no sizes that vary: under torch.func.vjp, and those of torch.func.hessian.
    if "symbolic sizes/strides" in text and way.may_fix_sizes:
        return way._replace(dynamic=False)
    # A backend that runs the graph by torch itself runs its checkpoints, which need hooks.
    if _NO_HOOKS in text:
        return way._replace(forbid_hooks=nullcontext)
    return way


def _compile_fully(
    function: Callable[..., Any], compile_: bool | Compiler, way: Way
) -> Callable[..., Any]:
    """Compiles a function to one graph, by ``compile_``; by ``compile_function`` for a bool.

    The compiler gets ``fullgraph=True``, and ``way.dynamic`` unless that is None. For a bool, only
    the guards that ``drop_guards`` selects stay.
    """
    settings: dict[str, Any] = {"fullgraph": True}
    if way.dynamic is not None:
        settings["dynamic"] = way.dynamic
    if callable(compile_):
        return compile_(_with_own_cache(function), **settings)
    return compile_function(
        function, options={"guard_filter_fn": drop_guards}, **settings
    )


def refuse_bodies() -> None:
    """Makes a compiler fail if it traces this call in an operator's body, as of ``torch.cond``.

    There autograd would silently give zeros, since the compiler takes a body's operations below
    autograd. It refuses bodies that change an outer list, as this does. A mode would not do: the
    compiler refuses the first change of the modes in a trace, and no later one.
    """
    _outer.clear()


class LetSizesVary(TorchFunctionMode):
    """Replaces functions whose sizes the compiler fixes under ``torch.func.vjp``.

    A linear layer with a bias and an input of three dimensions would need a graph for every length.
    Dropout would have none. ``unflatten`` has one, but not inside of such a mode.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if func is functional.linear:
            return _linear_of_rows(*args, **kwargs)
        if func is functional.dropout:
            return _native_dropout(*args, **kwargs)
        # Tensor.unflatten calls super(), which the compiler cannot trace in a mode.
        if func is Tensor.unflatten:
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)


def _linear_of_rows(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    is_unchanged = bias is None or input.ndim <= 2
    rows = input if is_unchanged else input.flatten(0, -2)
    output: Tensor = functional.linear(rows, weight, bias)
    return output if is_unchanged else output.unflatten(0, input.shape[:-1])


def _native_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Runs dropout by an operation whose sizes may vary under ``torch.func.vjp`` too.

    In place, outside of training, and for an invalid ``p``, it is torch's dropout.
    """
    if inplace or not training or not 0 <= p <= 1:
        return functional.dropout(input, p, training, inplace)
    output, _ = torch.native_dropout(input, p, True)
    return output


def _check_compile(compile_: object) -> None:
    if not (isinstance(compile_, bool) or callable(compile_)):
        raise TypeError(
            "compile must be True, False or a function such as "
            f"functools.partial(torch.compile, mode=...), got {compile_!r}"
        )


def _with_own_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function in code whose name no other function has, for a cache of its graphs alone.

    By code the compiler caches and counts graphs, by name the sizes that vary. All update steps run
    the same code: the ninth would be compiled no more, the second with sizes that vary.
    ``isolate_recompiles`` separates graphs alone.

    The code has no globals, so a global that the compiler names without its module is the user's.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    code = call.__code__.replace(co_name=f"call_{next(_numbers)}")
    no_globals = {"__name__": __name__, "__builtins__": builtins}
    wrapper = FunctionType(code, no_globals, closure=call.__closure__)
    return functools.update_wrapper(wrapper, function, updated=())


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def is_compiler_error(error: BaseException) -> bool:
    """Returns whether an error's class or a base is the compiler's; these have no public names."""
    modules = ("torch._dynamo.", "torch._inductor.")
    classes = type(error).__mro__
    return any(cls.__module__.startswith(modules) for cls in classes)


def _explain(error: BaseException) -> str:
    """Returns why the compiler has given up and, if known, at which line of the program."""
    cause = error.__cause__ or error
    reason, *_ = str(cause).split("\n  Hint:")
    stack = getattr(cause, "real_stack", None)
    if not stack:
        return reason
    frame = stack[-1]
    location = f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return f"{reason}\n  At {location}: {frame.line}"
