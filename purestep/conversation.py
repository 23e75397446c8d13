"""What ranks tell each other in a step, in the order in which they do.

    agree    before anything is computed: that all are about to do the same, and N
    sum      what they have computed: gradients in buckets, which leave while the backward pass still runs, and the rest

To each of the two, a rank that runs a program of its own brings one short message, and hears the sum of all messages. Sums tell
whether a rank has failed, whether all fingerprints are alike, how many ranks hold microbatches, and N; so what a
host does here does not grow with the number of ranks. Only where something is wrong do ranks hear each of the others.
"""

from __future__ import annotations

import json
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from purestep import tree
from purestep.axis import Axis, RankError, Ranks, over_tree
from purestep.axis.buckets import packed, summed
from purestep.fingerprint import describe, fingerprint, without_addresses
from purestep.form import Flat, flat
from purestep.gathering import Gather, Gathering
from purestep.gathering_of_ranks import RanksGathering
from purestep.torch_internals import is_watched, transformed
from purestep.types import Count, Sums, Tree

GATHERED = (
    'what their losses gathered (with gather="loss" all ranks gather the same in the same order, whatever their tokens '
    'are; gather="microbatch" is free of that)'
)
ALIKE = (
    "the number of microbatches, while the loss gathers params (add some whose weights are zero)"
)


def conversation(axis: Axis, gather: Gather) -> OneProgram | OwnPrograms:
    """The conversation of one step. Whatever raises inside of it ends the step, on every rank.

        with conversation(axis, gather) as ranks:
            total = ranks.agree(counted, ...)
            here = ...  # by ranks.gathering
            sums = ranks.sum(here)

    An exception before ``agree``, or between ``agree`` and ``sum``, takes the place of what the rank would have said next, so
    that no other waits for it. After ``sum`` it stays on its rank.
    """
    own_programs = getattr(axis, "own_programs", False)
    if own_programs and not torch.compiler.is_dynamo_compiling():
        return OwnPrograms(cast("Ranks", axis), gather)
    return OneProgram(axis, gather, compiled=own_programs)


class OneProgram:
    """Ranks of one program, simulated or compiled, cannot disagree, nor fail alone: they ``psum``."""

    gathering: Gathering

    def __init__(self, axis: Axis, gather: Gather, compiled: bool) -> None:
        self._axis, self._gather = axis, gather
        self._compiled = compiled

    def __enter__(self) -> OneProgram:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def agree(
        self,
        counted: Count,
        *,
        microbatches: int,
        params: Flat,
        dtypes: Sequence[torch.dtype] = (),
        **_: Any,
    ) -> Count:
        """The sum of all ranks' counts."""
        if self._compiled and not microbatches:
            raise _empty(self._axis)
        self.gathering = Gathering(params, self._axis, self._gather, dtypes)
        total: Count = over_tree("psum", counted, self._axis)
        _check_at_hand(total.num_tokens)
        return total

    def sum(self, here: Sums) -> Sums:
        """The sum of what all ranks have computed."""
        alike = self.gathering.alike(here)
        sums = self.gathering.completed(over_tree("psum", alike, self._axis), here)
        _check_at_hand(sums.counted.num_tokens)
        return sums


