"""What the ranks of a step tell each other beside gradients: a row of integers each, and a note in need.

Ranks that run programs of their own may hold different numbers of microbatches, or none. They may also go
wrong: another structure, another setting, an exception. Whatever a rank has to say travels in a row that
every rank sends in any case, so that nobody waits for one that will not come.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from purestep import tree
from purestep.axis import Axis, RankError, Ranks, psum
from purestep.tokens import Count, no_count
from purestep.types import Tree

Result = TypeVar("Result")


class Said(NamedTuple):
    """The part of a row that its rank knows without computing anything."""

    failed: bool
    microbatches: int
    floating: bool
    fingerprints: tuple[int, int, int]


WIDTH = 6 + 4
"""Integers in a row: those of ``Said``, then N as an integer and as a float, microbatches, and the loss."""


class Statement(NamedTuple):
    """What a rank brings to a step: its count, its microbatches, and by name what all ranks must share.

    ``weights`` are those that it has counted, one tensor for each microbatch; no other rank hears of them.
    """

    counted: Count
    microbatches: int
    shared: Mapping[str, Tree]
    weights: Sequence[Tensor] = ()


class Agreement(NamedTuple):
    """The global count, this rank's microbatches, and what all ranks said, which raises where they disagree.

    ``weights`` are this rank's own, which it has counted.
    """

    counted: Count
    microbatches: int
    confirm: Callable[[], list[Said]]
    weights: Sequence[Tensor]


def agree(axis: Axis, state: Callable[[], Statement]) -> Agreement:
    """Sums the ranks' counts, and makes sure that they are about to do the same: one small collective.

    Ranks of one program, simulated or compiled, cannot disagree: there it is ``psum``. Elsewhere a
    disagreement, or an exception in ``state``, raises on every rank, and names those that differ. On the
    host that is at once; on a device, where reading would wait, it is when ``confirm`` is called.
    """
    if not isinstance(axis, Ranks) or torch.compiler.is_dynamo_compiling():
        count, microbatches, _, weights = state()
        return Agreement(psum(count, axis), microbatches, list, weights)

    statement, error = attempt(state)
    count, microbatches, shared, weights = statement or Statement(no_count(axis.device), 0, {})
    if statement is not None:
        how = {
            "bucket_bytes": str(axis.bucket_bytes),
            "differentiated": str(not tree.untransformed(shared["params"], count)),
        }
        shared = {**shared, "settings": {**shared["settings"], **how}}
    prints = [fingerprint(value) for value in shared.values()]
    said = says(error, microbatches, count, *prints)
    transformed = not tree.untransformed(count)
    rows = axis.where.meet(
        "all_gather", row(axis, said, no_count(axis.device) if transformed else count)
    )
    read = _reader(rows)

    def confirm() -> list[Said]:
        heard = hear(read())
        if any(rank.failed for rank in heard):
            fail(axis, heard, error)
        for place, name in enumerate(shared):
            prints = {rank: said.fingerprints[place] for rank, said in enumerate(heard)}
            check_shared(axis, name, shared[name], prints)
        return heard

    heard = confirm() if axis.on_host else None
    if error is not None:
        raise error
    total = psum(count, axis) if transformed else total_count(rows, said, heard)
    return Agreement(total, microbatches, confirm if heard is None else lambda: heard, weights)


def attempt(function: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """The function's result, or its exception: for a rank that others wait for."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def says(error: Exception | None, microbatches: int, count: Count, *fingerprints: int) -> Said:
    """What a rank knows without computing anything."""
    first, second, third = (*fingerprints, 0, 0, 0)[:3]
    floating = count.num_tokens.is_floating_point()
    return Said(error is not None, microbatches, floating, (first, second, third))


def row(axis: Ranks, said: Said, count: Count, loss: Tensor | None = None) -> Tensor:
    """A rank's row: ``WIDTH`` integers, with floats as the bits of a float64."""
    tokens, zero = count.num_tokens, torch.zeros_like(count.num_tokens)
    computed = [
        zero if said.floating else tokens,
        _bits(tokens if said.floating else zero),
        count.num_microbatches,
        _bits(zero if loss is None else loss.detach()),
    ]
    failed, microbatches, floating, prints = said
    known = torch.tensor([failed, microbatches, floating, *prints])
    device = axis.device
    parts = [known.to(device, non_blocking=True)]
    return torch.cat(parts + [part.to(device, torch.int64).reshape(1) for part in computed])


def hear(rows: list[list[int]]) -> list[Said]:
    """What all ranks said, from their rows on the host."""
    return [Said(bool(r[0]), r[1], bool(r[2]), (r[3], r[4], r[5])) for r in rows]


