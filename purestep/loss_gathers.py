"""What a loss gathers by itself, on ranks that run programs of their own: in one order on all of them, forward and backward.

    forward     gather 0, gather 1, ..., gather n
    backward    gather n, gather n-1, scatter n, gather n-2, scatter n-1, ..., scatter 0

Each gather is scattered, whether the loss has used it on this rank or not. Those of ``unshard_each`` are not kept for the backward
pass, but gathered again in it, one ahead: what an operation keeps of such a whole, or of a view of it, is where it came from.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from purestep import tree
from purestep.axis.packets import Scatters, begin_gather, packets
from purestep.axis.queue import Queue
from purestep.axis.whole import scattered
from purestep.backward import GradientSums
from purestep.pieces import Place
from purestep.torch_internals import (
    base_of,
    gradient_hooks,
    in_backward,
    version,
)
from purestep.tree import accumulation_dtype

PACKET_BYTES, MOST = 2**19, 2
"""The size of packets, and how many of gradients are under way at once: what is packed is copied, so small ones hold less."""

Finish: TypeAlias = Callable[[], list[Tensor]]


class LossGathers:
    """The gathers and scatters of the losses of one step. ``number`` tells which they were: the same on ranks that did the same."""

    def __init__(self) -> None:
        self.number = 0

    def note(self, what: str) -> None:
        """One of them begins."""
        self.number = zlib.crc32(what.encode(), self.number)

    @contextmanager
    def microbatch(self, own: Sequence[Tensor], sums: GradientSums) -> Iterator[_Microbatch]:
        """Within it a loss of these leaves is computed, and differentiated into the sums."""
        outer, here = _open(), _Microbatch(self, own, sums)
        _thread.microbatch = here
        try:
            with torch.autograd.graph.saved_tensors_hooks(_pack, here.unpack):
                yield here
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise ValueError(
                'with gather="loss", what a loss gathers is not kept, which torch.func.grad and vjp inside of the loss do not know: '
                'take torch.autograd.grad(..., create_graph=True) there, or gather="microbatch"'
            ) from error
        finally:
            _thread.microbatch = outer
            here.end()


_thread = threading.local()


def _open() -> _Microbatch | None:
    """The microbatch that this thread computes."""
    found: _Microbatch | None = getattr(_thread, "microbatch", None)
    return found


class Together:
    """Pieces that are gathered at once; ``again`` in the backward pass, and not kept for it."""

    def __init__(self, pieces: Sequence[Tensor], places: Sequence[Place], again: bool) -> None:
        self.places, self.again = places, again
        self._pieces = [piece.detach() for piece in pieces]
        self.of = [id(piece) for piece in pieces]
        self._dtypes, self._device = [piece.dtype for piece in pieces], pieces[0].device

    def begin(self) -> Finish:
        """Begins to gather them; returns what waits for the wholes."""
        self._note("all_gather")
        finish = begin_gather(self._packets(self._dtypes), self._pieces)

        def wholes() -> list[Tensor]:
            found = finish()
            return [found[at] for at in range(len(self.places))]

        return wholes

    def scattered(
        self, grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]
    ) -> list[Tensor]:
        """The transpose: this rank's pieces of the sums over ranks, in these dtypes."""
        return self.begin_scatter(grads, dtypes)()

    def begin_scatter(
        self, grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]
    ) -> Finish:
        """Begins that; returns what waits for the pieces."""
        self._note("psum_scatter")
        pairs = zip(self._pieces, dtypes, strict=True)
        sums = [torch.zeros_like(piece, dtype=dtype) for piece, dtype in pairs]
        scatters = Scatters(self._packets(dtypes), lambda at, piece: sums[at].copy_(piece))
        for at, grad in enumerate(grads):
            if grad is not None:
                scatters.give(at, grad.to_dense() if grad.is_sparse else grad)
        queue = Queue(scatters.loads(), MOST)
        queue.launch()

        def finish() -> list[Tensor]:
            queue.wait()
            return sums

        return finish

    def sum_dtypes(self) -> list[torch.dtype]:
        """Those in which gradients are summed that nobody asks for in a dtype."""
        return [accumulation_dtype(dtype) for dtype in self._dtypes]

    def _packets(self, dtypes: Sequence[torch.dtype]) -> Any:
        return packets(dict(enumerate(self.places)), dtypes, self._device, PACKET_BYTES)

    def _note(self, law: str) -> None:
        if (microbatch := _open()) is not None:
            shapes = [(place.shape, place.dim) for place in self.places]
            microbatch.step.note(f"{law} {microbatch.positions(self.of)} {shapes} {self._dtypes}")