class OwnPrograms:
    """Ranks that run programs of their own: another may hold nothing, disagree, or fail.

    What it says is heard on the host at once. On a device, where that would wait, nothing is read before all work is
    queued: what was said first is heard at the end, and a rank that fails between ``agree`` and ``sum`` raises alone.
    """

    gathering: Gathering

    def __init__(self, axis: Ranks, gather: Gather) -> None:
        self._axis, self._gather = axis, gather
        self._next: Literal["agree", "sum", "form"] | None = "agree"
        self._unread: tuple[Callable[[], list[float]], Mapping[str, Tree]] | None = None
        self._sends: RanksGathering | None = None

    def __enter__(self) -> OwnPrograms:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self._next is not None:
            with suppress(BaseException):  # What has gone wrong first is what is raised.
                self._tell(error)

    def agree(
        self,
        counted: Count,
        *,
        microbatches: int,
        shared: Mapping[str, Tree],
        params: Flat,
        given: Tree,
        dtypes: Sequence[torch.dtype] = (),
    ) -> Count:
        """The sum of all ranks' counts, where all are about to do the same.

        ``shared`` is, by name, what must be alike on all ranks. By ``given``, as by the params, the gradients may be differentiated
        in turn. Buffers for gradients are made first, so that a rank without memory for them says so here.
        """
        axis, gather = self._axis, self._gather
        leaves = params.leaves
        self._holds, self._recorded = (
            microbatches > 0,
            not tree.untransformed(leaves, given, counted),
        )
        # Whoever is inside of a transform cannot read its count, and sums it under the transform.
        hidden = not tree.untransformed(counted)
        how = "by a transform" if hidden else str(self._recorded)
        path = {"bucket_bytes": str(axis.bucket_bytes), "differentiated": how}
        shared = {**shared, "settings": {**shared["settings"], **path}}
        kind = Gathering if self._recorded else RanksGathering
        self.gathering = gathering = kind(params, axis, gather, dtypes)
        if gathering.meets and (gather == "loss" or (self._recorded and gather == "microbatch")):
            shared[ALIKE] = {"microbatches": str(microbatches)}
        number = fingerprint(shared)

        message = self._meet(_message(axis, self._holds, number, () if hidden else counted))
        self._unread = _read_later(message), shared
        floating = counted.num_tokens.is_floating_point() or not self._holds
        if axis.on_host or self._recorded:
            self._confirm()
            floating = self._first.floating > 0
        total = _total(message, floating)
        if hidden:
            tokens = counted.num_tokens.to(total.num_tokens.dtype)
            total = over_tree("psum", counted._replace(num_tokens=tokens), axis)

        self._next = "sum"
        if isinstance(gathering, RanksGathering):
            rounds = self._most(microbatches) if gathering.each_microbatch else int
            gathering.begin(rounds)
            self._sends = gathering
        return total

    def _most(self, microbatches: int) -> Callable[[], int]:
        """What tells how many microbatches the rank holds that holds most of them."""
        mine = torch.tensor([microbatches], dtype=torch.int64, device=self._axis.device)
        most = self._axis.where.meet("all_gather", mine).max()
        read = _read_later(most.to(torch.float64)[None])

        def rounds() -> int:
            self._confirm()  # before it waits for ranks that may have left
            (number,) = read()
            return int(number)

        return rounds

    def sum(self, here: Sums) -> Sums:
        """The sum of what all ranks have computed; those without microbatches take part with zeros."""
        axis, dtype = self._axis, here.loss.dtype
        form = _form(here.aux, dtype) if self._holds else {}
        if self._holds and self.gathering.loss_gathers is not None:
            form[GATHERED] = f"{self.gathering.loss_gathers.number:08x}"
        number = fingerprint(form) if form else 0
        returned = packed(self.gathering.alike(here) if self._recorded else here.aux)
        computed = () if self._recorded else (*here.counted, here.loss)

        message = self._meet(_message(axis, self._holds, number, computed))
        holders = self._first.holders
        floating = here.counted.num_tokens.is_floating_point() or not self._holds
        if axis.on_host or 0 < holders < axis.size:
            heard = self._hear(message.tolist(), form, holders)
            floating = heard.floating > 0
        if 0 < holders < axis.size:
            aux, dtype = self._form_of_the_others(heard.number // holders, here)
            returned = returned if self._holds else packed(aux)
        rest = summed(returned, axis)
        if self._recorded:
            _check_at_hand(rest.counted.num_tokens)
            return self.gathering.completed(rest, here)
        assert isinstance(self.gathering, RanksGathering)
        loss, grads = message[LOSS].to(dtype, copy=True), self.gathering.of_all_ranks()
        return Sums(grads, loss, _total(message, floating), rest)

    def _meet(self, message: Tensor) -> Tensor:
        """The sum of all ranks' messages, behind whatever else they send."""
        self._next = None
        sends, self._sends = self._sends, None
        if sends is not None:
            sends.launch()
        wait = self._axis.launch("psum", message, message)
        self._confirm()  # before it waits for ranks that may have left
        if sends is not None:
            sends.wait()
        wait()
        return message

    def _tell(self, error: BaseException) -> None:
        """Comes to the next meeting with an exception."""
        if (
            self._next == "sum"
            and self.gathering.meets
            and (self._gather == "loss" or self._recorded)
        ):
            return  # Others wait for what only this rank's loss can bring, until this process ends.
        axis, heard_at_once = self._axis, self._next == "form" or self._axis.on_host
        if heard_at_once or self._next == "agree":
            self._meet(_message(axis, failed=True))
        if heard_at_once:
            _exchange(axis, _text(error).encode(errors="backslashreplace"))

    def _confirm(self) -> None:
        """Hears what all have said in ``agree``, if that has not been read yet; raises where they cannot go on."""
        if self._unread is None:
            return
        (read, shared), self._unread = self._unread, None
        axis = self._axis
        self._first = heard = self._hear(read(), shared, axis.size, ask=axis.on_host)
        if self._recorded and 0 < heard.holders < axis.size:
            raise _empty(axis)
        if not axis.on_host and 0 < heard.floating < heard.holders:
            raise ValueError(
                f"the ranks of {axis} disagree on the weights, and nothing was updated: those of {heard.floating} are "
                f"floats, those of {heard.holders - heard.floating} integers; return one kind everywhere"
            )

    def _hear(
        self, numbers: Sequence[float], shared: Mapping[str, Tree], ranks: int, *, ask: bool = True
    ) -> _Heard:
        """What all have said; raises where one has failed, or so many ranks do not share the same.

        ``ask`` them who and why, which a device cannot answer while it is busy with collectives that do not match.
        """
        heard = _heard(numbers)
        if heard.failed:
            raise _failure(self._axis, heard, ask=ask)
        if ranks * heard.square != heard.number**2:  # equal if and only if all of them are
            raise _disagreement(self._axis, shared, ask=ask)
        _check_total(heard.whole)  # What overflows on its rank alone stands here without its sign.
        _check_total(heard.real)
        return heard

    def _form_of_the_others(self, number: int, here: Sums) -> tuple[Tree, torch.dtype]:
        """Zeros like the aux of ranks with microbatches, and the dtype of their losses."""
        for dtype in LOSS_DTYPES:
            if number == fingerprint(_form((), dtype)):
                return (), dtype
        axis, note = self._axis, b""
        if self._holds:
            leaves, structure = tree.flatten(here.aux)
            kinds = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]
            with suppress(Exception):
                note = pickle.dumps((structure, kinds, here.loss.dtype))
        note = _first_of(axis, note)
        if not note:
            raise ValueError(
                f"a rank of {axis} holds no microbatch, and cannot be told what LossTerms.aux is like: make it "
                "of containers that can be pickled, whose classes stand at the top of a module"
            )
        self._next = "form"
        aux, dtype = here.aux, here.loss.dtype
        if not self._holds:
            structure, kinds, dtype = pickle.loads(note)
            zeros = [torch.zeros(shape, dtype=kind, device=axis.device) for shape, kind in kinds]
            aux = tree.unflatten(structure, zeros)
        self._hear(self._meet(_message(axis)).tolist(), {}, 0)
        return aux, dtype