def total_count(rows: Tensor, said: Said, heard: list[Said] | None) -> Count:
    """The sum of all ranks' counts: an integer where that of every rank with microbatches is."""
    whole, floating, num_microbatches = (
        rows[:, -4].sum(),
        _floats(rows[:, -3]).sum(),
        rows[:, -2].sum(),
    )
    if heard is None:
        is_floating = said.floating or not said.microbatches
    else:
        is_floating = any(rank.floating for rank in heard if rank.microbatches)
    return Count(floating + whole if is_floating else whole, num_microbatches)


def total_loss(rows: Tensor) -> Tensor:
    """The sum of all ranks' losses, in float64."""
    return _floats(rows[:, -1]).sum()


def _bits(x: Tensor) -> Tensor:
    return x.to(torch.float64).view(torch.int64)


def _floats(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float64)


def _reader(rows: Tensor) -> Callable[[], list[list[int]]]:
    """A function to the rows' values, which waits for these rows and not for what is queued behind them."""
    if rows.device.type == "cpu":
        return rows.tolist
    host = torch.empty_like(rows, device="cpu", pin_memory=True).copy_(rows, non_blocking=True)
    event = torch.Event(rows.device)
    event.record()

    def read() -> list[list[int]]:
        event.synchronize()
        values: list[list[int]] = host.tolist()
        return values

    return read


def tell(axis: Ranks, note: str) -> list[str]:
    """All ranks' notes."""
    return [each.decode() for each in exchange(axis, note.encode(errors="backslashreplace"))]


def exchange(axis: Ranks, note: bytes) -> list[bytes]:
    """All ranks' bytes, of any length."""
    meet = axis.where.meet
    sizes = meet("all_gather", torch.tensor([len(note)], device=axis.device)).flatten().tolist()
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    padded[: len(note)] = torch.frombuffer(bytearray(note or b"\0"), dtype=torch.uint8)[: len(note)]
    notes = meet("all_gather", padded.to(axis.device)).tolist()
    return [bytes(values[:size]) for values, size in zip(notes, sizes, strict=True)]


def fail(axis: Ranks, heard: list[Said], error: Exception | None) -> NoReturn:
    """Ends the step on every rank where some have failed: there with their own exception."""
    note = "".join(traceback.format_exception_only(error)).strip() if error else ""
    notes = tell(axis, note) if axis.on_host else [""] * axis.size
    if error is not None:
        raise error
    ranks = [rank for rank, said in enumerate(heard) if said.failed]
    raise RankError(
        f"{_name(ranks)} of {axis} failed, and the step with it on every rank; nothing was updated. "
        + "; ".join(f"rank {rank}: {notes[rank]}" for rank in ranks)
    )


def check_shared(axis: Ranks, name: str, value: Tree, prints: Mapping[int, int]) -> None:
    """Refuses what is not the same on all of these ranks, by its fingerprint on each."""
    groups: dict[int, list[int]] = {}
    for rank, fingerprint_ in prints.items():
        groups.setdefault(fingerprint_, []).append(rank)
    if len(groups) <= 1:
        return
    notes = tell(axis, "\n".join(_lines(name, value))) if axis.on_host else None
    parts = []
    for ranks in groups.values():
        part = _name(ranks)
        if notes is not None:
            lines = notes[ranks[0]].split("\n")
            others = [set(notes[other[0]].split("\n")) for other in groups.values()]
            own = [line for line in lines[:-1] if not all(line in other for other in others)]
            own = own or lines[-1:]
            part += " with " + ", ".join(own[:4]) + (", ..." if len(own) > 4 else "")
        parts.append(part)
    raise ValueError(
        f"the ranks of {axis} disagree on {name}, and nothing was updated: "
        + " against ".join(parts)
    )


def fingerprint(value: Tree) -> int:
    """A number for the structure of a tree and for what its leaves are, the same in every process."""
    leaves, structure = tree.flatten(value)
    return _digest(structure, tuple(tree.kind(leaf) for leaf in leaves))


@lru_cache(maxsize=256)
def _digest(structure: tree.Structure, kinds: tuple[str, ...]) -> int:
    text = f"{tree.describe(structure)} {kinds}"
    return int.from_bytes(
        hashlib.sha256(text.encode(errors="backslashreplace")).digest()[:8], "big", signed=True
    )


def _lines(name: str, value: Tree) -> list[str]:
    leaves, structure = tree.flatten(value)
    lines = [
        f"{path}: {tree.kind(leaf)}"
        for path, leaf in zip(tree.paths(value, name), leaves, strict=True)
    ]
    return [*lines, f"the structure {tree.describe(structure)}"]


def _name(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
