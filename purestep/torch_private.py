"""Every private name of torch's that purestep uses, and what happens where it is missing.

A private name may go with any release of torch. Where one is missing, nothing happens at import;
what needs it raises at its first use and says which torch has it, unless a fallback is named here.

>>> _missing("_no_such_name")()
Traceback (most recent call last):
...
RuntimeError: torch ... has no torch._no_such_name, which purestep needs for this: install ...
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

OLDEST, NEWEST = "2.11.0", "2.15.0"
"""Of the torch versions that are claimed: ``make versions`` runs the tests on both."""


_TORCH_2_11 = torch.__version__ < "2.12"


def _private(path: str) -> Any:
    """``torch.path``; where there is none, a function that says so."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        return _missing(path)


def _missing(path: str) -> Callable[..., NoReturn]:
    def missing(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.{path}, which purestep needs for this: "
            f"install a torch from {OLDEST} to {NEWEST}"
        )

    return missing


# Transforms: where none is active, buffers are reused, and kernels run that no transform knows.

transformed: Callable[[], bool] = _private("_C._are_functorch_transforms_active")
"""Whether a transform of ``torch.func`` is active."""

_interpreters = _private("_C._functorch.get_interpreter_stack")


forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", -1)
"""The level of derivatives in forward mode that are being taken, from 0; -1 where none is."""


def transforms_differentiate() -> bool:
    """Whether one of the transforms of ``torch.func`` that are active is not a ``vmap``."""
    return any(level.key().name != "Vmap" for level in _interpreters() or [])


def check_inference_mode() -> None:
    """Refuses derivatives by ``torch.func`` where torch 2.11 gives zeros, without a word.

    Its ``torch.func`` records nothing under ``torch.inference_mode``; what it compiles is right.
    """
    if not _TORCH_2_11 or torch.compiler.is_dynamo_compiling():
        return
    if torch.is_inference_mode_enabled():
        raise ValueError(
            f"torch {torch.__version__} takes all derivatives of torch.func for zero under "
            "torch.inference_mode(): leave that out, or install torch 2.12 or later"
        )


# Reverse mode: autograd adds gradients to their sums, on leaves made for one microbatch.

run_backward: Callable[..., Any] = _private("autograd.graph._engine_run_backward")
"""``torch.autograd.backward`` without its checks, which take as long as thirty small operations.

It stays within the function modes of the caller, which the public function leaves.
"""

_saved_tensors_hooks = _private("_C._autograd._top_saved_tensors_default_hooks")


def checkpoint_frame() -> Any | None:
    """The frame of the innermost checkpoint that computes for the first time; None outside of any.

    It holds ``recompute_fn``, which the backward pass calls. A checkpoint puts hooks on what
    is saved for the backward pass.
    """
    pack, *_ = _saved_tensors_hooks(False) or [None]
    if (
        getattr(pack, "__qualname__", "")
        != "_checkpoint_hook.__init__.<locals>.pack_hook"
    ):
        return None
    frame = inspect.getclosurevars(pack).nonlocals.get("frame")
    if not hasattr(frame, "recompute_fn"):
        _missing("utils.checkpoint._CheckpointFrame.recompute_fn")()
    return frame


version: Callable[[Tensor], int] = _private("Tensor._version.__get__")
"""How often a tensor was written to."""


def _sum_nonzero(x: Tensor) -> Tensor:
    return (x != 0).sum()


# torch 2.11 has no batching rule for it: a warning, and a loop over the batch.
count_nonzero: Callable[[Tensor], Tensor] = (
    _sum_nonzero if _TORCH_2_11 else torch.count_nonzero
)

# Kernels for many leaves at once.


def foreach(name: str) -> Callable[..., Any]:
    """Returns ``torch._foreach_NAME``, one of a family of kernels for lists of tensors."""
    kernel: Callable[..., Any] = _private(f"_foreach_{name}")
    return kernel


def multiply_by_one(column: Sequence[Tensor]) -> list[Tensor]:
    """Clones a column to the bit."""
    if column[0].dtype == torch.bool:
        return [leaf.clone() for leaf in column]
    products: list[Tensor] = foreach("mul")(column, 1)
    return products


foreach_clone: Callable[[Sequence[Tensor]], list[Tensor]] = getattr(
    torch, "_foreach_clone", multiply_by_one
)
"""Clones the tensors of a list. torch 2.11 lacks it: there a product by one, which is exact."""

fused_adamw_: Callable[..., None] = _private("_fused_adamw_")

is_profiling: Callable[[], bool] = _private("autograd._profiler_enabled")
"""Whether ``torch.profiler`` runs in this thread."""

# Process groups. A torch that was built without torch.distributed has none of these.

all_reduce: Callable[..., Tensor] = _private("ops._c10d_functional.all_reduce")
"""A collective that compiles, as do the next two; its result is there after ``wait``."""
_gather: Callable[..., Tensor] = _private("ops._c10d_functional.all_gather_into_tensor")
_GATHER_OUT = "ops._c10d_functional.all_gather_into_tensor_out"
_gather_out: Callable[..., Tensor] = _private(_GATHER_OUT)


def all_gather(flat: Tensor, size: int, group: str) -> Tensor:
    """Gathers a vector of each rank into memory that is made here.

    Without ``out=``, gloo runs ALLGATHER_COALESCED. That name has over 15 characters, so gloo's two
    workers write it to memory of the heap, without a lock (docs/pages/why/gloo.md).
    """
    if _TORCH_2_11 and type(flat) is not Tensor:
        return _gather(
            flat, size, group
        )  # Its compiler, which traces, fails with the other.
    return _gather_out(flat, size, group, out=flat.new_empty(size * flat.numel()))


