"""Whole tensors that a loss gathers, which are not kept for its backward pass, but gathered again when that needs them.

What an operation keeps for its backward pass is, of a whole that was gathered or a view of it, which gather it came from. So one
block of a network is whole at a time; while the backward pass goes through it, the block before it is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from purestep import tree
from purestep.axis.packets import Scatters, begin_gather, packets
from purestep.axis.queue import Queue
from purestep.axis.whole import scattered
from purestep.pieces import Place
from purestep.torch_internals import base_of, in_backward, version
from purestep.tree import accumulation_dtype

PACKET_BYTES, MOST = 2**18, 2
"""The size of packets, and how many of gradients are under way at once: what is packed is copied, so small ones hold less."""

Finish: TypeAlias = Callable[[], list[Tensor]]


class Gather:
    """Pieces that are gathered at once, by ranks that run programs of their own."""

    def __init__(self, pieces: Sequence[Tensor], places: Sequence[Place]) -> None:
        self._pieces = [piece.detach() for piece in pieces]
        self._places = dict(enumerate(places))
        dtypes, device = [piece.dtype for piece in pieces], pieces[0].device
        self._packets = packets(self._places, dtypes, device, PACKET_BYTES)

    def begin(self) -> Finish:
        """Begins to gather them; returns what waits for the wholes."""
        finish = begin_gather(self._packets, self._pieces)

        def wholes() -> list[Tensor]:
            found = finish()
            return [found[at] for at in self._places]

        return wholes

    def scattered(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The transpose: this rank's pieces of the sums over ranks, each rounded once."""
        dtypes = [accumulation_dtype(piece.dtype) for piece in self._pieces]
        sums = [torch.zeros_like(piece) for piece in self._pieces]
        travelling = packets(self._places, dtypes, sums[0].device, PACKET_BYTES)
        scatters = Scatters(travelling, lambda at, piece: sums[at].copy_(piece))
        for at, grad in enumerate(grads):
            if grad is not None:
                scatters.give(at, grad)
        queue = Queue(scatters.loads(), MOST)
        queue.launch()
        queue.wait()
        return sums

    @property
    def places(self) -> Sequence[Place]:
        """How each of them is spread."""
        return [*self._places.values()]


class _Gathered(Function):
    """Pieces to wholes, where nobody transforms."""

    @staticmethod
    def forward(ctx: Any, gather: Gather, finish: Finish, *pieces: Tensor) -> tuple[Tensor, ...]:
        # Not views of what they came in: of views of them, this is what they are views of.
        wholes = tuple([whole.data for whole in finish()])
        ctx.gather, ctx.versions = gather, [version(whole) for whole in wholes]
        ctx.set_materialize_grads(False)
        return wholes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled() and tree.any_requires_grad([g for g in grads if g is not None]):
            pairs = zip(grads, ctx.gather.places, strict=True)
            return None, None, *[None if g is None else scattered(g, place) for g, place in pairs]
        return None, None, *ctx.gather.scattered(grads)


def wholes(gather: Gather, finish: Finish, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """The wholes of a gather that has begun, recorded for autograd where it records the pieces."""
    if not (torch.is_grad_enabled() and tree.any_requires_grad(pieces)):
        return finish()
    apply: Callable[..., Sequence[Tensor]] = _Gathered.apply
    return apply(gather, finish, *pieces)


class _Recipe(NamedTuple):
    """What is kept of a whole, or of a view of it."""

    gather: Gather
    position: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Regather:
    """Within the block, of wholes that are gathered nothing is kept for a backward pass, which is to end within it."""

    def __init__(self) -> None:
        self._order: dict[Gather, int] = {}
        self._now: tuple[Gather, list[Tensor]] | None = None
        self._ahead: tuple[Gather, Finish] | None = None
        self._within = ExitStack()

    def __enter__(self) -> None:
        saved = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._within.enter_context(saved)

    def __exit__(self, *error: object) -> None:
        self._within.close()
        self._order.clear()
        ahead, self._ahead, self._now = self._ahead, None, None
        if ahead is not None:
            ahead[1]()

    def _pack(self, kept: Tensor) -> Tensor | _Recipe:
        # What is computed again in a backward pass is needed there at once.
        base = base_of(kept)
        whole = kept if base is None else base
        node: Any = whole.grad_fn
        gather = getattr(node, "gather", None)
        if not isinstance(gather, Gather) or in_backward() or kept.dtype != whole.dtype:
            return kept
        position = whole.output_nr
        if version(whole) != node.versions[position]:
            return kept  # The loss has written to it.
        self._order.setdefault(gather, len(self._order))
        offset = int(kept.storage_offset() - whole.storage_offset())
        return _Recipe(gather, position, kept.shape, tuple(kept.stride()), offset)

    def _unpack(self, kept: Tensor | _Recipe) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self._now is None or self._now[0] is not kept.gather:
            self._now = None  # freed before the next is whole
            self._now = kept.gather, self._gathered(kept.gather)
        whole = self._now[1][kept.position]
        return whole.as_strided(kept.shape, kept.stride, whole.storage_offset() + kept.offset)

    def _gathered(self, gather: Gather) -> list[Tensor]:
        """Again. The one that was gathered before it begins, since the backward pass most likely needs it next."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is not gather:
            ahead[1]()
        finish = ahead[1] if ahead is not None and ahead[0] is gather else gather.begin()
        place = self._order[gather]
        if place:
            before = [*self._order][place - 1]
            self._ahead = before, before.begin()
        return finish()
