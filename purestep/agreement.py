"""What the ranks of a step tell each other beside gradients: a row of integers each, and a note in need.

Ranks that run programs of their own may hold different numbers of microbatches, or none. They may also go
wrong: another structure, another setting, an exception. Whatever a rank has to say travels in a row that
every rank sends in any case, so that nobody waits for one that will not come.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from purestep import tree
from purestep.axis import Axis, RankError, Ranks, psum
from purestep.axis.buckets import Packed, packed, summed
from purestep.fingerprint import describe, fingerprint, without_addresses
from purestep.tokens import count_of
from purestep.torch_internals import is_watched
from purestep.types import Count, Microbatch, Tree

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

    ``weights`` are those that it has counted, one tensor for each microbatch of ``group``; no other rank hears of them.
    ``given`` is what the gradients may be differentiated by in turn.
    """

    counted: Count
    microbatches: int
    shared: Mapping[str, Tree]
    weights: Sequence[Tensor]
    group: Sequence[Microbatch]
    given: Tree


class Agreement(NamedTuple):
    """The global count, this rank's microbatches, and what all ranks said, which raises where they disagree.

    ``weights`` and ``group`` are this rank's own, which it has counted. ``recorded`` says whether gradients are differentiated in
    turn, or batched, on all ranks alike; where ranks are of one program, nobody asks.
    """

    counted: Count
    here: Count
    microbatches: int
    confirm: Callable[[], list[Said]]
    weights: Sequence[Tensor]
    group: Sequence[Microbatch]
    recorded: bool


def agree(axis: Axis, state: Callable[[], Statement]) -> Agreement:
    """Sums the ranks' counts, and makes sure that they are about to do the same: one small collective.

    Ranks of one program, simulated or compiled, cannot disagree: there it is ``psum``. Elsewhere a
    disagreement, or an exception in ``state``, raises on every rank, and names those that differ. On the
    host that is at once; on a device, where reading would wait, it is when ``confirm`` is called.
    """
    if not isinstance(axis, Ranks) or torch.compiler.is_dynamo_compiling():
        count, microbatches, _, weights, group, _ = state()
        total = psum(count, axis)
        check_total_at_hand(total)
        return Agreement(total, count, microbatches, list, weights, group, recorded=False)

    brought, errors = attempt(lambda: _brought(axis, state()))
    row = brought.row if brought else failed_row(axis)
    rows = meet_anyway(errors, lambda: axis.where.meet("all_gather", row))
    read = _reader(rows)

    def confirm() -> list[Said]:
        on_host = read()
        heard = hear(on_host)
        fail([rank for rank, said in enumerate(heard) if said.failed], axis, errors)
        assert brought is not None
        for place, (name, value) in enumerate(brought.shared.items()):
            prints = {rank: said.fingerprints[place] for rank, said in enumerate(heard)}
            check_shared(axis, name, value, prints)
        check_totals(on_host)
        return heard

    heard = confirm() if axis.on_host else None
    if brought is None:
        raise errors.pop()
    transformed = brought.transformed
    total = summed(transformed, axis) if transformed else total_count(rows, brought.said, heard)
    confirmed = confirm if heard is None else lambda: heard
    number = brought.said.microbatches
    return Agreement(
        total, brought.here, number, confirmed, brought.weights, brought.group, brought.recorded
    )


class _Brought(NamedTuple):
    """All that a rank computes before it meets the others: whatever raises, raises here."""

    here: Count
    shared: Mapping[str, Tree]
    weights: Sequence[Tensor]
    group: Sequence[Microbatch]
    recorded: bool
    said: Said
    row: Tensor
    transformed: Packed | None


def _brought(axis: Ranks, statement: Statement) -> _Brought:
    count, microbatches, shared, weights, group, given = statement
    recorded = not tree.untransformed(given, count)
    how = {"bucket_bytes": str(axis.bucket_bytes), "differentiated": str(recorded)}
    shared = {**shared, "settings": {**shared["settings"], **how}}
    said = says(microbatches, count, *map(fingerprint, shared.values()))
    if tree.untransformed(count):
        return _Brought(
            count, shared, weights, group, recorded, said, row_of(axis, said, count), None
        )
    uncounted = row_of(axis, said, count_of([], axis.device))
    return _Brought(count, shared, weights, group, recorded, said, uncounted, packed(count))


def attempt(function: Callable[[], Result]) -> tuple[Result | None, list[BaseException]]:
    """The function's result, or what it raised, whatever it is: for a rank that others wait for.

    The exception comes in a list, from which it is popped where it is raised. A frame that held it would be held
    by its traceback in turn, and so would all that the step has computed.
    """
    try:
        return function(), []
    except BaseException as error:
        return None, [error]


def meet_anyway(errors: list[BaseException], meeting: Callable[[], Tensor]) -> Tensor:
    """What the ranks send each other. If they cannot, what has gone wrong here before is what is raised."""
    rows, lost = attempt(meeting)
    if rows is None:
        raise (errors or lost).pop()
    return rows


