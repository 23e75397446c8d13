"""Every private name of torch's that purestep uses: what it is for, and what happens where it is missing.

A private name may go with any release of torch. Where one is missing, nothing happens at import; what needs it
raises at its first use and says which torch has it, unless a fallback is named here.

>>> _private("_no_such_name")()
Traceback (most recent call last):
...
RuntimeError: torch ... has no torch._no_such_name, which purestep needs for this: install a torch from ... to ...
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OLDEST, NEWEST = "2.13.0", "2.15.0"
"""Of the torch versions that are claimed: ``make versions`` runs the tests on both."""


def _private(path: str) -> Any:
    """``torch.path``; where there is none, a function that says so."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        return _missing(path)


def _attribute(path: str) -> Callable[[Any], Any]:
    """What reads the last name of ``torch.path`` off an object; where there is none, a function that says so."""
    try:
        attrgetter(path)(torch)
    except AttributeError:
        return _missing(path)
    return attrgetter(path.rpartition(".")[2])


def _missing(path: str) -> Callable[..., NoReturn]:
    def missing(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.{path}, which purestep needs for this: "
            f"install a torch from {OLDEST} to {NEWEST}"
        )

    return missing


# Who transforms, batches or watches: where none of them is active, buffers are reused and kernels that no transform knows are used.

transformed: Callable[[], bool] = _private("_C._are_functorch_transforms_active")
"""Whether a transform of ``torch.func`` is active."""

is_wrapped: Callable[[Tensor], bool] = _private("_C._functorch.is_functorch_wrapped_tensor")
"""Whether a tensor is one that ``torch.func`` made around another."""


unwrapped: Callable[[Tensor], Tensor] = _private("_C._functorch.get_unwrapped")
"""The tensor inside of one that ``torch.func`` made."""

modes: Callable[[], int] = _private("_C._len_torch_dispatch_stack")


def is_watched() -> bool:
    """Whether a mode of this thread sees every operation, so that tensors may have no values."""
    return modes() > 0


_interpreters = _private("_C._functorch.get_interpreter_stack")
_vmap = _private("_C._functorch.TransformType.Vmap")


forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", -1)
"""The level of derivatives in forward mode that are being taken, from 0; -1 where none is."""


def in_forward_mode() -> bool:
    """Whether derivatives in forward mode are being taken."""
    return forward_level() >= 0


def transforms_differentiate() -> bool:
    """Whether one of the transforms of ``torch.func`` that are active is not a ``vmap``."""
    return any(level.key() != _vmap for level in _interpreters() or [])


# Reverse mode: gradients are added to their sums by autograd itself, on leaves of which nobody else has a hold.

run_backward: Callable[..., Any] = _private("autograd.graph._engine_run_backward")
"""``torch.autograd.backward`` without its checks, which take as long as thirty small operations.

It stays within the function modes of the caller, which the public function leaves.
"""

saved_tensors_hooks: Callable[[bool], Any] = _private(
    "_C._autograd._top_saved_tensors_default_hooks"
)
"""The innermost hooks on what is saved for the backward pass: a checkpoint has its own."""


def checkpoint_frame() -> Any | None:
    """What keeps the innermost checkpoint that is being computed for the first time, with its ``recompute_fn``; None outside of any."""
    hooks = saved_tensors_hooks(False)
    pack: Any = None if hooks is None else hooks[0]
    if getattr(pack, "__qualname__", "") != "_checkpoint_hook.__init__.<locals>.pack_hook":
        return None
    frame = inspect.getclosurevars(pack).nonlocals.get("frame")
    if not hasattr(frame, "recompute_fn"):
        _missing("utils.checkpoint._CheckpointFrame.recompute_fn")()
    return frame


version = _attribute("Tensor._version")
"""How often a tensor was written to."""


def storage_of(tensor: Tensor) -> int:
    """One number for all tensors that share memory, also on devices without addresses."""
    return id(tensor.untyped_storage())  # one object as long as the memory is there


# Kernels for many leaves at once.


foreach_add_: Callable[..., None] = _private("_foreach_add_")
foreach_mul_: Callable[..., None] = _private("_foreach_mul_")
foreach_norm: Callable[..., tuple[Tensor, ...]] = _private("_foreach_norm")
fused_adamw_: Callable[..., None] = _private("_fused_adamw_")

# Process groups. A torch that was built without torch.distributed has none of these.

