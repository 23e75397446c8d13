"""What ranks compare in an update: a short message from each, of which all ranks see the sum.

The sum tells whether a rank has failed, whether all fingerprints are equal, how many ranks hold
microbatches, and N; the host's work does not grow with the number of ranks. Equality is
Cauchy-Schwarz: (Σh)² = n Σh² holds if and only if all n fingerprints h are equal.
"""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.protocol import RankError
from purestep.tree import shard as pieces
from purestep.types import Count, Tree
from purestep.weights import EXACT, check_total

if TYPE_CHECKING:
    from purestep.axis.ranks import Ranks

ZERO = torch.tensor(0, device="cpu")


def message(
    axis: Ranks,
    holds: bool = False,
    number: int = 0,
    counted: Count = Count(ZERO, ZERO),
    loss: Tensor = ZERO,
    *,
    failed: bool = False,
) -> Tensor:
    """What one rank sends: flags, a fingerprint with its square, its count and its loss.

    A ring of gloo sends each number of a small message by itself, so flags share two of them: as
    digits, of which each counts ranks. Sums in float64 are exact on up to 200,000 ranks.
    """
    tokens, non_empty = counted
    floating, double = tokens.is_floating_point(), holds and loss.dtype == torch.float64
    number %= 2 ** ((53 - axis.size.bit_length()) // 2)
    base = axis.size + 1
    flags = holds + base * floating + base**2 * double
    numbers = [failed * (1 + base * axis.rank), flags, number, number**2]
    values = [tokens, non_empty, loss]
    if axis.on_host:  # in one tensor, which takes a third of the time
        return torch.tensor([*numbers, *map(Tensor.item, values)], dtype=torch.float64)
    parts = [torch.tensor(numbers, dtype=torch.float64, device="cpu"), *values]
    return torch.cat(
        [tree.brought(x.detach().double().view(-1), axis.device) for x in parts]
    )


Answer = namedtuple("Answer", "failed who holders floating double numbered")
"""How many ranks say so, on the host; whether any fingerprint is not 0."""


def total_of(sent: Tensor, floating: bool) -> Count:
    """The count of all ranks, where it may be on a device."""
    tokens, non_empty, _ = sent[4:].unbind()
    return Count(
        tokens if floating else tokens.to(torch.int64), non_empty.to(torch.int64)
    )


def read_later(sent: Tensor) -> Callable[[], list[float]]:
    """A function that reads the numbers on the host, and waits for them alone."""
    if sent.device.type == "cpu":
        return sent.tolist
    host = torch.empty_like(sent, device="cpu", pin_memory=True)
    host.copy_(sent, non_blocking=True)
    event = torch.Event(sent.device)
    event.record()

    def read() -> Any:
        event.synchronize()
        return host.tolist()

    return read


class Described(NamedTuple):
    """A tree in words that are the same in every process, and how each of its leaves is spread."""

    number: int
    lines: tuple[str, ...]
    places: pieces.Spread


def described(name: str, value: Tree) -> Described:
    """What ranks compare of a tree: a fingerprint, and a line for each leaf and the structure.

    >>> described("params", {"w": torch.zeros(2)}).lines
    ("params['w']: torch.float32 of shape (2,)", "the structure {'w': *}")
    >>> described("x", torch.zeros(2)) == described("x", torch.ones(2))
    True
    """
    leaves, structure = tree.flatten(value)
    kinds = [
        (x.dtype, x.shape) if isinstance(x, Tensor) else tree.kind(x) for x in leaves
    ]
    try:
        return _described(name, structure, tuple(kinds))
    except Exception:  # what stands in the structure has no hash, or cannot be compared
        return _described.__wrapped__(name, structure, kinds)


@lru_cache(64)
def _described(name: str, structure: tree.Structure, kinds: Sequence[Any]) -> Described:
    places, lines = tree.spread(structure), []
    each = places or [None] * len(kinds)
    for accessor, kind, place in zip(structure.accessors(), kinds, each, strict=True):
        if isinstance(kind, tuple):
            dtype, shape = kind
            # Pieces of one tensor have different lengths.
            cut = (
                f", of shape {place.shape} in pieces"
                if place
                else f" of shape {tuple(shape)}"
            )
            kind = f"{dtype}{cut}"
        lines.append(f"{accessor.codify(name)}: {kind}")
    text = "\n".join([*lines, f"the structure {tree.describe(structure)}"])
    # Addresses, indices of devices and the name of the main module differ between processes.
    text = re.sub(r" at 0x[0-9A-Fa-f]+|, index=\d+|\b__(mp_)?main__\.", "", text)
    # The hashes of strings differ, too, and with them the order of a set's members.
    text = re.sub(r"\{([^{}:]*)\}", _sort_members, text)
    *lines, shown = text.split("\n")
    # A set is printed in any order.
    words = sorted(re.findall(r"[\w.+-]+|\S", shown))
    return Described(digest(lines, words), (*lines, shown), places)


def _sort_members(members: re.Match[str]) -> str:
    """Sorts what a set prints between its braces."""
    return "{" + ", ".join(sorted(members[1].split(", "))) + "}"


def digest(*words: object) -> int:
    """A number from 0 to 2⁶⁴ - 1 for some words."""
    return int.from_bytes(
        sha256(repr(words).encode(errors="replace")).digest()[:8], "big"
    )


def hear(
    axis: Ranks,
    numbers: Sequence[float],
    ranks: int,
    compared: Mapping[str, Described],
    *,
    ask: bool,
) -> Answer:
    """Reads the sum of all messages.

    Raises where a rank has failed, where ``ranks`` of them disagree on what is ``compared``, or
    where N overflows.
    ``ask`` lets all ranks exchange texts, which a device cannot do while it is busy with
    collectives that do not match.
    """
    failure, flags, word, square = map(int, numbers[:4])
    total, base = numbers[4], axis.size + 1
    digits = [flags // base**place % base for place in range(3)]
    fields: list[Any] = [failure % base, failure // base, *digits, word > 0]
    answer = Answer(*fields)
    if answer.failed:
        texts = (
            {r: text for r, text in enumerate(axis.gather_object(None)) if text}
            if ask
            else {}
        )
        who = (
            _ranks([*texts] or [answer.who])
            if ask or answer.failed == 1
            else "several ranks"
        )
        raise RankError(
            f"{who} of {axis} failed, and the step with it on every rank; nothing was updated. "
            + (
                "; ".join(f"rank {r}: {text}" for r, text in texts.items())
                or "Its output says why"
            )
        )
    if ranks * square != word**2:
        notes = {name: (each.number, each.lines) for name, each in compared.items()}
        difference = (
            _difference(axis.gather_object(notes))
            if ask
            else f"one of {', '.join(notes)}, and nothing was updated: compare what each rank "
            f"prints; rank {axis.rank} has {notes}"
        )
        raise ValueError(f"the ranks of {axis} disagree on {difference}")
    if not ask and 0 < answer.floating < answer.holders:
        raise ValueError(
            f"the weights of {answer.floating} ranks of {axis} are floats, those of "
            f"{answer.holders - answer.floating} are integers, and nothing was updated: return one "
            "dtype from weight_fn on all ranks"
        )
    check_total(total)
    if total > EXACT and not answer.floating:
        raise ValueError(
            f"num_tokens, the sum of all weights, overflows: over {axis} it is more than {EXACT=}, "
            "up to which ranks add integers exactly, and nothing was updated; make the weights "
            "smaller, which changes nothing else"
        )
    return answer


def _difference(notes: Sequence[Mapping[str, Any]]) -> str:
    """The first name under which notes differ, and what the ranks have there."""
    for name in dict.fromkeys(chain(*notes)):
        groups: dict[Any, list[int]] = {}
        for rank, note in enumerate(notes):
            if name in note:
                groups.setdefault(note[name], []).append(rank)
        if len(groups) > 1:
            break
    parts = []
    for (_, lines), ranks in groups.items():
        own = [
            x for x in lines[:-1] if any(x not in others for _, others in groups)
        ] or lines[-1:]
        parts.append(
            f"{_ranks(ranks)} with {', '.join(own[:4])}{', ...' * (len(own) > 4)}"
        )
    return f"{name}, and nothing was updated: {' against '.join(parts)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