def _form(aux: Tree, dtype: torch.dtype) -> dict[str, Tree]:
    return {"LossTerms.aux": aux, "the loss": str(dtype)}


LOSS_DTYPES = [torch.float32, torch.float64]
"""Those in which losses are summed."""

# A message is of float64, in which sums of halves of 32 bits are exact on up to two million ranks: four numbers, a
# fingerprint and its square in such parts, N as the parts of an integer and as a float, how many microbatches have tokens, the loss.
NUMBER, SQUARE, WHOLE, REAL, NON_EMPTY, LOSS = slice(4, 6), slice(6, 10), slice(10, 12), 12, 13, 14
WIDTH = 15


def _message(
    axis: Ranks,
    holds: bool = False,
    number: int = 0,
    computed: Sequence[Tensor] = (),
    *,
    failed: bool = False,
) -> Tensor:
    """What one rank says. ``computed`` are N, how many microbatches have tokens, and the loss, as far as it has them."""
    floating = bool(computed) and computed[0].is_floating_point()
    said = [failed, failed * axis.rank, holds, floating, *_parts(number, 2), *_parts(number**2, 4)]
    message = torch.tensor([*said, 0, 0, 0, 0, 0], dtype=torch.float64, device="cpu")
    message = tree.brought(message, axis.device)
    for place, value in zip((REAL if floating else WHOLE, NON_EMPTY, LOSS), computed, strict=False):
        value = value.detach().to(axis.device)
        message[place] = value.reshape(1).view(torch.uint32) if place == WHOLE else value
    return message


