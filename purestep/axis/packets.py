"""Pieces of several leaves in one collective: to be gathered, and to be scattered.

A leaf in n pieces is n rows, one for each rank: its entries along the dimension that is cut, filled up with zeros. Rows of small
leaves travel side by side; a large leaf travels alone, and then nothing is copied where it is cut along its first
dimension into equal pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from purestep.axis.queue import Load
from purestep.axis.whole import filled_up
from purestep.pieces import Place

if TYPE_CHECKING:
    from purestep.axis.ranks import Ranks, Wait


class Packet(NamedTuple):
    """Leaves whose rows travel side by side."""

    axis: Ranks
    places: dict[int, Place]
    dtype: torch.dtype
    device: torch.device

    @property
    def widths(self) -> list[int]:
        """How many elements a row has of each leaf."""
        return [_width(place) for place in self.places.values()]


def packets(
    places: Mapping[int, Place], dtypes: Sequence[torch.dtype], device: torch.device, most: int
) -> list[Packet]:
    """The leaves in packets of at most so many bytes, if not of a single leaf, and of at most ``bucket_bytes``; last first."""
    made: list[Packet] = []
    room: dict[Any, int] = {}
    latest: dict[Any, Packet] = {}
    for at, place in reversed([*places.items()]):
        axis: Ranks = place.axis
        size = _width(place) * axis.size * dtypes[at].itemsize
        kind = axis, dtypes[at]
        if size > room.get(kind, -1):
            latest[kind] = Packet(axis, {}, dtypes[at], device)
            room[kind] = min(most, axis.bucket_bytes)
            made.append(latest[kind])
        latest[kind].places[at] = place
        room[kind] -= size
    return made


def gathered(packets: Sequence[Packet], pieces: Sequence[Tensor]) -> dict[int, Tensor]:
    """The whole leaves, by their positions."""
    return begin_gather(packets, pieces)()


def begin_gather(
    packets: Sequence[Packet], pieces: Sequence[Tensor]
) -> Callable[[], dict[int, Tensor]]:
    """Begins to gather them; returns what waits for them."""
    begun = [(packet.places, _begin_gather(packet, pieces)) for packet in packets]

    def finish() -> dict[int, Tensor]:
        return {
            at: leaf for places, leaves in begun for at, leaf in zip(places, leaves(), strict=True)
        }

    return finish


def _begin_gather(packet: Packet, pieces: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    axis = packet.axis
    rows = [_row(pieces[at], place) for at, place in packet.places.items()]
    row = rows[0] if len(rows) == 1 else torch.cat(rows)
    gathered = row.new_empty(axis.size, row.numel())
    wait = axis.launch("all_gather", row, gathered) if row.numel() else _nothing

    def finish() -> list[Tensor]:
        wait()
        blocks = gathered.split(packet.widths, 1)
        places = packet.places.values()
        return [_from_rows(block, place) for block, place in zip(blocks, places, strict=True)]

    return finish


class Scatters:
    """Whole gradients, which leave as soon as a packet of them is complete; each rank gets its piece of their sum over ranks.

    ``give`` the gradient of each leaf before its load leaves; none at all counts as zeros. When a load has been waited for,
    ``take`` has been called with each leaf's piece.
    """

    def __init__(self, packets: Sequence[Packet], take: Callable[[int, Tensor], object]) -> None:
        self._given: dict[int, Tensor] = {}
        self._packets, self._take = packets, take

    def loads(self) -> list[Load]:
        """One for each packet."""
        return [
            Load([*packet.places], packet.axis, partial(self._launch, packet))
            for packet in self._packets
        ]

    def give(self, at: int, grad: Tensor) -> None:
        """The gradient of a leaf, which is not written to before its load has been waited for."""
        self._given[at] = grad

    def _launch(self, packet: Packet) -> Wait:
        axis, places = packet.axis, packet.places
        rows = [self._rows(at, packet) for at in places]
        together = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        row = together.new_empty(together.shape[1])
        wait = axis.launch("psum_scatter", together.contiguous(), row) if row.numel() else _nothing

        def finish() -> None:
            wait()
            for part, (at, place) in zip(row.split(packet.widths), places.items(), strict=True):
                self._take(at, _from_row(part, place))

        return finish

    def _rows(self, at: int, packet: Packet) -> Tensor:
        place, grad = packet.places[at], self._given.pop(at, None)
        if grad is None:
            shape = packet.axis.size, _width(place)
            return torch.zeros(shape, dtype=packet.dtype, device=packet.device)
        entries = grad.to(packet.dtype).movedim(place.dim, 0)
        filled = filled_up(entries, 0, place.length * packet.axis.size)
        return filled.reshape(packet.axis.size, _width(place))


def _nothing() -> None:
    """There is nothing to send."""


def _width(place: Place) -> int:
    return place.length * torch.Size(_others(place)).numel()


def _others(place: Place) -> tuple[int, ...]:
    return place.shape[: place.dim] + place.shape[place.dim + 1 :]


def _row(piece: Tensor, place: Place) -> Tensor:
    """The piece as a row."""
    return filled_up(piece.detach().movedim(place.dim, 0), 0, place.length).reshape(-1)


def _from_row(row: Tensor, place: Place) -> Tensor:
    """The piece that is this row."""
    piece = row.view(place.length, *_others(place))
    return piece.narrow(0, 0, place.piece_shape[place.dim]).movedim(0, place.dim)


def _from_rows(rows: Tensor, place: Place) -> Tensor:
    """The whole leaf that is in these rows."""
    filled = rows.reshape(len(rows) * place.length, *_others(place))
    whole = filled.narrow(0, 0, place.shape[place.dim])
    return whole.movedim(0, place.dim).contiguous()
