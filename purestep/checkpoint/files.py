"""One file for a tree, in the format of safetensors: eight bytes that say how long the header is, the header, the values.

The header is JSON: each tensor's name, dtype and shape, and two checksums, one of itself and one of the values.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from purestep import state
from purestep.checkpoint.whole import File, replaced
from purestep.state import Slot
from purestep.tree.shard import Shard

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex128: "C128",
    torch.complex64: "C64",
    torch.complex32: "C32",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format calls them; of C128 and C32 its own readers do not know."""

NAMES = {name: dtype for dtype, name in DTYPES.items()}

START, BLANK = b'{"__metadata__":{"checksum":"', b"00000000"
LONGEST = 2**30
"""Bytes of a header, that of ten million tensors: a longer one is a length that was changed."""

CHUNK = 2**22
"""Bytes that are read or written at once, and still in the processor's cache when they are summed up."""


T = TypeVar("T", bound=Slot)
Kinds: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def writable(slots: dict[str, Slot]) -> dict[str, Slot]:
    """The same, but that what has no name in the format is refused."""
    for name, slot in slots.items():
        if _dtype(slot) not in DTYPES:
            raise TypeError(
                f"{name} is {state.kind(slot)}, a dtype that no file holds; .view it as one of its size"
            )
    return slots


def write(
    path: File,
    slots: Mapping[str, Slot],
    whole: Callable[[Any], Tensor] = lambda tensor: tensor,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors, in the order of ``ordered``; ``whole`` makes each of them when it is written."""
    slots = ordered(slots)
    sizes = (_dtype(slot).itemsize * math.prod(slot.shape) for slot in slots.values())
    ends = [*itertools.accumulate(sizes, initial=0)]
    entries = {
        name: {
            "dtype": DTYPES[_dtype(slot)],
            "shape": [*slot.shape],
            "data_offsets": [*offsets],
        }
        for (name, slot), offsets in zip(slots.items(), itertools.pairwise(ends), strict=True)
    }
    with replaced(path) as file:
        file.write(_header(entries, 0, notes or {}))
        checksum = 0
        for slot in slots.values():
            for chunk in _chunks(whole(slot).cpu().contiguous()):
                checksum = zlib.crc32(chunk, checksum)
                file.write(chunk)
        file.seek(0)
        file.write(_header(entries, checksum, notes or {}))


def ordered(slots: Mapping[str, Slot]) -> dict[str, Slot]:
    """By falling sizes of an element, so that in a file every tensor begins at a multiple of its own."""
    return dict(sorted(slots.items(), key=lambda named: -_dtype(named[1]).itemsize))


def read_all(path: File) -> tuple[dict[str, Tensor], int]:
    """All tensors of a file, and the checksum of their values."""
    with Path(path).open("rb") as file:
        kinds, _ = _read_header(file, path)
    try:
        slots = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in kinds.items()}
    except (RuntimeError, TypeError) as error:
        raise damaged(path) from error
    return read(path, slots)


def read(path: File, slots: Mapping[str, T]) -> tuple[dict[str, T], int]:
    """What is in a file, in fresh memory, and the checksum of its values."""
    with Path(path).open("rb") as file:
        kinds, checksum = _read_header(file, path)
        found = {name: f"{dtype} of shape {shape}" for name, (dtype, shape) in kinds.items()}
        state.check_fit(found, slots, os.fspath(path))
        fresh = {name: state.empty_like(slot) for name, slot in slots.items()}
        summed = 0
        for name in kinds:
            summed = _read_into(fresh[name], file, summed)
        if summed != checksum or file.read(1):
            raise damaged(path)
    return fresh, checksum


def _dtype(slot: Slot) -> torch.dtype:
    return slot.piece.dtype if isinstance(slot, Shard) else slot.dtype


def _header(entries: Mapping[str, Any], checksum: int, notes: Mapping[str, str]) -> bytes:
    """The header and its length, as long for one checksum as for any other."""
    metadata = {"checksum": BLANK.decode(), "of the values": f"{checksum:08x}", **notes}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sealed = START + b"%08x" % zlib.crc32(text) + text[len(START + BLANK) :]
    return len(text).to_bytes(8, "little") + sealed


def _read_header(file: BufferedReader, path: File) -> tuple[Kinds, int]:
    """Dtype and shape of each tensor, in the order of their values, and the checksum of these."""
    length = int.from_bytes(file.read(8), "little")
    text = file.read(min(length, LONGEST))
    summed = START + b"%08x" % zlib.crc32(START + BLANK + text[len(START + BLANK) :])
    if len(text) != length or not text.startswith(summed):
        raise damaged(path)
    try:
        header = json.loads(text)
        checksum = int(header.pop("__metadata__")["of the values"], 16)
        entries = {
            name: (NAMES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()
        }
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise damaged(path) from error
    return entries, checksum


def damaged(path: File) -> ValueError:
    """The error for what ``save`` did not write, or not so."""
    return ValueError(
        f"{os.fspath(path)} is no checkpoint of ps.checkpoint.save, or was cut short or changed since: take an earlier one, "
        "or begin anew with a different file"
    )


def _read_into(slot: Slot, file: BufferedReader, checksum: int) -> int:
    """Fills a tensor, or a piece of one, with the next values of a file, and goes on with their checksum."""
    if isinstance(slot, Tensor) and slot.is_cpu and slot.is_contiguous():
        values = slot
    else:
        values = torch.empty(slot.shape, dtype=_dtype(slot), device="cpu")
    for chunk in _chunks(values):
        if file.readinto(chunk) != len(chunk):
            raise damaged(file.name)
        checksum = zlib.crc32(chunk, checksum)
    if isinstance(slot, Shard):
        slot.piece.copy_(values.narrow(slot.dim, *slot.place.span))
    elif values is not slot:
        slot.copy_(values)
    return checksum


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The memory of a contiguous tensor on the host, to be read or written."""
    # Not by numpy, which torch does without, and which does not know all dtypes.
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    whole = memoryview(memory).cast("B")
    for begin in range(0, tensor.nbytes, CHUNK):
        yield whole[begin : begin + CHUNK]