def _parts(number: int, count: int) -> list[int]:
    return [number >> 32 * place & 0xFFFFFFFF for place in range(count)]


def _total(message: Tensor, floating: bool) -> Count:
    """All ranks' count, where it may be on a device."""
    low, high = message[WHOLE].to(torch.int64).unbind()
    whole = low + (high << 32)
    tokens = message[REAL] + whole if floating else whole
    return Count(tokens, message[NON_EMPTY].to(torch.int64))


class _Heard(NamedTuple):
    """The sum of what all ranks have said, on the host."""

    failed: int
    who: int
    holders: int
    floating: int
    number: int
    square: int
    whole: int
    real: float


def _heard(numbers: Sequence[float]) -> _Heard:
    failed, who, holders, floating = map(int, numbers[:4])
    number, square, whole = (
        sum(int(part) << 32 * place for place, part in enumerate(numbers[parts]))
        for parts in (NUMBER, SQUARE, WHOLE)
    )
    return _Heard(failed, who, holders, floating, number, square, whole, numbers[REAL])


def _read_later(message: Tensor) -> Callable[[], list[float]]:
    """A function to the numbers on the host, which waits for these and not for what is queued behind them."""
    if message.device.type == "cpu":
        return message.tolist
    host = torch.empty_like(message, device="cpu", pin_memory=True)
    host.copy_(message, non_blocking=True)
    event = torch.Event(message.device)
    event.record()

    def read() -> Any:
        event.synchronize()
        return host.tolist()

    return read


def _check_at_hand(total: Tensor) -> None:
    """Refuses an N that cannot be one, where it can be read without waiting for a device."""
    if torch.compiler.is_dynamo_compiling() or transformed() or is_watched():
        return
    if type(total) is Tensor and total.is_cpu:
        _check_total(total.item())


def _check_total(total: float) -> None:
    if not 0 <= total < (2**63 if isinstance(total, int) else inf):
        raise ValueError(
            f"num_tokens, the sum of all weights, overflows: it comes out as {total}, and nothing was "
            "updated. Integers are summed in int64 and floats in float64: make the weights smaller, "
            "which changes nothing else"
        )


def _empty(axis: Axis) -> ValueError:
    return ValueError(
        f"a rank of {axis} holds no microbatch, and under a transform or a compiler it cannot be told "
        "what the others' losses return: give it a microbatch whose weights are zero"
    )


def _failure(axis: Ranks, heard: _Heard, *, ask: bool) -> RankError:
    """What a rank raises because others have failed."""
    if ask:
        notes = {rank: note.decode() for rank, note in enumerate(_exchange(axis, b"")) if note}
        who, why = _ranks(list(notes)), "; ".join(f"rank {rank}: {notes[rank]}" for rank in notes)
    else:
        who = _ranks([heard.who]) if heard.failed == 1 else f"{heard.failed} ranks"
        why = "Their own output tells why"
    return RankError(
        f"{who} of {axis} failed, and the step with it on every rank; nothing was updated. {why}"
    )