all_reduce: Callable[..., Tensor] = _private("ops._c10d_functional.all_reduce")
"""A collective that compiles, as are the next two; its result is there after ``wait``."""
all_gather: Callable[..., Tensor] = _private("ops._c10d_functional.all_gather_into_tensor")
reduce_scatter: Callable[..., Tensor] = _private("ops._c10d_functional.reduce_scatter_tensor")
wait: Callable[[Tensor], Tensor] = _private("ops._c10d_functional.wait_tensor")

flattened: Callable[[DeviceMesh], DeviceMesh] = _private(
    "distributed.device_mesh.DeviceMesh._flatten"
)
"""The mesh as one dimension, with one process group."""


def collectives_begun(group: Any) -> int | None:
    """How many collectives a process group has begun; None where it or its torch does not count them."""
    try:
        number: int = group._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):
        return None
    return number


# The compiler. Its import takes a second, so it is imported by what is called when something is compiled.


def gives_up() -> tuple[type[Exception], ...]:
    """What ``torch.compile(fullgraph=True)`` raises where it cannot make one graph. Where unknown, that goes to the caller."""
    try:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    except ImportError:
        return ()
    return FailOnRecompileLimitHit, TorchDynamoException


hooks_forbidden: Callable[[], str | None] = _private(
    "_C._autograd._saved_tensors_hooks_get_disabled_error_message"
)
"""Why no hooks on what is saved are allowed; None where they are."""

allow_hooks: Callable[[], None] = _private("_C._autograd._saved_tensors_hooks_enable")


def breaks_refused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of which a compiler makes one graph or raises, whatever it was told. Where unknown, as it was told."""
    try:
        from torch._dynamo.decorators import error_on_graph_break
    except ImportError:
        return function
    refused: Callable[..., Any] = error_on_graph_break(True)(function)
    return refused


def never_compiled_alone(function: Callable[..., Any], callees: bool = True) -> None:
    """Where a compiler does not take a function into the graph of its caller, Python runs it. Where unknown, that is compiled, too.

    What it calls is compiled, unless ``callees`` is False.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameExecStrategy(
            eval_frame._FrameAction.SKIP,
            eval_frame._FrameAction.DEFAULT if callees else eval_frame._FrameAction.SKIP,
        )
        eval_frame.set_code_exec_strategy(function.__code__, skip)
    except (ImportError, AttributeError):
        pass


def watching(look: Callable[[Any, Any, Any], None]) -> Any:
    """Within it, ``look`` is shown each operation, and its arguments, before it is carried out, or recorded by a compiler."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            look(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    return Watch()  # type: ignore[no-untyped-call]


def arguments_of(
    operation: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, tuple[Any, bool]]:
    """The arguments of an operation by name, defaults included, and whether it writes to each."""
    known = operation._schema.arguments
    given = {each.name: each.default_value for each in known if each.has_default_value()}
    given |= dict(zip([each.name for each in known], args, strict=False)) | kwargs
    writes = {each.name: bool(each.alias_info and each.alias_info.is_write) for each in known}
    return {name: (value, writes[name]) for name, value in given.items()}


def may_draw(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers. Attention does where it drops something."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    names = [argument.name for argument in operation._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def is_switched_off() -> bool:
    """Whether ``TORCH_COMPILE_DISABLE`` keeps the compiler from everything."""
    config = getattr(sys.modules.get("torch._dynamo"), "config", None)
    return bool(getattr(config, "disable", False))


def traced_container(structure: Any, children: list[Any]) -> Any:
    """The container at the top of an optree structure, over these children, while the compiler traces.

    Its own way calls optree's function for a dict without tensors, and that function expects other metadata.
    """
    if structure.type is dict:
        unsorted, _ = structure._metadata
        return dict.fromkeys(unsorted) | dict(zip(structure.entries(), children, strict=True))
    return structure._unflatten_func(structure._metadata, children)


def traced_metadata(structure: Any) -> Any:
    """What the node at the top of an optree structure keeps beside its children, while the compiler traces."""
    return structure._metadata


onednn_linear: Callable[..., Tensor] = _private("ops.mkldnn._linear_pointwise.default")
"""A product of matrices by oneDNN. A torch without oneDNN has none."""


def rewriting(rewrite: Callable[[torch.fx.Graph], None], *files: str) -> dict[str, Any]:
    """Options of ``torch.compile`` with which it calls ``rewrite`` on each graph, after its own passes.

    The code of ``rewrite`` lies in ``files``, and is part of the key under which what is compiled is cached.
    Where there are no such passes, no options: what is compiled is right, and not rewritten.
    """
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    except ImportError:
        return {}

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            rewrite(graph)

        def uuid(self) -> Any:
            return get_hash_for_files(files)

    return {"post_grad_custom_post_pass": Pass()}


def inductor(options: dict[str, Any], choose: Callable[[torch.fx.GraphModule], bool]) -> Any:
    """torch's own compiler, with these options; without ``cpp_wrapper`` for a graph that ``choose`` is true of."""
    wrapper: Any = _private("_TorchCompileInductorWrapper")
    ways = [wrapper(None, options, None), wrapper(None, options | {"cpp_wrapper": False}, None)]

    def inductor(graph: torch.fx.GraphModule, inputs: Sequence[Tensor], **_: Any) -> Any:
        return ways[choose(graph)](graph, inputs)

    return inductor