def says(microbatches: int, count: Count, *fingerprints: int) -> Said:
    """What a rank knows without computing anything."""
    first, second, third = (*fingerprints, 0, 0, 0)[:3]
    return Said(False, microbatches, count.num_tokens.is_floating_point(), (first, second, third))


def row_of(axis: Ranks, said: Said, count: Count, loss: Tensor | None = None) -> Tensor:
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
    parts = [tree.brought(known, device)]
    return torch.cat(parts + [part.to(device, torch.int64).reshape(1) for part in computed])


def failed_row(axis: Ranks) -> Tensor:
    """The row of a rank that has failed."""
    return row_of(axis, Said(True, 0, False, (0, 0, 0)), count_of([], axis.device))


def hear(rows: Tensor) -> list[Said]:
    """What all ranks said, from their rows on the host."""
    return [Said(bool(r[0]), r[1], bool(r[2]), (r[3], r[4], r[5])) for r in rows.tolist()]


def check_totals(rows: Tensor) -> None:
    """Refuses a count of all ranks that cannot be one, from their rows on the host."""
    _check_total(rows[:, -4].tolist())
    _check_total(_floats(rows[:, -3]).tolist())


def check_total_at_hand(total: Count) -> None:
    """Refuses a count that cannot be one, where it can be read without waiting for a device."""
    tokens = total.num_tokens
    if tokens.device.type == "cpu" and tree.eager(tokens) and not is_watched():
        _check_total([tokens.item()])


def _check_total(counts: Sequence[float]) -> None:
    total = sum(counts)
    if not (min(counts) >= 0 and total < (2**63 if isinstance(total, int) else inf)):
        raise ValueError(
            f"num_tokens, the sum of all weights, overflows: it comes out as {total}, and nothing was "
            "updated. Integers are summed in int64 and floats in float64: make the weights smaller, "
            "which changes nothing else"
        )


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


def _reader(rows: Tensor) -> Callable[[], Tensor]:
    """A function to the rows on the host, which waits for these rows and not for what is queued behind them."""
    if rows.device.type == "cpu":
        return lambda: rows
    host = torch.empty_like(rows, device="cpu", pin_memory=True).copy_(rows, non_blocking=True)
    event = torch.Event(rows.device)
    event.record()

    def read() -> Tensor:
        event.synchronize()
        return host

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


def fail(ranks: Sequence[int], axis: Ranks, errors: list[BaseException]) -> None:
    """Ends the step on every rank where some have failed: there with their own exception."""
    if not ranks:
        return
    notes, lost = attempt(lambda: tell(axis, _note(errors)) if axis.on_host else [""] * axis.size)
    if notes is None or errors:
        raise (errors or lost).pop()
    raise RankError(
        f"{_name(ranks)} of {axis} failed, and the step with it on every rank; nothing was updated. "
        + "; ".join(f"rank {rank}: {notes[rank]}" for rank in ranks)
    )


def _note(errors: Iterable[BaseException]) -> str:
    """An exception as Python would print it, without its traceback."""
    lines, _ = attempt(
        lambda: [line for e in errors for line in traceback.format_exception_only(e)]
    )
    return "".join(lines).strip() if lines is not None else "an exception that cannot be printed"


def all_manage(axis: Ranks, function: Callable[[], Result]) -> Result:
    """What the function gives here, where it gives something on every rank; else all of them raise."""
    result, errors = attempt(function)
    failed = torch.tensor([bool(errors)], dtype=torch.int64, device=axis.device)
    heard = meet_anyway(errors, lambda: axis.where.meet("all_gather", failed)).flatten().tolist()
    fail([rank for rank, has_failed in enumerate(heard) if has_failed], axis, errors)
    return cast("Result", result)


def check_shared(axis: Ranks, name: str, value: Tree, prints: Mapping[int, int]) -> None:
    """Refuses what is not the same on all of these ranks, by its fingerprint on each."""
    groups: dict[int, list[int]] = {}
    for rank, fingerprint_ in prints.items():
        groups.setdefault(fingerprint_, []).append(rank)
    if len(groups) <= 1:
        return
    lines, _ = attempt(lambda: "\n".join(_lines(name, value)))
    notes = tell(axis, lines or f"{name}, which cannot be printed") if axis.on_host else None
    parts = []
    for ranks in groups.values():
        part = _name(ranks)
        if notes is not None:
            *leaves, structure = notes[ranks[0]].split("\n")
            others = [set(notes[other[0]].split("\n")) for other in groups.values()]
            own = [leaf for leaf in leaves if not all(leaf in other for other in others)]
            own = own or [structure]
            part += " with " + ", ".join(own[:4]) + (", ..." if len(own) > 4 else "")
        parts.append(part)
    raise ValueError(
        f"the ranks of {axis} disagree on {name}, and nothing was updated: "
        + " against ".join(parts)
    )


def _lines(name: str, value: Tree) -> list[str]:
    leaves, structure = tree.flatten(value)
    lines = [
        f"{without_addresses(path)}: {tree.kind(leaf)}"
        for path, leaf in zip(tree.paths(value, name), leaves, strict=True)
    ]
    return [*lines, f"the structure {describe(structure)}"]


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
