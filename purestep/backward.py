"""One microbatch's backward pass, into sums that are there already.

Where nobody transforms a step, autograd adds each gradient to its sum while the pass still runs, so that one
tree of gradients is alive, not two. The leaves belong to one microbatch alone: hooks that a loss puts on them,
or a backward pass of its own, end with it and never see the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from purestep import tree
from purestep.torch_internals import (
    accumulate_hooks,
    function_mode,
    functions_mark,
    holds_tensors,
    run_backward,
    saved_tensors_hooks,
    storage_address,
    storage_use_count,
    without_function_mode,
)


class GradientSums:
    """The sum of each leaf's gradients, None where none has come yet; in the leaf's buffer of ``out``, where it has one.

    ``direct`` says of each whether autograd itself may add to it: one of the leaf's dtype and memory order. ``all_direct``:
    of all, in memory of autograd's own.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        out: Sequence[Tensor | None] | None = None,
    ) -> None:
        self.values: list[Tensor | None] = [None] * len(leaves)
        self._leaves, self.dtypes, self.out = leaves, dtypes, out
        self.direct = [leaf.dtype == dtype for leaf, dtype in zip(leaves, dtypes, strict=True)]
        if out is not None:
            for index, (leaf, place) in enumerate(zip(leaves, out, strict=True)):
                if place is not None:
                    self.direct[index] &= place.is_contiguous() and leaf.is_contiguous()
        self.all_direct = out is None and all(self.direct)

    def add_(self, index: int, grad: Tensor, *, copy: bool = False) -> Tensor:
        """Adds a gradient that autograd has handed over; ``copy`` where a hook of the loss's may have kept it."""
        so_far = self.values[index]
        if so_far is None:
            grad = grad.to_dense() if grad.is_sparse else grad
            if (place := self.buffer(index)) is not None:
                so_far = place.copy_(grad)
            elif copy or grad.dtype != self.dtypes[index]:
                so_far = grad.to(self.dtypes[index], copy=True)
            else:
                so_far = _unshared(grad)
            self.values[index] = so_far
        elif so_far is not grad:
            so_far.add_(grad)
        return so_far

    def buffer(self, index: int) -> Tensor | None:
        """The one that this leaf has."""
        return None if self.out is None else self.out[index]

    def begun(self) -> list[Tensor] | None:
        """All sums so far, to be written to; None where nothing has been added yet, and no buffer is given."""
        empty = self.out is None and all(value is None for value in self.values)
        return None if empty else self._all()

    def begin(self, made: Sequence[Tensor]) -> None:
        """Takes all sums, which a compiled graph has made. It may have made one tensor for several leaves."""
        last = {id(total): index for index, total in enumerate(made)}
        if len(last) < len(made):
            made = [
                total if last[id(total)] == index else total.clone()
                for index, total in enumerate(made)
            ]
        if not _are_apart(made):
            made = [
                total.clone() if _overlaps_itself(total) else _unshared(total) for total in made
            ]
        self.values = [*made]

    def _all(self) -> list[Tensor]:
        return [
            self._zeros(index) if value is None else value
            for index, value in enumerate(self.values)
        ]

    def _zeros(self, index: int) -> Tensor:
        if (place := self.buffer(index)) is not None:
            return place.zero_()
        return torch.zeros_like(self._leaves[index], dtype=self.dtypes[index])

    def add(self, grads: list[Tensor], *, copy: bool) -> None:
        """Adds gradients that a reverse mode has returned, and lets go of each at once."""
        while grads:
            grad = grads.pop()
            self.plus(len(grads), grad, copy=copy)

    def plus(self, index: int, grad: Tensor, *, copy: bool = False) -> None:
        """Adds a gradient to a new sum, so that both may be recorded."""
        so_far = self.values[index]
        # What a reverse mode of the user's returns may be a buffer of theirs, and sums are written to.
        grad = grad.to_dense() if grad.is_sparse else grad
        grad = grad.to(self.dtypes[index], copy=so_far is None and copy)
        self.values[index] = grad if so_far is None else so_far + grad

    def taken(self, index: int) -> Tensor | None:
        """The sum of one leaf, which is forgotten here."""
        total, self.values[index] = self.values[index], None
        return total

    def filled(self) -> list[Tensor]:
        """The sums, with zeros where no gradient came, in the buffers that they belong into."""
        return self._all() if self.out is None else [*map(self.final, range(len(self.values)))]

    def final(self, index: int) -> Tensor:
        """The sum of one leaf, in the same way."""
        value, place = self.values[index], self.buffer(index)
        if value is None:
            return self._zeros(index)
        if place is None or value is place:
            return value
        if value.requires_grad:
            raise ValueError(
                "params or a microbatch require grad, and buffers given as out= (gradient buckets of ranks, "
                "say) cannot record the gradients: detach them"
            )
        return place.copy_(value)


