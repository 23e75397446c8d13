"""Rematerialisation: a backward pass computes a function again, and keeps its arguments alone.

Autograd has a checkpoint for it, which no transform of ``torch.func`` takes. Under these stands a
``Function`` that saves the arguments; its backward pass is the vjp of the function itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from purestep import tree
from purestep.axis.vmap import bound_as, mapping
from purestep.checks import versions_of
from purestep.modules import keyed
from purestep.torch_private import (
    in_forward_mode,
    is_wrapped,
    transformed,
    unwrapped,
)

P = ParamSpec("P")
R = TypeVar("R")


def remat(fn: Callable[P, R]) -> Callable[P, R]:
    """``fn``, of which a backward pass keeps the arguments alone, and computes the rest again.

    A network of L equal blocks, each under ``remat``, holds L inputs and what one block computes,
    where it held what all blocks compute; it takes one more forward pass. Values and gradients are
    those of ``fn``, in a step, in ``torch.autograd`` and under every transform of ``torch.func``.

    * Arguments and results are trees. Tensors among them are differentiated.
    * Random numbers are drawn again as they were: by keys, by torch's global generators, and by a
      ``torch.Generator`` among the arguments. Two calls of ``fn`` move these as one does.
    * Collectives in ``fn`` are called again in the backward pass, by all ranks alike.
    * An argument that is written to, by ``fn`` or before the backward pass, is refused.
    * Under a transform, ``fn`` may neither close over a tensor that is differentiated or batched,
      nor return views of arguments or of each other. Pass params as arguments:
      ``remat(block)(params, x)``, not ``remat(lambda x: block(params, x))(x)``.
    * Outside of transforms, it is ``torch.utils.checkpoint``, and ``torch.func.grad`` inside of
      ``fn`` is refused: call ``remat`` inside of ``grad``, or ``torch.autograd.grad`` inside of it.
    * Under a compiler, and for derivatives in forward mode, it is ``fn`` itself.

    >>> def block(w, x):
    ...     return torch.tanh(x @ w)
    >>> def loss(ws, x):
    ...     for w in ws:
    ...         x = remat(block)(w, x)
    ...     return x.sum()
    >>> ws = [torch.eye(2), torch.eye(2)]
    >>> torch.func.grad(loss)(ws, torch.zeros(1, 2))
    [tensor([[0., 0.],
            [0., 0.]]), tensor([[0., 0.],
            [0., 0.]])]
    """

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        recorded = torch.is_grad_enabled() and not in_forward_mode()
        if torch.compiler.is_dynamo_compiling() or not recorded:
            return fn(*args, **kwargs)
        result: R = _of_tensors(fn, args, kwargs)
        return result

    return run


def _of_tensors(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``fn(*args, **kwargs)`` by way of a function from tensors to tensors, which is repeated."""
    by = _apply if transformed() else _by_checkpoint
    if by is _apply and keyed.again() is not nullcontext:
        raise _refused(fn, _KEYED)
    leaves, structure = tree.flatten((args, kwargs))
    at = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    again, axes = _repeatable(fn, leaves), mapping()
    operands = [*_tensors(leaves), *(axis.index for axis in axes)]
    # ``run`` holds no tensors: autograd saves them, and frees them as the backward pass goes.
    rest = _replaced(leaves, at, [None] * len(at))
    found: list[Any] = []
    kind: tree.Structure = None

    @functools.wraps(fn)
    def run(*given: Tensor) -> tuple[Tensor, ...]:
        nonlocal found, kind
        args, kwargs = tree.unflatten(structure, _replaced(rest, at, given[: len(at)]))
        with bound_as(axes, given[len(at) :]):
            results, kind = tree.flatten(again(*args, **kwargs))
        # Each tensor once, and an argument that is returned as the argument itself.
        places = {id(each): _Place(number) for number, each in enumerate(given)}
        made: list[Tensor] = []
        for each in _tensors(results):
            if id(each) not in places:
                places[id(each)] = _Place(len(given) + len(made))
                made.append(each)
        found = [places[id(each)] if isinstance(each, Tensor) else each for each in results]
        return tuple(made)

    values = [*operands, *by(run, *operands)]
    return tree.unflatten(kind, [values[x] if isinstance(x, _Place) else x for x in found])


class _Place(int):
    """Where a result's tensor stands among the arguments and what is made of them."""


def _by_checkpoint(run: Callable[..., R], *operands: Tensor) -> R:
    try:
        made: R = checkpoint(run, *operands, use_reentrant=False, preserve_rng_state=False)
    except RuntimeError as error:
        if "torch.func" in str(error) and "saved tensor hooks" in str(error):
            raise _refused(run, _DIFFERENTIATES) from error
        raise
    return made


