"""Collects the private names of torch that purestep uses, each with a fallback or an error.

A private name may go with any release of torch. Where one is missing, the import succeeds. What
needs it raises at its first use and says which torch has it, unless a fallback is named here.

>>> _make_missing("_no_such_name")()
Traceback (most recent call last):
...
RuntimeError: torch ... has no torch._no_such_name, which purestep needs for this: install ...
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

OLDEST = "2.11.0"
NEWEST = "2.15.0"
"""The torch versions that are claimed: ``make versions`` runs the tests on both."""

_TORCH_2_11 = torch.__version__ < "2.12"


def _private(path: str) -> Any:
    """Returns ``torch.path``; where torch has none, a function that raises RuntimeError."""
    value: Any = torch
    try:
        for name in path.split("."):
            value = getattr(value, name)
    except AttributeError:
        return _make_missing(path)
    return value


def _make_missing(path: str) -> Callable[..., NoReturn]:
    """Makes a function of any arguments that raises RuntimeError, and names what torch lacks."""

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.{path}, which purestep needs for this: "
            f"install a torch from {OLDEST} to {NEWEST}"
        )

    return missing


# Transforms: where none is active, buffers are reused, and kernels run that no transform knows.

has_transforms: Callable[[], bool] = _private("_C._are_functorch_transforms_active")
"""Returns True if a transform of ``torch.func`` is active."""

_get_interpreters = _private("_C._functorch.get_interpreter_stack")

# A partial, since each step asks several times: it runs without a frame of Python.
forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", -1)
"""Returns the level of forward-mode derivatives that are being taken, from 0; -1 for none."""


def transforms_differentiate() -> bool:
    """Returns whether a transform of ``torch.func`` other than ``vmap`` is active."""
    interpreters = _get_interpreters() or []
    return any(interpreter.key().name != "Vmap" for interpreter in interpreters)


def check_inference_mode() -> None:
    """Raises ValueError under ``torch.inference_mode`` of torch 2.11, unless a compiler traces.

    In this mode, the ``torch.func`` of torch 2.11 records nothing, so that all derivatives are
    silently zero. Those of compiled functions are right.
    """
    if not _TORCH_2_11 or torch.compiler.is_dynamo_compiling():
        return
    if torch.is_inference_mode_enabled():
        raise ValueError(
            f"torch {torch.__version__} takes all derivatives of torch.func for zero under "
            "torch.inference_mode(): leave that out, or install torch 2.12 or later"
        )


# Loops that a compiler does not unroll.

scan: Callable[..., tuple[Any, Any]] = _private("_higher_order_ops.scan")
"""``scan(fn, init, xs)``: a loop over dimension 0 of ``xs``, which hands ``init`` on.

``torch.while_loop`` is public, but inductor fails on a loop whose sizes vary (torch 2.13), and its
results must be known beforehand.
"""

SCAN_NAME = "torch.ops.higher_order.scan"
"""The name of this loop in inductor's options."""


def one_graph() -> Any:
    """Returns a context in which a graph break is an error, for code that a compiler traces."""
    return torch._dynamo.error_on_graph_break(True)


def let_length_vary(tensor: Tensor) -> None:
    """Marks a tensor for the compiler: the size of dimension 0 varies, and the others do not."""
    import torch._dynamo  # It takes a second.

    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    for dim in range(1, tensor.ndim):
        torch._dynamo.mark_static(tensor, dim)


# Reverse mode: autograd adds gradients to their sums, on leaves made for one microbatch.

PARAMETER_MARK = "_is_param"
"""The attribute by which ``isinstance(tensor, nn.Parameter)`` knows a tensor of another class."""

run_backward: Callable[..., Any] = _private("autograd.graph._engine_run_backward")
"""``torch.autograd.backward`` without its checks, which take as long as thirty small operations.

It stays within the function modes of the caller, which the public function leaves.
"""