_requires_grad = attrgetter("requires_grad")

TWICE_COMPILED = "CompiledFunctionBackwardBackward"
"""The node that ``torch.compile`` puts where its backward pass would be differentiated: it raises. torch defines a class anew for each."""


def own_leaves(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Leaves with the same values, for one microbatch: what a loss does to them ends with it."""
    return [leaf.detach().requires_grad_() for leaf in leaves]


def backward(
    terms: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    leaves: Sequence[Tensor],
    sums: GradientSums,
    announce: Callable[[int], None] | None = None,
    *,
    mark: object,
) -> bool:
    """Adds the gradients of Σ term · cotangent to the sums, and writes to no other ``.grad`` than that of ``leaves``.

    ``announce`` is called with a leaf's position when its sum is final, while the pass goes on; ``mark`` is the
    ``functions_mark`` from before the terms were computed. Returns whether any leaf has been given a gradient.
    """
    roots = [pair for pair in zip(terms, cotangents, strict=True) if pair[0].requires_grad]
    if not roots:
        return False
    check_twice_differentiable([term for term, _ in roots], mark)
    # To the sums of these leaves autograd must not add. A hook of the loss's sees this microbatch's gradient alone.
    apart: Collection[int] = ()
    if any(map(accumulate_hooks, leaves)):
        apart = {index for index, leaf in enumerate(leaves) if accumulate_hooks(leaf)}
    # Where tensors have no addresses, a gradient may be one number for all elements, to which autograd adds once for each.
    if leaves and not tree.has_address(leaves[0]):
        apart = range(len(leaves))
    # A leaf that requires no gradient is frozen by the loss.
    wanted = tuple(filter(_requires_grad, leaves))
    came: set[int] = set()
    if sums.all_direct and not apart and announce is None and len(wanted) == len(leaves):
        for leaf, so_far in zip(leaves, sums.values, strict=True):
            leaf.grad = so_far
    else:
        _watch(leaves, sums, apart, came, announce)

    try:
        with _Recomputation(leaves):
            # ``torch.autograd.backward`` would leave the mode above before it begins.
            run_backward(
                *zip(*roots, strict=True),
                False,  # retain_graph
                False,  # create_graph
                wanted,
                allow_unreachable=True,
                accumulate_grad=True,
            )
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise ValueError(
            "a checkpoint inside loss_fn runs a backward pass of its own, which writes to whatever requires grad: "
            "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        ) from error
    if any(value is None for value in sums.values):
        for index, (leaf, so_far) in enumerate(zip(leaves, sums.values, strict=True)):
            if so_far is None and (grad := leaf.grad) is not None:
                sums.add_(index, grad)
    for leaf in leaves:
        leaf.grad = None  # A loss that keeps its leaves does not get hold of the sums.
    return bool(came) or any(value is not None for value in sums.values)


def _watch(
    leaves: Sequence[Tensor],
    sums: GradientSums,
    apart: Collection[int],
    came: set[int],
    announce: Callable[[int], None] | None,
) -> None:
    """Adds to the sums, by hooks of its own, what autograd cannot add, or what somebody waits for; ``came`` says of which leaves."""

    def arrived(index: int, direct: bool, leaf: Tensor) -> None:
        if leaf.grad is None:
            return
        total = sums.add_(index, leaf.grad, copy=not direct)
        # What has been announced is final, and may be on its way already.
        leaf.grad = total if direct and announce is None else None
        if announce is not None:
            if index in came:
                raise RuntimeError(
                    f"leaf {index} of params was given a gradient twice in one backward pass, and the first was on "
                    "its way to the other ranks already: a torch.autograd.Function of the loss runs a backward "
                    "pass of its own; let it return the gradients instead"
                )
            came.add(index)
            del total
            announce(index)
        came.add(index)

    for index, (leaf, so_far) in enumerate(zip(leaves, sums.values, strict=True)):
        direct = sums.direct[index] and index not in apart
        # This also drops what a backward pass of the loss's own has left there.
        leaf.grad = so_far if direct else None
        begins_in_buffer = so_far is None and sums.buffer(index) is not None
        if (not direct or begins_in_buffer or announce is not None) and leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(partial(arrived, index, direct))


def graph_below(tensors: Sequence[Tensor]) -> set[Any]:
    """The nodes of what autograd has recorded of these."""
    seen: set[Any] = {each.grad_fn for each in tensors if each.grad_fn is not None}
    todo = [*seen]
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)
    return seen


def check_twice_differentiable(ends: Sequence[Tensor], mark: object) -> None:
    """Refuses a loss that needs a second derivative which nobody can give; ``mark`` is the ``functions_mark`` from before.

    Its graph holds a node that would say so. But such a node does not lead to the leaves, and the engine, which is told
    for which leaves it runs, leaves out whatever does not: the gradient would be wrong without a word.
    """
    # Where no class has been defined since, there is no such node, and the graph need not be searched.
    if functions_mark() == mark:
        return
    if TWICE_COMPILED in {type(node).__name__ for node in graph_below(ends)}:
        raise ValueError(
            "loss_fn differentiates, with create_graph=True, what torch.compile has compiled, which cannot be "
            "differentiated a second time: leave torch.compile, and compile=, out of it"
        )


class _Recomputation(TorchFunctionMode):
    """Refuses a checkpoint that recomputes with a module's own parameters.

    ``torch.func.functional_call`` gives a module its own parameters back before the backward pass begins, so
    a checkpoint inside of it computes with those again. Whether the forward pass had them, too, cannot be told
    from here, so no ``torch.nn.Parameter`` takes part in recomputation, but for one that shares a leaf's memory.

    Recomputation is what calls torch with gradients enabled, or with hooks on what is saved. In a backward pass
    that is rare, and nothing else pays for this.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        super().__init__()
        self._leaves = leaves
        self._hooks = saved_tensors_hooks(False)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        hooks = saved_tensors_hooks(False)
        if torch.is_grad_enabled() or hooks != self._hooks:
            for value in tree.leaves_of((args, kwargs)):
                if isinstance(value, torch.nn.Parameter) and not self._is_ours(value):
                    raise ValueError(
                        f"a checkpoint inside loss_fn recomputes with a module's own parameter, of shape "
                        f"{tuple(value.shape)}: inside of torch.func.functional_call that is not the one that the forward "
                        "pass had. Take params, apply = ps.from_module(module), and call apply(params, ...) instead"
                    )
        return func(*args, **(kwargs or {}))

    def _is_ours(self, value: Tensor) -> bool:
        return any(tree.address(value) == tree.address(leaf) for leaf in self._leaves)


def recomputing() -> AbstractContextManager[object]:
    """Within it, what is computed again was given all that it depends on, and need not be looked at; a compiler may see to it."""
    watched = isinstance(function_mode(), _Recomputation)
    return without_function_mode() if watched else nullcontext()


def _unshared(grad: Tensor) -> Tensor:
    """The gradient in memory that is nobody else's, so that it can be added to.

    The first gradient of a leaf may be a view of what other leaves were given too: of the gradient of
    ``torch.stack(leaves).sum(0)``, say.
    """
    if type(grad) is not Tensor and holds_tensors(grad):
        return grad.clone()  # Who shares the memory of the tensors inside of it cannot be seen.
    owners: int = storage_use_count(storage_address(grad.untyped_storage()))
    return grad.clone() if owners > 2 else grad  # its own, and the one that we ask


def _are_apart(grads: Sequence[Tensor]) -> bool:
    """Whether each is the only one in its storage, and has an element in each of its places: nearly always, and soon told."""
    if not tree.are_tensors(grads):
        return False
    storages = map(storage_address, map(Tensor.untyped_storage, grads))
    return {*map(storage_use_count, storages)} <= {2} and all(map(Tensor.is_contiguous, grads))


def _overlaps_itself(grad: Tensor) -> bool:
    """Whether elements share memory: those of a compiler's gradient may be one number."""
    return len(tree.span(grad)) > 1