def _repeatable(fn: Callable[P, R], leaves: Sequence[Any]) -> Callable[P, R]:
    """``fn``, of which each later call meets the autocast and the random numbers of the first."""
    devices = {leaf.device for leaf in _tensors(leaves)}
    casts = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in {"cpu", *(device.type for device in devices)}
        if torch.amp.is_autocast_available(kind)
    ]
    generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    generators += [torch.default_generator]
    generators += [torch.cuda.default_generators[d.index] for d in devices if d.type == "cuda"]
    before = [(generator, generator.get_state()) for generator in generators]
    moved: list[tuple[torch.Generator, Tensor]] | None = None

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal moved
        if moved is None:
            result = fn(*args, **kwargs)
            # Generators that the call has not moved are left alone: other threads draw from them.
            moved = [x for x in before if not torch.equal(x[1], x[0].get_state())]
            return result
        with ExitStack() as within:
            for generator, state in moved:
                within.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            # Its cache would keep the leaves that it has cast.
            within.callback(torch.clear_autocast_cache)
            for cast in casts:
                within.enter_context(torch.autocast(*cast))
            return fn(*args, **kwargs)

    return run


class _Remat(Function):
    """``run``, from tensors to tensors, whose backward pass is its vjp."""

    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> tuple[Tensor, ...]:
        given = tuple(tree.cut_off(given))
        versions = versions_of(given)
        with _Closed(run):
            made = run(*given)
        if any(map(_is_tracked, made)):
            raise _refused(run, _CLOSES_OVER)
        if versions_of(given) != versions:
            raise _refused(run, _WRITTEN)
        if _overlap(given, made):
            raise _refused(run, _VIEW)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.run, *given = inputs
        ctx.save_for_backward(*given)
        # A zero where no cotangent comes could turn into a NaN on its way back.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        wanted = [index for index, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        arrived = [index for index, each in enumerate(cotangents) if each is not None]
        # Wrappers of a transform that has ended are unwrapped by the first operation on them.
        given = [each.view_as(each) for each in ctx.saved_tensors]
        seeds = tuple(each.view_as(each) for each in cotangents if each is not None)

        def of_wanted(*chosen: Tensor) -> tuple[Tensor, ...]:
            made = ctx.run(*_replaced(given, wanted, chosen))
            return tuple(made[index] for index in arrived)

        grads: list[Any] = [None] * len(given)
        if arrived:
            vjp: Callable[..., Any] = torch.func.vjp
            _, pull = vjp(of_wanted, *(given[index] for index in wanted))
            grads = _replaced(grads, wanted, pull(seeds, retain_graph=False))
        return None, *grads

    @staticmethod
    def vmap(info: Any, in_dims: Any, run: Callable[..., Any], *given: Tensor) -> Any:
        # Not torch's own rule, which counts the gradient of an unbatched result for each example.
        batched = functools.wraps(run)(torch.vmap(run, in_dims[1:], 0, info.randomness))
        made = _apply(batched, *given)
        return made, (0,) * len(made)


_apply: Callable[..., tuple[Tensor, ...]] = _Remat.apply


class _Closed(TorchFunctionMode):
    """Refuses tensors that autograd or a transform tracks, unless they are made within it."""

    def __init__(self, fn: object) -> None:
        super().__init__()
        self._fn, self._own = fn, WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for each in _tensors(tree.leaves_of((args, kwargs))):
            if _is_tracked(each) and each not in self._own:
                raise _refused(self._fn, _CLOSES_OVER)
        result = func(*args, **(kwargs or {}))
        for each in _tensors(tree.leaves_of(result)):
            self._own[each] = None
        return result


def _is_tracked(tensor: Tensor) -> bool:
    """Whether the tensor requires grad, or belongs to a transform while none is active here."""
    if is_wrapped(tensor) and not transformed():
        return True
    while is_wrapped(tensor) and not tensor.requires_grad:
        tensor = unwrapped(tensor)
    return tensor.requires_grad


def _overlap(given: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Whether tensors that are made share memory with those that are given, or with each other."""
    room = dict.fromkeys(map(Tensor.untyped_storage, given), 0)
    for each in made:
        sizes = [size for size, stride in zip(each.shape, each.stride(), strict=True) if stride]
        left = room.get(each.untyped_storage(), each.untyped_storage().nbytes())
        room[each.untyped_storage()] = left - math.prod(sizes) * each.element_size()
    return any(left < 0 for left in room.values())


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _replaced(values: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    filled = [*values]
    for place, value in zip(places, new, strict=True):
        filled[place] = value
    return filled


_CLOSES_OVER = (
    "closes over a tensor that is differentiated or batched, which is lost under a transform: pass "
    "it as an argument, as in ps.remat(block)(params, x), not ps.remat(lambda x: block(params, "
    "x))(x); or detach it, if it is a constant"
)
_KEYED = "is inside of a module that draws by key=: under a transform, call ps.remat around apply"
_DIFFERENTIATES = (
    "calls torch.func.grad, vjp or the like, which no checkpoint takes outside of transforms: call "
    "ps.remat inside of what is differentiated, or torch.autograd.grad(..., create_graph=True)"
)
_WRITTEN = "writes to one of its arguments in place, and would do so again: compute a new tensor"
_VIEW = (
    "returns a view of an argument, or of another result, and what is written to one would be lost "
    "to the other under a transform: return a clone, or make the view outside of it"
)


def _refused(fn: object, why: str) -> ValueError:
    return ValueError(f"{getattr(fn, '__qualname__', fn)}, under ps.remat, {why}")