def wholes(gather: Together, finish: Finish, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """The wholes of a gather that has begun, recorded for autograd where it records the pieces."""
    if not (torch.is_grad_enabled() and tree.any_requires_grad(pieces)):
        return finish()
    microbatch = None if in_backward() else _open()
    before = microbatch.last if microbatch is not None else None
    apply: Callable[..., Sequence[Tensor]] = _Gathered.apply
    *made, last = apply(gather, finish, microbatch, before, *pieces)
    if microbatch is not None:
        microbatch.add(gather, last)
    return made


class _Gathered(Function):
    """Pieces to wholes, where nobody transforms; and an end of a chain through all gathers, which are so differentiated in one order."""

    @staticmethod
    def forward(
        ctx: Any,
        gather: Together,
        finish: Finish,
        microbatch: _Microbatch | None,
        before: Tensor | None,
        *pieces: Tensor,
    ) -> tuple[Tensor, ...]:
        # Not views of what they came in: of views of them, this is what they are views of.
        wholes = tuple([whole.data for whole in finish()])
        ctx.gather, ctx.versions = gather, [version(whole) for whole in wholes]
        ctx.microbatch = microbatch
        ctx.first = before is None
        ctx.set_materialize_grads(False)
        return (*wholes, torch.zeros(()))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        *grads, _ = cotangents
        gather, microbatch = ctx.gather, ctx.microbatch
        before = None if ctx.first else torch.zeros(())
        if torch.is_grad_enabled() and tree.any_requires_grad([g for g in grads if g is not None]):
            pairs = zip(grads, gather.places, strict=True)
            by_law = [None if g is None else scattered(g, place) for g, place in pairs]
            return None, None, None, before, *by_law
        if microbatch is not None and microbatch.ends:
            return None, None, None, before, *microbatch.scatter(gather, grads)
        return None, None, None, before, *gather.scattered(grads, gather.sum_dtypes())


class _Recipe(NamedTuple):
    """What is kept of a whole, or of a view of it."""

    gather: Together
    position: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _pack(kept: Tensor) -> Tensor | _Recipe:
    base = base_of(kept)
    whole = kept if base is None else base
    node: Any = whole.grad_fn
    gather = getattr(node, "gather", None)
    if not isinstance(gather, Together) or not gather.again or kept.dtype != whole.dtype:
        return kept
    microbatch, position = node.microbatch, whole.output_nr
    # What was gathered before the last one is kept: the backward pass needs it first. And what the loss has written to.
    if microbatch is None or not microbatch.is_last(gather) or in_backward():
        return kept
    if version(whole) != node.versions[position]:
        return kept
    offset = int(kept.storage_offset() - whole.storage_offset())
    return _Recipe(gather, position, kept.shape, tuple(kept.stride()), offset)


class _Microbatch:
    """The gathers of one microbatch."""

    def __init__(self, step: LossGathers, own: Sequence[Tensor], sums: GradientSums) -> None:
        self.step, self._sums = step, sums
        self._own = {id(leaf): (at, leaf) for at, leaf in enumerate(own)}
        self._gathers: list[Together] = []
        self._again: list[Together] = []
        self._coming: dict[Together, Finish] = {}
        self._wholes: dict[Together, list[Tensor]] = {}
        self._scattering: tuple[Finish, dict[int, int]] | None = None
        self.last: Tensor | None = None
        self.ends = False

    def add(self, gather: Together, last: Tensor) -> None:
        """One more, and what the chain of all of them ends in."""
        self._gathers.append(gather)
        self.last = last

    def positions(self, pieces: Sequence[int]) -> list[int]:
        """Which of the step's leaves these are; -1 for what the loss has made of them."""
        return [self._own[piece][0] if piece in self._own else -1 for piece in pieces]

    def is_last(self, gather: Together) -> bool:
        """Whether nothing was gathered after it."""
        # There is none where the loss has kept a whole of an earlier microbatch.
        return bool(self._gathers) and self._gathers[-1] is gather

    def chain(self) -> list[Tensor]:
        """What the backward pass must reach, so that all ranks scatter everything; it begins, and ends the microbatch."""
        self.ends = True
        self._again = [gather for gather in self._gathers if gather.again]
        self._gather_ahead()
        return [] if self.last is None else [self.last]

    def scatter(self, gather: Together, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the wholes to those of the pieces, of which the step's own leaves are added to the sums here, without rounding."""
        dtypes, places = gather.sum_dtypes(), [self._own.get(piece) for piece in gather.of]
        ours = {
            number: place[0]
            for number, place in enumerate(places)
            if place is not None and not gradient_hooks(place[1])
        }
        for number, at in ours.items():
            dtypes[number] = self._sums.dtypes[at]
        self._add_up()
        finish = gather.begin_scatter(grads, dtypes)
        found: list[Tensor | None] = [None] * len(places)
        if len(ours) < len(places):
            pieces = finish()
            found = [None if number in ours else piece for number, piece in enumerate(pieces)]
        self._scattering = finish, ours
        if any(self._sums.buffer(at) is not None for at in ours.values()):
            self._add_up()  # It is summed over further ranks, and announced when this returns.
        if gather.again:
            self._wholes.pop(gather, None)
            if (unused := self._coming.pop(gather, None)) is not None:
                unused()
            self._gather_ahead()
        return found

    def _add_up(self) -> None:
        """Waits for the last scatter, and adds its pieces to the sums."""
        if self._scattering is not None:
            (finish, ours), self._scattering = self._scattering, None
            pieces = finish()
            for number, at in ours.items():
                self._sums.add_(at, pieces[number])

    def _gather_ahead(self) -> None:
        """Of those that the backward pass comes to next, two are whole, or on their way."""
        while self._again and len(self._coming) + len(self._wholes) < 2:
            gather = self._again.pop()
            self._coming[gather] = gather.begin()

    def unpack(self, kept: Tensor | _Recipe) -> Tensor:
        """What an operation has kept for its backward pass."""
        if isinstance(kept, Tensor):
            return kept
        if kept.gather in self._coming:
            self._wholes[kept.gather] = self._coming.pop(kept.gather)()
        # A loss may differentiate before its own backward pass begins.
        wholes = self._wholes.get(kept.gather) or kept.gather.begin()()
        whole = wholes[kept.position]
        return whole.as_strided(kept.shape, kept.stride, whole.storage_offset() + kept.offset)

    def end(self) -> None:
        """Waits for what is still under way, and lets go of everything."""
        self._add_up()
        coming, self._coming = self._coming, {}
        for finish in coming.values():
            finish()
        self._gathers, self._again, self._wholes, self.last = [], [], {}, None