autograd_grad: Callable[..., Sequence[Tensor]] = _private(
    "_functorch.eager_transforms._autograd_grad"
)
"""``torch.autograd.grad``, which a compiler traces without a setting. Zeros stand for None."""

TRACES_AUTOGRAD = not _TORCH_2_11
"""Whether a trace may make leaves, which ``autograd_grad`` needs."""

TRACES_COPY = not _TORCH_2_11
"""Whether a trace may copy an object by ``copy.copy``."""

_autograd = _private("_C._autograd")
"""The state of autograd in this thread, hooks on saved tensors among it."""


def why_hooks_are_disabled() -> str | None:
    """Returns why hooks on saved tensors are an error in this thread; None if they are none."""
    reason: str | None = _autograd._saved_tensors_hooks_get_disabled_error_message()
    return reason


def enable_saved_tensors_hooks() -> None:
    """Enables hooks on saved tensors, which a trace that fails in ``torch.func`` leaves disabled.

    Then any checkpoint would fail.
    """
    _autograd._saved_tensors_hooks_enable()


def checkpoint_frame() -> Any | None:
    """Returns torch's ``_CheckpointFrame`` of the innermost checkpoint in its first run, or None.

    Checkpoints with ``use_reentrant=True`` do not count, nor do those that begin without grad
    mode: they have no such frame. It is None, too, if other hooks on saved tensors lie inside that
    checkpoint.

    The frame has ``recompute_fn``, which the backward pass calls; RuntimeError if torch's no longer
    has it. A checkpoint puts hooks on what is saved for the backward pass, and their closure has
    the frame.
    """
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    if not hooks:
        return None
    pack_hook = hooks[0]
    name = getattr(pack_hook, "__qualname__", "")
    if name != "_checkpoint_hook.__init__.<locals>.pack_hook":
        return None
    closure = inspect.getclosurevars(pack_hook).nonlocals
    frame = closure.get("frame")
    if not hasattr(frame, "recompute_fn"):
        _make_missing("utils.checkpoint._CheckpointFrame.recompute_fn")()
    return frame


def run_checkpoint(fn: Callable[..., Any], *tensors: Tensor) -> Any:
    """Returns ``fn(*tensors)``, in a checkpoint that leaves no hooks if it raises ``Exception``.

    The checkpoint is that of ``torch.utils.checkpoint``, not reentrant. In torch 2.11 its hooks
    stay until the error's traceback is freed, perhaps by another thread, which has no such hooks.
    Until then, the hooks of a dead checkpoint take what later steps save.
    """
    if not _TORCH_2_11:
        return checkpoint(fn, *tensors, use_reentrant=False)
    errors: list[Exception] = []
    is_first = True

    def catch_in_first_run(*tensors: Tensor) -> Any:
        if not is_first:
            return fn(*tensors)
        try:
            return fn(*tensors)
        except Exception as error:
            errors.append(error)

    result = checkpoint(catch_in_first_run, *tensors, use_reentrant=False)
    is_first = False
    if errors:
        raise errors.pop()
    return result


def in_checkpoint() -> bool:
    """Returns whether a checkpoint computes, for the first time or again.

    It sees only checkpoints with ``use_reentrant=False``, in grad mode. Returns False if other
    hooks on saved tensors lie inside that checkpoint.

    >>> in_checkpoint()
    False
    """
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    if not hooks:
        return False
    name = getattr(hooks[0], "__qualname__", "")
    return name.startswith(("_checkpoint_hook.", "_recomputation_hook."))


