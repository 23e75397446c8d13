"""Rematerialisation: what a function computes on the way is computed again instead of kept.

One ``autograd.Function`` serves the eager backward pass, every transform of ``torch.func`` and the compiler. It keeps what
the function was given; its backward pass runs the function again and differentiates that.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from functools import partial
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from purestep import tree
from purestep.axis.vmap import bound_as, mapping
from purestep.checks import recomputing
from purestep.modules import keyed
from purestep.torch_internals import (
    in_forward_mode,
    is_active,
    is_watched,
    is_wrapped,
    transformed,
    unwrapped,
    version,
)
from purestep.types import Tree

P = ParamSpec("P")
R = TypeVar("R")

_State: TypeAlias = Callable[[], Tensor]
_Move: TypeAlias = Callable[[Tensor], object]


def remat(fn: Callable[P, R]) -> Callable[P, R]:
    """``fn``, of which a backward pass keeps the arguments alone: what ``fn`` computes on the way is computed again.

    A network of L equal blocks, each under ``remat``, holds L inputs of blocks and what one block computes, where it
    held what all blocks compute; it takes one more forward pass. Values are those of ``fn``, to the bit. So are
    gradients, where each argument is used by one such function alone; else their sums are added up in another order.

    * **Arguments and results** are trees. Tensors among them are differentiated, everything else is handed through. What ``fn``
      closes over is a constant, as in ``torch.func``'s own functions: a tensor there that somebody differentiates or batches is
      refused, since its gradient would be lost. Pass it: ``remat(block)(params, x)``, not ``remat(lambda x: block(params, x))``.
    * **Everywhere**: in a step, in ``torch.autograd`` (``create_graph=True`` included), under ``grad``, ``vjp``, ``vmap``, ``jvp`` and what is
      made of them, inside of itself, and under ``torch.compile``, where ``fn`` may close over what it likes. There, what draws random
      numbers is kept: such a function runs as it is.
    * **Random numbers** of torch's global generators, and of a ``torch.Generator`` among the arguments, are drawn
      again as they were; the generators are left as one call of ``fn`` leaves them. Those of a generator that ``fn`` closes over
      are not.
    * **Collectives** in ``fn`` are called again in the backward pass, by all ranks alike.
    * ``fn`` must not write to its arguments, and must do the same when it is called again.

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
        if torch.compiler.is_dynamo_compiling():
            # Makes an operation for the compiler on import, which only a compiler needs to pay for.
            from purestep import region

            compiled: R = region.rematerialised(fn, *args, **kwargs)
            return compiled
        if not torch.is_grad_enabled() and not in_forward_mode():
            return fn(*args, **kwargs)  # Nothing is recorded, so nothing is kept.
        result: R = called(fn, args, kwargs)
        return result

    return run


def called(fn: Callable[..., Any], args: Any, kwargs: Any, *, traced: bool = False) -> Any:
    """``fn(*args, **kwargs)`` under rematerialisation; ``traced``: while a compiler records its operations."""
    call = _Call(fn, args, kwargs, traced)
    return call.record.result(_apply(call, *call.operands()))


