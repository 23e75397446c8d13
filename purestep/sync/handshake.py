"""Status messages: what each rank sends in an update, of which all ranks see the sum.

The sum shows whether a rank has failed, whether all fingerprints are equal, how many ranks hold
microbatches, and N. So the host's work does not grow with the number of ranks. Fingerprints are
compared by Cauchy-Schwarz: (Σh)² = n Σh² holds if and only if all n of them are equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.base import RankError
from purestep.axis.process import ProcessAxis
from purestep.counts import MAX_EXACT_INT, check_total
from purestep.types import TokenCounts, Tree

ZERO = torch.tensor(0, device="cpu")
NO_COUNTS = TokenCounts(ZERO, ZERO)
MAX_DIFFERENCES = 4
"""How many lines of a rank's description an error shows."""


class Status(NamedTuple):
    """Holds what one rank reports in an update, or the sums of all ranks' reports, as float64.

    A report holds the rank's failure, fingerprint, counts and loss.

    Sums of whole numbers are exact up to 2⁵³. Those of losses and of float weights are rounded.
    """

    num_failed: float = 0
    failed_rank: float = 0
    """The rank that failed, where one did."""
    num_holding: float = 0
    """How many ranks hold a microbatch."""
    group_len: float = 0
    """How many microbatches a rank holds, with or without tokens."""
    group_len_squared: float = 0
    num_knowing_gathers: float = 0
    """How many ranks know, from an earlier update, what a microbatch gathers."""
    num_float_weights: float = 0
    num_float64_losses: float = 0
    fingerprint: float = 0
    fingerprint_squared: float = 0
    num_tokens: float = 0
    num_microbatches: float = 0
    loss: float = 0


def encode_status(
    axis: ProcessAxis,
    *,
    group_len: int,
    fingerprint: int,
    counts: TokenCounts = NO_COUNTS,
    loss: Tensor = ZERO,
    knows_gathers: bool = False,
) -> Tensor:
    """Packs this rank's ``Status`` into a new vector of float64, on the axis's device.

    ``group_len`` is how many microbatches the rank holds. Without any, the dtype of ``loss`` does
    not count. ``knows_gathers`` is whether the rank remembers what a microbatch gathers.

    The fingerprint is reduced modulo ``max_fingerprint``. The host does not wait for counts or a
    loss that lie on a device.
    """
    is_float64 = group_len > 0 and loss.dtype == torch.float64
    fingerprint %= max_fingerprint(axis)
    scalars = {
        "num_tokens": counts.num_tokens,
        "num_microbatches": counts.num_microbatches,
        "loss": loss,
    }
    on_host = {name: x.item() for name, x in scalars.items() if x.is_cpu}
    status = Status(
        num_holding=group_len > 0,
        group_len=group_len,
        group_len_squared=group_len**2,
        num_knowing_gathers=knows_gathers,
        num_float_weights=counts.num_tokens.is_floating_point(),
        num_float64_losses=is_float64,
        fingerprint=fingerprint,
        fingerprint_squared=fingerprint**2,
        **on_host,
    )
    message = torch.tensor(status, dtype=torch.float64, device="cpu")
    message = tree.to_device(message, axis.device)
    for name, scalar in scalars.items():
        if name not in on_host:  # The host does not wait for what a device computes.
            message[Status._fields.index(name)] = scalar.detach()
    return message


def encode_failure(axis: ProcessAxis) -> Tensor:
    """Packs the ``Status`` of a failed rank, as ``encode_status`` packs that of others.

    It has 1 as ``num_failed``, the rank on the axis as ``failed_rank``, and zeros for the rest.
    """
    status = Status(num_failed=1, failed_rank=axis.rank)
    message = torch.tensor(status, dtype=torch.float64, device="cpu")
    return tree.to_device(message, axis.device)