def saved_tensors_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Returns the innermost hooks that pack and unpack saved tensors; without any, identities.

    >>> with torch.autograd.graph.save_on_cpu():
    ...     pack, unpack = saved_tensors_hooks()
    >>> unpack(pack(torch.tensor(1.0)))
    tensor(1.)
    """
    return _autograd._top_saved_tensors_default_hooks(False) or (_identity, _identity)


def _identity(x: Any) -> Any:
    return x


call_module: Callable[..., Any] = _private("nn.Module._call_impl")
"""Calls a module with its hooks, but not what ``replace_call`` has put around that."""


def replace_call(module: torch.nn.Module, function: Callable[..., Any]) -> None:
    """Makes calls of one module run ``function`` instead of the module's hooks and ``forward``.

    It sets the attribute that ``module.compile()`` sets. Raises RuntimeError if torch no longer has
    this attribute.

    >>> layer = torch.nn.Identity()
    >>> replace_call(layer, lambda x: 2 * call_module(layer, x))
    >>> layer(torch.tensor(1.0))
    tensor(2.)
    """
    if not hasattr(torch.nn.Module, "_compiled_call_impl"):
        _make_missing("nn.Module._compiled_call_impl")()
    vars(module)["_compiled_call_impl"] = function


version_counter: Callable[[Tensor], int] = _private("Tensor._version.__get__")
"""Returns how often a tensor was written to."""


def _sum_nonzero(x: Tensor) -> Tensor:
    return (x != 0).sum()


count_nonzero: Callable[[Tensor], Tensor] = torch.count_nonzero
"""Counts the elements other than 0."""

if _TORCH_2_11:
    # Its count_nonzero has no batching rule: it warns, and loops over the batch.
    count_nonzero = _sum_nonzero

# Kernels for many leaves at once.


def foreach(name: str) -> Callable[..., Any]:
    """Returns ``torch._foreach_NAME``, a kernel for lists of tensors.

    If torch lacks it, the function that is returned raises RuntimeError.
    """
    kernel: Callable[..., Any] = _private(f"_foreach_{name}")
    return kernel


def multiply_by_one(column: Sequence[Tensor]) -> list[Tensor]:
    """Returns clones of tensors of one dtype; there is at least one.

    They are products with 1, or clones one by one if bool. Real numbers are equal to the bit, but
    a NaN may change its bits. In a complex number, infinity may turn into NaN, and -0.0 into 0.0.
    """
    if column[0].dtype == torch.bool:
        return [leaf.clone() for leaf in column]
    multiply = foreach("mul")
    products: list[Tensor] = multiply(column, 1)
    return products


foreach_clone: Callable[[Sequence[Tensor]], list[Tensor]] = getattr(
    torch, "_foreach_clone", multiply_by_one
)
"""Clones the tensors of a list. torch 2.11 lacks it: a product by one is exact, too."""

fused_adamw_: Callable[..., None] = _private("_fused_adamw_")

is_profiling: Callable[[], bool] = _private("autograd._profiler_enabled")
"""Returns True if ``torch.profiler`` runs in this thread."""

# Process groups. A torch that was built without torch.distributed has none of these.

all_reduce: Callable[..., Tensor] = _private("ops._c10d_functional.all_reduce")
"""Starts a collective that compiles, as do the next two; ``wait`` waits for its result."""
_gather: Callable[..., Tensor] = _private("ops._c10d_functional.all_gather_into_tensor")
_GATHER_OUT = "ops._c10d_functional.all_gather_into_tensor_out"
_gather_out: Callable[..., Tensor] = _private(_GATHER_OUT)


def all_gather(flat: Tensor, size: int, group: str) -> Tensor:
    """Starts to gather each rank's vector, and returns the new vector of all, in order of rank.

    Pass it to ``wait`` before you read it. ``size`` is the number of ranks, and ``group`` the name
    of the process group.

    Without ``out=``, gloo runs ALLGATHER_COALESCED. That name has over 15 characters, so gloo's two
    workers write it to memory of the heap, without a lock (docs/gloo.md).
    """
    if _TORCH_2_11 and type(flat) is not Tensor:
        # Its compiler, which traces with other types, fails with out=.
        return _gather(flat, size, group)
    out = flat.new_empty(size * flat.numel())
    return _gather_out(flat, size, group, out=out)


reduce_scatter: Callable[..., Tensor] = _private(
    "ops._c10d_functional.reduce_scatter_tensor"
)
wait: Callable[[Tensor], Tensor] = _private("ops._c10d_functional.wait_tensor")

flatten_mesh: Callable[[Any], Any] = _private(
    "distributed.device_mesh.DeviceMesh._flatten"
)
"""Flattens a mesh to one dimension, with one process group."""


def count_collectives(group: Any, device: torch.device) -> int | None:
    """Counts the collectives of a device's tensors that a process group has begun.

    Returns None where the backend does not count. The group itself would answer for its default
    backend, which is that of the host in a group of "cpu:gloo,cuda:nccl".
    """
    try:
        backend = group._get_backend(device)
        number: int = backend._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):
        return None
    return number


# The compiler. Its import takes a second, so it happens where something is compiled.


def skip_compilation(function: Callable[..., Any]) -> None:
    """Keeps the compiler from a function and all that it calls, unless it traces a caller of them.

    It does nothing if torch lacks the private names for it.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        # Of this frame, and of the frames that it calls.
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except (ImportError, AttributeError):
        pass