def _disagreement(axis: Ranks, shared: Mapping[str, Tree], *, ask: bool) -> ValueError:
    """What every rank raises where some differ in what they share: who differs, and how, as far as they can be asked."""
    own = {name: [fingerprint(value), *_lines(name, value)] for name, value in shared.items()}
    start = f"the ranks of {axis} disagree on "
    if not ask:
        mine = ", ".join(f"{name} {number:016x}" for name, (number, *_) in own.items())
        return ValueError(
            f"{start}one of {', '.join(own)}, and nothing was updated. Compare what the ranks say; here, it is rank "
            f"{axis.rank} with the fingerprints {mine}, and with {own['settings'][1:-1]}"
        )
    notes = [json.loads(note) for note in _exchange(axis, json.dumps(own).encode())]
    for name in dict.fromkeys(name for note in notes for name in note):
        groups: dict[int, list[int]] = {}
        for rank, note in enumerate(notes):
            if note:
                groups.setdefault(note.get(name, [0])[0], []).append(rank)
        if len(groups) > 1:
            break
    told = [notes[ranks[0]].get(name, [0, f"no {name}"])[1:] for ranks in groups.values()]
    parts = []
    for ranks, lines in zip(groups.values(), told, strict=True):
        differing = [line for line in lines[:-1] if not all(line in other for other in told)]
        differing = differing or lines[-1:]
        more = ", ..." if len(differing) > 4 else ""
        parts.append(f"{_ranks(ranks)} with {', '.join(differing[:4])}{more}")
    return ValueError(f"{start}{name}, and nothing was updated: {' against '.join(parts)}")


def _lines(name: str, value: Tree) -> list[str]:
    """What each leaf is, and the structure."""
    try:
        leaves, structure, form = flat(value)
        paths = map(without_addresses, tree.paths(value, name))
        # Pieces of one tensor are of different lengths.
        kinds = [
            tree.kind(leaf) if place is None else f"{leaf.dtype}, of shape {place.shape} in pieces"
            for leaf, place in zip(leaves, form.spread or [None] * len(leaves), strict=True)
        ]
        lines = [f"{path}: {kind}" for path, kind in zip(paths, kinds, strict=True)]
        return [*lines, f"the structure {describe(structure)}"]
    except Exception:
        return [f"{name}, which cannot be printed"]


def _text(error: BaseException) -> str:
    """An exception as Python would print it, without its traceback."""
    try:
        return "".join(traceback.format_exception_only(error)).strip()
    except Exception:
        return "an exception that cannot be printed"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _exchange(axis: Ranks, note: bytes) -> list[bytes]:
    """All ranks' bytes, of any length."""
    sizes, notes = _gathered(axis, note)
    pairs = zip(notes.tolist(), sizes.tolist(), strict=True)
    return [bytes(values[:size]) for values, size in pairs]


def _first_of(axis: Ranks, note: bytes) -> bytes:
    """The bytes of the first rank that has any."""
    sizes, notes = _gathered(axis, note)
    rank = int((sizes > 0).to(torch.int64).argmax())
    return bytes(notes[rank, : int(sizes[rank])].tolist())


def _gathered(axis: Ranks, note: bytes) -> tuple[Tensor, Tensor]:
    """How many bytes each rank has, and a row for each, filled up with zeros."""
    meet = axis.where.meet
    size = torch.tensor([len(note)], device=axis.device)
    sizes = meet("all_gather", size).flatten()
    padded = torch.zeros(max(1, int(sizes.max())), dtype=torch.uint8, device="cpu")
    padded[: len(note)] = torch.frombuffer(bytearray(note or b"\0"), dtype=torch.uint8)[: len(note)]
    return sizes, meet("all_gather", padded.to(axis.device))