def max_fingerprint(axis: ProcessAxis) -> int:
    """Returns the bound of fingerprints, below which the sum of all ranks' squares is exact."""
    bound: int = 2 ** ((53 - axis.size.bit_length()) // 2)
    return bound


def counts_from(message: Tensor, has_float_weights: bool) -> TokenCounts:
    """Returns the counts in a message, or in the sum of messages, on its device.

    ``num_tokens`` is int64; with ``has_float_weights``, a view of the message, in float64.
    """
    totals = views_of(message)
    num_tokens = totals["num_tokens"]
    if not has_float_weights:
        num_tokens = num_tokens.to(torch.int64)
    return TokenCounts(num_tokens, totals["num_microbatches"].to(torch.int64))


def views_of(message: Tensor) -> dict[str, Tensor]:
    """Returns views of a message's numbers, as scalar tensors by their names in ``Status``."""
    return dict(zip(Status._fields, message.unbind(), strict=True))


class PendingStatus:
    """Holds the sum of all ranks' messages while it is copied to the host.

    ``read`` waits for the copy, and checks the sum. ``compared`` describes what this rank's
    ``fingerprint`` was made of.
    """

    def __init__(
        self,
        axis: ProcessAxis,
        message: Tensor,
        compared: Mapping[str, TreeFingerprint],
        fingerprint: int,
    ) -> None:
        self.fingerprint = fingerprint
        self._axis = axis
        self._compared = compared
        self._read_numbers = _async_read(message)
        self._status: Status | None = None

    def read(self) -> Status:
        """Waits until the host has the sum, and returns it, or raises as ``check_status`` does.

        Later calls return a checked sum at once. If a rank has failed or differs, ranks on the host
        then exchange texts for the error. So all ranks of the axis must call this together.
        """
        if self._status is None:
            axis = self._axis
            status = Status(*self._read_numbers())
            # A device that waits for collectives which do not match cannot exchange texts.
            check_status(
                axis, status, self._compared, num_ranks=axis.size, can_ask=axis.on_host
            )
            self._status = status
        return self._status


def _async_read(message: Tensor) -> Callable[[], list[float]]:
    """Begins to copy a vector to the host; returns a function that waits and lists its numbers.

    The function waits for this copy alone. A vector on the CPU is read when the function is called.
    """
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


class TreeFingerprint(NamedTuple):
    """Holds the name of a tree or sequence, its hash, and lines of text that describe it.

    All three are the same in every process that holds the same tree.
    """

    name: str
    hash: int
    lines: tuple[str, ...]


def fingerprint(name: str, value: Tree) -> TreeFingerprint:
    """Returns what ranks compare of a tree: a line for each leaf, then one for the containers.

    Tensors count with dtype and shape, but without values; strings with their text; other leaves
    with their type alone. A leaf in a ``Shard`` counts with the shape of its innermost ``Shard``.

    >>> fingerprint("params", {"w": torch.zeros(2)}).lines
    ("params['w']: torch.float32 of shape (2,)", "the structure {'w': *}")
    >>> fingerprint("x", torch.zeros(2)) == fingerprint("x", torch.ones(2))
    True
    """
    leaves, spec = tree.flatten(value)
    signatures: list[Any] = []
    for leaf in leaves:
        is_tensor = isinstance(leaf, Tensor)
        signatures.append(
            (leaf.dtype, leaf.shape) if is_tensor else tree.format_leaf(leaf)
        )
    try:
        return _cached_fingerprint(name, spec, tuple(signatures))
    except Exception:  # A key in the containers has no hash, or cannot be compared.
        return _cached_fingerprint.__wrapped__(name, spec, signatures)


def fingerprint_order(name: str, words: Sequence[str]) -> TreeFingerprint:
    """Returns what ranks compare of a sequence of words: numbered lines, then an empty line.

    Without words, the hash is 0.

    >>> fingerprint_order("the order", ["a", "b"]).lines
    ('1. a', '2. b', '')
    """
    lines = []
    for number, word in enumerate(words, start=1):
        lines.append(f"{number}. {word}")
    number = hash64(*words) if words else 0
    return TreeFingerprint(name, number, (*lines, ""))


@lru_cache(64)
def _cached_fingerprint(
    name: str, spec: tree.TreeSpec, signatures: Sequence[Any]
) -> TreeFingerprint:
    """Fingerprints a tree by its spec and each leaf's signature: a (dtype, shape), or a text.

    The hash ignores the order of words in the line of the containers.
    """
    shard_specs = tree.shard_specs(spec)
    padded = shard_specs or [None] * len(signatures)
    lines = []
    for accessor, signature, shard_spec in zip(
        spec.accessors(), signatures, padded, strict=True
    ):
        if isinstance(signature, tuple):
            dtype, shape = signature
            if shard_spec is None:
                signature = f"{dtype} of shape {tuple(shape)}"
            else:  # Shards of one tensor have different lengths.
                signature = f"{dtype}, of shape {shard_spec.shape} in pieces"
        lines.append(f"{accessor.codify(name)}: {signature}")
    lines.append(f"the structure {tree.format_spec(spec)}")
    *lines, containers = _portable("\n".join(lines)).split("\n")
    # A set is printed in any order, so the words are compared, and not their order.
    words = sorted(re.findall(r"[\w.+-]+|\S", containers))
    return TreeFingerprint(name, hash64(lines, words), (*lines, containers))


def _portable(text: str) -> str:
    """Removes from a text what differs between processes that hold the same tree.

    That is addresses, indices of devices, and the name of the main module. Members of printed sets
    are sorted, unless one of them has a colon or a brace.
    """
    # Addresses, indices of devices, the name of the main module.
    text = re.sub(r" at 0x[0-9A-Fa-f]+|, index=\d+|\b__(mp_)?main__\.", "", text)
    # The hashes of strings differ, and with them the order of a set's members.
    return re.sub(r"\{([^{}:]*)\}", _sort_members, text)


def _sort_members(members: re.Match[str]) -> str:
    """Returns what ``re.sub`` puts in a printed set's place: its members, sorted, in braces."""
    return "{" + ", ".join(sorted(members[1].split(", "))) + "}"


def hash64(*words: object) -> int:
    """Hashes the ``repr`` of words to a number from 0 to 2⁶⁴ - 1, equal for equal texts."""
    text = repr(words).encode(errors="replace")
    return int.from_bytes(sha256(text).digest()[:8], "big")


def check_status(
    axis: ProcessAxis,
    status: Status,
    compared: Mapping[str, TreeFingerprint],
    *,
    num_ranks: int,
    can_ask: bool,
) -> None:
    """Raises if a rank has failed, if the ranks' fingerprints differ, or if N overflows.

    ``status`` is the sum of all ranks. ``num_ranks`` of them have sent a fingerprint, and the
    others 0. The first error is a ``RankError``, the others are a ``ValueError``. N also overflows
    if integer weights add up to more than ``MAX_EXACT_INT``.

    ``compared`` is what this rank's fingerprint was made of. With ``can_ask``, all ranks call this
    together, and exchange texts about a failure or a difference. Without it, ranks have chosen the
    dtype of N before they read ``status``. So ``ValueError`` then also comes if some ranks have
    float weights and others integers.
    """
    if status.num_failed:
        raise _failure(axis, status, can_ask=can_ask)
    # As ints: on six ranks, the square of the sum is beyond what float64 holds exactly.
    sum_of_squares = int(status.fingerprint_squared)
    if num_ranks * sum_of_squares != int(status.fingerprint) ** 2:
        raise _disagreement(axis, compared, can_ask=can_ask)
    num_integer_weights = status.num_holding - status.num_float_weights
    # Beside a device, each rank decides on the dtype of N before it reads the status.
    if not can_ask and status.num_float_weights > 0 and num_integer_weights > 0:
        raise ValueError(
            f"the weights of {status.num_float_weights:.0f} ranks of {axis} are floats, those of "
            f"{num_integer_weights:.0f} are integers, and nothing was updated: return one dtype "
            "from weight_fn on all ranks"
        )
    check_total(status.num_tokens)
    if status.num_tokens > MAX_EXACT_INT and not status.num_float_weights:
        raise ValueError(
            f"num_tokens, the sum of all weights, overflows: over {axis} it is more "
            f"than {MAX_EXACT_INT=}, "
            "up to which ranks add integers exactly, and nothing was updated; make the weights "
            "smaller, which changes nothing else"
        )


def _failure(axis: ProcessAxis, status: Status, *, can_ask: bool) -> RankError:
    """Returns the error that names the ranks that failed.

    If ``can_ask``, all ranks call ``axis.gather_object`` together, and the error quotes those that
    failed. Otherwise it names a rank only if a single one failed.
    """
    texts: dict[int, str] = {}
    if can_ask:
        answers = enumerate(axis.gather_object(None))
        texts = {rank: text for rank, text in answers if text}
    who = "several ranks"
    if texts:
        who = _format_ranks([*texts])
    elif can_ask or status.num_failed == 1:
        who = _format_ranks([int(status.failed_rank)])
    reasons = [f"rank {rank}: {text}" for rank, text in texts.items()]
    why = "; ".join(reasons) or "Its output says why"
    return RankError(
        f"{who} of {axis} failed, and the step with it on every rank; nothing was updated. {why}"
    )


def _disagreement(
    axis: ProcessAxis, compared: Mapping[str, TreeFingerprint], *, can_ask: bool
) -> ValueError:
    """Returns the error that says in which of the ``compared`` trees the ranks differ.

    If ``can_ask``, all ranks call this together. Otherwise the error names all of the trees, and
    what this rank has.
    """
    notes = {name: (x.hash, x.lines) for name, x in compared.items()}
    if can_ask:
        difference = _describe_difference(axis.gather_object(notes))
    else:
        difference = (
            f"one of {', '.join(notes)}, and nothing was updated: compare what each rank prints; "
            f"rank {axis.rank} has {notes}"
        )
    return ValueError(f"the ranks of {axis} disagree on {difference}")


def _describe_difference(notes: Sequence[Mapping[str, Any]]) -> str:
    """Describes the first name whose notes differ between ranks, and each group of ranks' notes.

    ``notes`` has each rank's (hash, lines) by name, in order of rank. Of each group, at most
    ``MAX_DIFFERENCES`` differing lines are shown. If no notes differ, the last name is described.
    """
    names = dict.fromkeys(name for note in notes for name in note)
    for name in names:
        ranks_by_note: dict[Any, list[int]] = {}
        for rank, note in enumerate(notes):
            if name in note:
                ranks_by_note.setdefault(note[name], []).append(rank)
        if len(ranks_by_note) > 1:
            break
    parts = []
    for (_, lines), ranks in ranks_by_note.items():
        differing = []
        for line in lines[:-1]:  # The last line describes the containers.
            if any(line not in others for _, others in ranks_by_note):
                differing.append(line)
        shown = (differing or lines[-1:])[:MAX_DIFFERENCES]
        more = ", ..." if len(differing) > MAX_DIFFERENCES else ""
        parts.append(f"{_format_ranks(ranks)} with {', '.join(shown)}{more}")
    return f"{name}, and nothing was updated: {' against '.join(parts)}"


def _format_ranks(ranks: Sequence[int]) -> str:
    plural = "s" if len(ranks) > 1 else ""
    numbers = ", ".join(str(rank) for rank in ranks)
    return f"rank{plural} {numbers}"