def graph_pass(
    rewrite: Callable[[Any], None], files: tuple[str, ...], extra: str = ""
) -> Any:
    """Makes a pass over inductor's graphs, with a name by which inductor caches what it compiles.

    The pass calls ``rewrite(graph)``, which changes the graph in place. With a plain function,
    inductor compiles anew in each process: "Unsupported post grad custom pass". The name changes
    with the contents of ``files``, the paths of the code of the pass. It changes with ``extra``,
    too: all else that the pass depends on. A torch without ``CustomGraphPass`` gets ``rewrite``.
    """
    try:
        from torch._inductor.custom_graph_pass import (
            CustomGraphPass,
            get_hash_for_files,
        )
    except ImportError:
        return rewrite

    class NamedPass(CustomGraphPass):  # type: ignore[misc, unused-ignore]
        def __call__(self, graph: Any) -> None:
            rewrite(graph)

        def uuid(self) -> Any:
            return get_hash_for_files(files, extra)

    return NamedPass()


def original_function(function: Any) -> Any | None:
    """Returns the function that ``torch.compile`` compiled to this one; None if it did not.

    ``module.compile()`` stores such a compiled function, whose original is a method bound to the
    module. The original of ``torch.compiler.disable(f)`` is ``f``.
    """
    # ``functools.wraps`` copies the attribute to a function that calls the compiled one.
    if not isinstance(function, FunctionType) or not _is_code_of_compiler(function):
        return None
    original: Any = vars(function).get("_torchdynamo_orig_callable")
    if _is_code_of_compiler(original):
        # The compiler wraps methods once more.
        return original.__wrapped__
    return original


def _is_code_of_compiler(function: Any) -> bool:
    """Returns whether a function's code stands in a file of torch's compiler, Dynamo."""
    code = getattr(function, "__code__", None)
    folder = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "")
    return code is not None and code.co_filename.startswith(folder)


