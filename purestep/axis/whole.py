"""A tensor from its pieces, and the pieces of a sum over ranks: by the laws, under any transform."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from purestep.axis.collectives import all_gather, psum_scatter
from purestep.pieces import Place


def whole(piece: Tensor, place: Place) -> Tensor:
    """All ranks' pieces in one, by ``all_gather``."""
    filled = filled_up(piece, place.dim, place.length)
    # Pieces are filled up behind their last entry, and all that are shorter come last.
    gathered: Tensor = all_gather(filled, place.axis, place.dim, tiled=True)
    return gathered.narrow(place.dim, 0, place.shape[place.dim]).contiguous()


def scattered(terms: Tensor, place: Place) -> Tensor:
    """This rank's piece of the sum over ranks, by ``psum_scatter``: the transpose of ``whole``."""
    filled = filled_up(terms, place.dim, place.length * place.axis.size)
    piece: Tensor = psum_scatter(filled, place.axis, place.dim, tiled=True)
    return piece.narrow(place.dim, 0, place.piece_shape[place.dim])


def filled_up(x: Tensor, dim: int, length: int) -> Tensor:
    """The tensor with zeros behind it, so that it is that long."""
    missing = length - x.shape[dim]
    return functional.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x