class _Remat(Function):
    """Tensors to tensors: those of a ``_Call``."""

    @staticmethod
    def forward(call: _Call, *given: Tensor) -> tuple[Tensor, ...]:
        return call.first(given)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *given = inputs
        ctx.save_for_backward(*given)
        ctx.save_for_forward(*given)
        # A zero where no cotangent comes could turn into a NaN on its way back.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        wanted = [index for index, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        arrived = [index for index, each in enumerate(cotangents) if each is not None]
        if not arrived:
            return (None,) * len(ctx.needs_input_grad)
        # Wrappers of a transform that has ended are unwrapped by whatever operation comes first.
        given = [each.view_as(each) for each in ctx.saved_tensors]
        seeds = [each.view_as(each) for each in cotangents if each is not None]
        if ctx.call.traced:
            given = _after(seeds[0], given)
        reverse = _by_engine if tree.untransformed() else _by_transform
        grads = reverse(ctx.call, given, wanted, arrived, seeds)
        return (None, *replaced([None] * len(given), wanted, grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        given, call = ctx.saved_tensors, ctx.call
        moving = [index for index, each in enumerate(tangents[1:]) if each is not None]
        smooth = call.record.smooth
        pushed: Sequence[Tensor] = ()
        if smooth:

            def along(*moved: Tensor) -> tuple[Tensor, ...]:
                made = call.again(replaced(given, moving, moved))
                return tuple([made[index] for index in smooth])

            primals = tuple([given[index] for index in moving])
            directions = tuple([tangents[1 + index] for index in moving])
            forward: Callable[..., Any] = torch.func.jvp
            _, pushed = forward(along, primals, directions)
        return tuple(replaced([None] * call.record.made, smooth, pushed))

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *given: Tensor) -> Any:
        # Not torch's own rule, which counts the gradient of what is not batched once for each example.
        made = _apply(call.batched(in_dims[1:], info.randomness), *given)
        return made, (0,) * len(made)


_apply: Callable[..., tuple[Tensor, ...]] = _Remat.apply


def _by_engine(
    call: _Call,
    given: Sequence[Tensor],
    wanted: Sequence[int],
    arrived: Sequence[int],
    seeds: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """The gradients of those wanted, by autograd itself; recorded where somebody may differentiate once more."""
    recorded = torch.is_grad_enabled() and tree.any_requires_grad([*given, *seeds])
    inputs = list(given) if recorded else tree.cut_off(given)
    for index in wanted:
        inputs[index].requires_grad_()
    with recomputing(), torch.enable_grad():
        made = call.again(inputs)
        pairs = [(made[index], seed) for index, seed in zip(arrived, seeds, strict=True)]
        pairs = [(each, seed) for each, seed in pairs if each.requires_grad]
        if not pairs:
            return [None] * len(wanted)
        ends, starts = zip(*pairs, strict=True)
        return torch.autograd.grad(
            ends, [inputs[index] for index in wanted], starts, create_graph=recorded, allow_unused=True
        )  # fmt: skip


def _by_transform(
    call: _Call,
    given: Sequence[Tensor],
    wanted: Sequence[int],
    arrived: Sequence[int],
    seeds: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """The same, under transforms."""

    def of_wanted(*chosen: Tensor) -> tuple[Tensor, ...]:
        made = call.again(replaced(given, wanted, chosen))
        return tuple([made[index] for index in arrived])

    vjp: Callable[..., Any] = torch.func.vjp
    _, pull = vjp(of_wanted, *[given[index] for index in wanted])
    grads: Sequence[Tensor] = pull(tuple(seeds), retain_graph=False)
    return grads


def _after(seed: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
    """The same values, which a compiler cannot take for those of the forward pass, nor compute with before ``seed`` is there."""
    if seed.numel() == 0:
        return [*given]
    here = seed.reshape(-1)[0] == 0
    # What no vmap batches stays so: to batch parameters would make copies of them.
    return [
        each if is_wrapped(here) and not is_wrapped(each) else torch.where(here, each, each)
        for each in given
    ]


def replaced(values: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """The values, with new ones at these places.

    >>> replaced("abc", [2, 0], "xy")
    ['y', 'b', 'x']
    """
    filled = [*values]
    for place, value in zip(places, new, strict=True):
        filled[place] = value
    return filled


def _is_smooth(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Record:
    """What is known of a call once it has run: what it gives beside tensors, and what surrounded it."""

    autocast: _Autocast
    keyed: Callable[[], AbstractContextManager[object]]
    random: _Random | None = None

    def note(self, output: Tree) -> tuple[Tensor, ...]:
        """The tensors that it gives."""
        leaves, self._structure = tree.flatten(output)
        self._places, made = _tensors(leaves)
        self._rest = replaced(leaves, self._places, [None] * len(made))
        self.made, self.smooth = len(made), [i for i, each in enumerate(made) if _is_smooth(each)]
        return made

    def result(self, made: Sequence[Tensor]) -> Tree:
        """What it gives, over these tensors."""
        return tree.unflatten(self._structure, replaced(self._rest, self._places, made))


class _Call:
    """One call of a function, as one of tensors to tensors, which can be done again."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any, traced: bool) -> None:
        self._fn, self.traced, self.record = fn, traced, _Record()
        self._leaves, self._structure = tree.flatten((args, kwargs))
        self._places, _ = _tensors(self._leaves)
        # Axes that map hold a tensor as well, which says of each rank which it is.
        self._axes = [] if traced else mapping()
        self._transformed = transformed()
        self._batched: list[tuple[Sequence[int | None], str]] = []

    def operands(self) -> list[Tensor]:
        """The tensors, of which it keeps no hold."""
        operands = [self._leaves[place] for place in self._places]
        self._leaves = replaced(self._leaves, self._places, [None] * len(operands))
        return operands + [axis.index for axis in self._axes]

    def batched(self, in_dims: Sequence[int | None], randomness: str) -> _Call:
        """The same call of all examples of a ``vmap``, of which there is one record."""
        batched = copy(self)
        batched._batched = [*self._batched, (in_dims, randomness)]
        return batched

    def first(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors that it gives. Of those that it is given, nothing is recorded."""
        given = tree.cut_off(given)
        self.record.autocast, self.record.keyed = _Autocast(given), keyed.again()
        if self.traced:
            return self._run(given, self._leaves)
        random, versions = _Random(given, self._leaves), self._versions(given)
        with ExitStack() as within:
            # What differentiates inside of ``fn`` finds gradients enabled.
            within.enter_context(torch.enable_grad())
            if self._transformed:
                within.enter_context(_Watch())
            made = self._run(given, self._leaves)
        if versions != self._versions(given):
            raise ValueError(
                f"{getattr(self._fn, '__qualname__', self._fn)} wrote to one of its arguments in place, and would do so again "
                "when ps.remat computes it again: compute a new tensor"
            )
        self.record.random = random.settled()
        below = _leaves_below(made)
        made = tuple(tree.cut_off(made))
        # A leaf that ``fn`` itself has made is gone with what was recorded; one that it closes over is still there.
        if any(leaf() is not None for leaf in below):
            raise _closes_over()
        return made

    def _versions(self, given: Sequence[Tensor]) -> list[int]:
        """How often each was written to, where that is counted."""
        counted = not (self._transformed or any(map(Tensor.is_inference, given)))
        return [version(each) for each in given] if counted else []

    def again(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The same once more, with all that it met before."""
        random = self.record.random
        with ExitStack() as within:
            within.enter_context(self.record.autocast.again())
            within.enter_context(self.record.keyed())
            leaves = within.enter_context(random.again(self._leaves)) if random else self._leaves
            return self._run(given, leaves)

    def _run(self, given: Sequence[Tensor], leaves: Sequence[Any]) -> tuple[Tensor, ...]:
        def run(*given: Tensor) -> tuple[Tensor, ...]:
            filled = replaced(leaves, self._places, given[: len(self._places)])
            args, kwargs = tree.unflatten(self._structure, filled)
            with bound_as(self._axes, given[len(self._places) :]):
                return self.record.note(self._fn(*args, **kwargs))

        batched: Callable[..., tuple[Tensor, ...]] = run
        for in_dims, randomness in self._batched:
            batched = torch.vmap(batched, tuple(in_dims), 0, randomness)
        return batched(*given)


def _tensors(leaves: Sequence[Any]) -> tuple[list[int], tuple[Tensor, ...]]:
    """Which of the leaves are tensors, and these."""
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    return places, tuple([leaves[place] for place in places])


def _leaves_below(made: Sequence[Tensor]) -> list[weakref.ref[Tensor]]:
    """The tensors at which the graph of these ends."""
    ends = [each for each in made if each.requires_grad and each.is_leaf]
    ends += [node.variable for node in graph_below(made) if hasattr(node, "variable")]
    return [weakref.ref(each) for each in ends]


def graph_below(tensors: Sequence[Tensor]) -> set[Any]:
    """The nodes of the graph that autograd has recorded of these."""
    seen: set[Any] = {each.grad_fn for each in tensors if each.grad_fn is not None}
    todo = [*seen]
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)
    return seen


def _closes_over() -> ValueError:
    return ValueError(
        "a function under ps.remat closes over a tensor that is differentiated, whose gradient would be lost: pass "
        "it as an argument, as in ps.remat(block)(params, x), not ps.remat(lambda x: block(params, x))(x); or detach it, if it is "
        "a constant"
    )


class _Watch(TorchFunctionMode):
    """Refuses what a transform tracks, but for what has been made within: the function was given none of it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree.leaves_of((args, kwargs)):
            if isinstance(leaf, Tensor) and not self._is_own(leaf) and _is_foreign(leaf):
                raise _closes_over()
        result = func(*args, **(kwargs or {}))
        for leaf in tree.leaves_of(result):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self._made[id(leaf)] = weakref.ref(leaf)
        return result

    def _is_own(self, leaf: Tensor) -> bool:
        return id(leaf) in self._made and self._made[id(leaf)]() is leaf


def _is_foreign(tensor: Tensor) -> bool:
    """Whether it requires grad, or belongs to a transform that is not active here."""
    while is_wrapped(tensor):
        if tensor.requires_grad or not is_active(tensor):
            return True
        tensor = unwrapped(tensor)
    return tensor.requires_grad


class _Autocast:
    """What autocast was told, on the host and where the tensors are."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self._told = self._now({"cpu", *(each.device.type for each in given)})

    def _now(self, kinds: set[str]) -> dict[str, tuple[bool, torch.dtype, bool]]:
        cached = torch.is_autocast_cache_enabled()
        return {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached)
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        }

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within it, autocast does what it did."""
        if not any(enabled for enabled, *_ in self._told.values()) and self._told == self._now(
            {*self._told}
        ):
            yield
            return
        with ExitStack() as within:
            for kind, (enabled, dtype, cached) in self._told.items():
                within.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached)
                )
            try:
                yield
            finally:
                torch.clear_autocast_cache()  # It would keep the leaves that it has cast.


class _Random:
    """Where generators of random numbers stood before a call: torch's own that it moved, and those that it was given."""

    def __init__(self, given: Sequence[Tensor], leaves: Sequence[Any]) -> None:
        self._given = {
            index: leaf.get_state()
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Generator)
        }
        devices = {each.device for each in given if each.device.type != "cpu"}
        self._states = [(state(), state, move) for state, move in _generators(devices)]

    def settled(self) -> _Random:
        """After the call: what it has not moved is nothing to it, and is left alone, which other threads may draw from."""
        if not is_watched():
            self._states = [each for each in self._states if not torch.equal(each[0], each[1]())]
        return self

    @contextmanager
    def again(self, leaves: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Within it, the same numbers are drawn; yields the leaves, with generators that nobody else has."""
        places, generators = [*self._given], []
        for place, state in self._given.items():
            generators.append(torch.Generator(leaves[place].device).set_state(state))
        now = [(state(), move) for _, state, move in self._states]
        try:
            for before, _, move in self._states:
                move(before)
            yield replaced(leaves, places, generators)
        finally:
            for state_now, move in now:
                move(state_now)


def _generators(devices: Iterable[torch.device]) -> Iterator[tuple[_State, _Move]]:
    """For each of torch's own generators, what tells its state, and what sets it."""
    yield torch.get_rng_state, torch.set_rng_state
    for device in devices:
        module: Any = getattr(torch, device.type, None)
        if hasattr(module, "get_rng_state"):
            yield partial(module.get_rng_state, device), partial(_set, module, device)


def _set(module: Any, device: torch.device, state: Tensor) -> None:
    module.set_rng_state(state, device)