def calls_of(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """All calls of functions in a graph and in those inside of it."""
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def options_of_mode(mode: str) -> dict[str, Any]:
    """Those of ``torch.compile(mode=)``, which takes no mode beside options. Where unknown, none."""
    try:
        from torch._inductor import list_mode_options
    except ImportError:
        return {}
    options: dict[str, Any] = list_mode_options(mode)
    return options


def unwatched(
    function: FunctionType, libraries: Sequence[str], *, alone: bool = False
) -> dict[str, Any]:
    """Options of ``torch.compile`` with which it does not look, before each call, for what is these libraries' own.

    That is a global, named by its module, or by nothing but itself where it is one of the function's own module; a function, class
    or constant that one of their functions closes over; the names by which the compiler refers to modules; and Python's builtins.
    Of a function that is called ``alone``, where no transform is active, and that keeps nothing for a backward pass, it does
    not ask which transforms there are, nor which hooks on what is kept.
    torch.compile takes this out of the options that it is given, so they are for one call of it.
    """
    names = "|".join(libraries)
    imported = re.compile(
        rf"G\['__import_({names})(_dot_|')|__import__\('({names})'\)|G\['__import_\w+'\]$"
        r"|^G\['__builtins_dict__|^G\['___unnamed_scope_\w+'\]\['_tuple_new'\]"
    )
    # The compiler puts names of its own beside those of the function's module, all of which begin like this one.
    at_home = re.compile(r"G\['(?!__)")

    def ours(owner: Any) -> bool:
        return getattr(owner, "__module__", "").partition(".")[0] in libraries

    def look(guard: Any, values: dict[str, Any]) -> bool:
        if alone and guard.guard_type in _SURROUNDINGS:
            return False
        own = ours(function) and at_home.match(guard.name)
        return not (own or imported.search(guard.name) or closed_over(guard, values))

    def closed_over(guard: Any, values: dict[str, Any]) -> bool:
        owner, cell, rest = guard.name.rpartition(".__closure__[")
        if cell:
            held = rest.endswith("].cell_contents") and ours(values.get(owner))
        else:
            held = guard.name in function.__code__.co_freevars and ours(function)
        return held and isinstance(guard.value, FunctionType | _CONSTANT)

    def filter_(guards: Sequence[Any]) -> list[bool]:
        values = {guard.name: guard.value for guard in guards}
        return [look(guard, values) for guard in guards]

    return {"guard_filter_fn": filter_}


_SURROUNDINGS = ("FUNCTORCH_STACK_MATCH", "AUTOGRAD_SAVED_TENSORS_HOOKS")
"""Of the kinds of guards, those that ask by functions in Python what there is around a call."""

_CONSTANT = bool | int | float | str | type | None


def lies_in_rows(tensor: Tensor) -> bool:
    """Whether a tensor of the compiler's is contiguous; no, where its sizes leave that open or cannot be asked."""
    try:
        from torch._prims_common import is_contiguous_or_false
    except ImportError:
        return False
    return is_contiguous_or_false(tensor)


def hooks_backward(module: torch.nn.Module) -> bool:
    """Whether a module or one of its parts has hooks on its backward pass. Where unknown, no."""
    return any(
        getattr(each, name, None)
        for each in module.modules()
        for name in ("_backward_hooks", "_backward_pre_hooks")
    )


def adds_its_masks(module: Any) -> bool:
    """Whether it is a Hugging Face model whose attention adds masks to scores.

    Where transformers no longer says so, masks of bools are not refused.
    """
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"