def watch_operations(look: Callable[[Any, Any, Any], None]) -> Any:
    """Makes a context that calls ``look(operation, args, kwargs)`` before each operation runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # True would import the compiler at the first operation, which takes a second.
            return "torch._dynamo" in sys.modules

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if kwargs is None:
                kwargs = {}
            look(func, args, kwargs)
            return func(*args, **kwargs)

    return Watch()  # type: ignore[no-untyped-call]


def bind_arguments(
    operation: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, tuple[Any, bool]]:
    """Returns each argument of an operation by name, and whether its schema marks it as written.

    Arguments that the call leaves out have their default values; without one they are missing.
    """
    arguments = {}
    for i, parameter in enumerate(operation._schema.arguments):
        if i < len(args):
            value = args[i]
        elif parameter.name in kwargs:
            value = kwargs[parameter.name]
        elif parameter.has_default_value():
            value = parameter.default_value
        else:
            continue
        alias = parameter.alias_info
        is_written = alias is not None and alias.is_write
        arguments[parameter.name] = (value, is_written)
    return arguments


def may_draw_random(
    operation: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    """Returns whether an operation may draw random numbers, by its tag.

    An operation without torch's tag ``nondeterministic_seeded`` counts as one that draws none. One
    with the argument ``dropout_p``, as attention has it, draws only if that is not 0.
    """
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    arguments = bind_arguments(operation, args, kwargs)
    if "dropout_p" not in arguments:
        return True
    dropout_p, _ = arguments["dropout_p"]
    return bool(dropout_p != 0.0)


def call_forward_of_object(attributes: dict[str, Any]) -> None:
    """Makes torch 2.11's compiler call a module's ``forward`` that is among its attributes.

    ``attributes`` is the ``__dict__`` of a module made in a trace; a mark is written into it. The
    compiler would call the class's ``forward`` if a module has no hooks. It then fails on
    ``@torch.no_grad()``, as rotary embeddings of transformers have it. So this marks a hook that
    does not exist. With later torch it does nothing.
    """
    if _TORCH_2_11:
        attributes["_forward_pre_hooks_with_kwargs"][None] = True


def check_no_rand_in_trace() -> None:
    """Raises ValueError in a trace of torch 2.11 that has called ``torch.rand`` up to here.

    Its compiler hides ``torch.rand`` from function modes: a layer that drops paths by it would draw
    from the global generator, not from its keys. The caller of the compiled function gets the error
    as ``InternalTorchDynamoError``. Does nothing outside of a trace, or with later torch.
    """
    if not _TORCH_2_11:
        return
    from torch._dynamo.comptime import comptime

    comptime(_check_no_rand)


def _check_no_rand(context: Any) -> None:
    nodes = context.graph().nodes
    if any(node.target is torch.rand for node in nodes):
        raise ValueError(
            f"the compiler of torch {torch.__version__} hides torch.rand from key=, so that this "
            "draws other numbers than without it: leave the compiler out, or install torch 2.12 or "
            "later"
        )


onednn_linear: Callable[..., Tensor] = _private("ops.mkldnn._linear_pointwise.default")
"""Multiplies matrices by oneDNN. A torch without oneDNN lacks it."""


def forward_hooks(module: Any) -> list[Any]:
    """Lists a module's hooks before and after ``forward``; none if torch lacks the attributes."""
    pre_hooks = getattr(module, "_forward_pre_hooks", {})
    hooks = getattr(module, "_forward_hooks", {})
    return [*pre_hooks.values(), *hooks.values()]


def backward_hooks_of(module: Any) -> dict[int, Any]:
    """Returns the dict in which a module keeps its backward hooks, without pre-hooks.

    Returns an empty one if torch no longer has this attribute.
    """
    hooks: dict[int, Any] = getattr(module, "_backward_hooks", {})
    return hooks


def has_backward_hooks(modules_or_tensors: Iterable[Any]) -> bool:
    """Returns whether any of these has hooks on its backward pass, or on its accumulated gradient.

    Hooks on nodes of autograd, and global hooks of modules, do not count. Finds none if torch no
    longer has these attributes.
    """
    names = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    for module_or_tensor in modules_or_tensors:
        for name in names:
            if getattr(module_or_tensor, name, None):
                return True
    return False


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Returns whether a module's ``state_dict`` has its buffer of this name, without calling it.

    All buffers are persistent if torch no longer has this attribute.
    """
    return name not in getattr(module, "_non_persistent_buffers_set", ())


def has_additive_masks(config: Any) -> bool:
    """Returns whether a Hugging Face model runs "eager" attention, which adds masks to its scores.

    Returns False where the model's config no longer names the implementation.
    """
    implementation = getattr(config, "_attn_implementation", None)
    return bool(implementation == "eager")