reduce_scatter: Callable[..., Tensor] = _private(
    "ops._c10d_functional.reduce_scatter_tensor"
)
wait: Callable[[Tensor], Tensor] = _private("ops._c10d_functional.wait_tensor")

flattened: Callable[[Any], Any] = _private(
    "distributed.device_mesh.DeviceMesh._flatten"
)
"""The mesh as one dimension, with one process group."""


def collectives_begun(group: Any, device: torch.device) -> int | None:
    """How many collectives of a device's tensors a process group has begun.

    None where its backend does not count. The group itself would answer for its default backend,
    which is that of the host in a group of "cpu:gloo,cuda:nccl".
    """
    try:
        number: int = group._get_backend(device)._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):
        return None
    return number


# The compiler. Its import takes a second, so it happens where something is compiled.


def never_compiled_alone(function: Callable[..., Any]) -> None:
    """Python runs a function, and all that it calls, where no graph of its caller holds it.

    A torch without the name compiles them there.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameExecStrategy(*[eval_frame._FrameAction.SKIP] * 2)
        eval_frame.set_code_exec_strategy(function.__code__, skip)
    except (ImportError, AttributeError):
        pass


def graph_pass(rewrite: Callable[[Any], None], file: str, extra: str = "") -> Any:
    """Makes a pass over inductor's graphs, with a name by which inductor caches what it compiles.

    With a plain function, inductor compiles anew in each process: "Unsupported post grad custom
    pass". The name changes with the ``file`` that holds the pass, and with ``extra``, which is all
    else that the pass depends on. A torch without the class takes the function.
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
            return get_hash_for_files((file,), extra)

    return NamedPass()


def uncompiled(function: Any) -> Any | None:
    """The function of which ``torch.compile`` has made this one; None if it did not.

    ``module.compile()`` keeps such a function, of a method that is bound to the module.
    """
    if not isinstance(function, FunctionType):
        return None
    original: Any = vars(function).get("_torchdynamo_orig_callable")
    code = getattr(original, "__code__", None)
    if code is not None and "_dynamo" in code.co_filename:  # a wrapper around a method
        return original.__wrapped__
    return original


def watching(look: Callable[[Any, Any, Any], None]) -> Any:
    """A context in which ``look`` gets each operation, and its arguments, before it runs."""
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
    given = {
        each.name: each.default_value for each in known if each.has_default_value()
    }
    given |= dict(zip([each.name for each in known], args, strict=False)) | kwargs
    writes = {
        each.name: bool(each.alias_info and each.alias_info.is_write) for each in known
    }
    return {name: (value, writes[name]) for name, value in given.items()}


def may_draw(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers. Attention does where it drops something."""
    drops, _ = arguments_of(operation, args, kwargs).get("dropout_p", (None, False))
    return torch.Tag.nondeterministic_seeded in operation.tags and drops != 0.0


def traced_container(structure: Any, children: list[Any]) -> Any:
    """The container at the top of an optree structure, over these children, in a trace.

    Its own way calls optree's function for a dict without tensors, which expects other metadata.
    """
    if structure.type is dict:
        unsorted, _ = structure._metadata
        return dict.fromkeys(unsorted) | dict(
            zip(structure.entries(), children, strict=True)
        )
    return structure._unflatten_func(structure._metadata, children)


def traced_metadata(structure: Any) -> Any:
    """What the node at the top of an optree structure keeps beside its children, in a trace."""
    return structure._metadata


def call_forward_of_object(attributes: dict[str, Any]) -> None:
    """Lets a module that is made in a trace call the ``forward`` among its attributes.

    torch 2.11's compiler calls the class's where a module has no hooks, and then fails on
    ``@torch.no_grad()``, as rotary embeddings of transformers have it. The note is of no hook.
    """
    if _TORCH_2_11:
        attributes["_forward_pre_hooks_with_kwargs"][None] = True


def check_no_rand_in_trace() -> None:
    """Refuses a trace in which ``torch.rand`` was called, where no function mode has seen it.

    torch 2.11's compiler hides it from modes: a layer that drops paths by ``torch.rand`` would
    draw from the global generator, not from its keys.
    """
    if not _TORCH_2_11:
        return
    from torch._dynamo.comptime import comptime

    comptime(_check_no_rand)


def _check_no_rand(context: Any) -> None:
    if any(node.target is torch.rand for node in context.graph().nodes):
        raise ValueError(
            f"the compiler of torch {torch.__version__} hides torch.rand from key=, so that this "
            "draws other numbers than without it: leave the compiler out, or install torch 2.12 or "
            "later"
        )


onednn_linear: Callable[..., Tensor] = _private("ops.mkldnn._linear_pointwise.default")
"""A product of matrices by oneDNN. A torch without oneDNN has none."""


def forward_hooks(module: Any) -> list[Any]:
    """The hooks on a module's own call. Where unknown, none."""
    kinds = "_forward_pre_hooks", "_forward_hooks"
    return [hook for kind in kinds for hook in getattr(module, kind, {}).values()]


def hooks_backward(things: Iterable[Any]) -> bool:
    """Whether one of these modules or tensors has hooks on its backward pass. Where unknown, no."""
    kinds = "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"
    return any(getattr(each, kind, None) for each in things for kind in kinds)


def adds_its_masks(module: Any) -> bool:
    """Whether it is a Hugging Face model whose attention adds masks to scores.

    Where transformers no longer says so, masks of bools are not refused.
    """
    return (
        getattr(getattr(module, "config", None), "_attn_implementation", None)
        == "eager"
    )
