"""State in a file, which is always a whole one: ``save`` and ``load``.

>>> import tempfile
>>> state = {"w": torch.ones(2), "position": torch.tensor(7)}
>>> with tempfile.TemporaryDirectory() as folder:
...     save(f"{folder}/state", state)
...     load(f"{folder}/state", like=state)
{'w': tensor([1., 1.]), 'position': tensor(7)}

The file is in the format of safetensors, whose readers open it: eight bytes that say how long the header is, the header,
the values. The header is JSON: each tensor's name, dtype and shape, and two checksums, one of itself and one of the values.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import itertools
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor

from purestep import state, tree as trees
from purestep.types import Tree

File: TypeAlias = str | os.PathLike[str]

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


def save(path: File, tree: Tree) -> None:
    """Writes a tree of tensors, in the place of what was there: at every moment there is a whole file, the old or the new one.

    So whatever ends it, a crash, a full disk, Ctrl-C, leaves the last one, and several savers at once leave that of one of
    them. When it returns, the file is on the disk. Nothing is held of it in memory, but for one leaf at a time that is not
    contiguous, or not on the host.

    Raises ``TypeError`` and ``ValueError`` for what ``state_dict`` refuses, ``OSError`` where the file cannot be written.

    >>> save("nowhere/state", {"w": torch.ones(2)})
    Traceback (most recent call last):
    ...
    OSError: nowhere/state cannot be written (No such file or directory): name a file in a folder that is there, ...
    """
    leaves = state.named(tree)
    for name, leaf in leaves.items():
        if leaf.dtype not in DTYPES:
            raise TypeError(
                f"{name} is {trees.kind(leaf)}, a dtype that no file holds; .view it as one of its size"
            )
    # Falling sizes, so that every tensor begins at a multiple of its own.
    leaves = dict(sorted(leaves.items(), key=lambda named: -named[1].itemsize))
    ends = [*itertools.accumulate((leaf.nbytes for leaf in leaves.values()), initial=0)]
    entries = {
        name: {"dtype": DTYPES[leaf.dtype], "shape": [*leaf.shape], "data_offsets": [*offsets]}
        for (name, leaf), offsets in zip(leaves.items(), itertools.pairwise(ends), strict=True)
    }
    with replacing(path) as file:
        file.write(_header(entries, checksum=0))
        checksum = 0
        for leaf in leaves.values():
            for chunk in _chunks(leaf.cpu().contiguous()):
                checksum = zlib.crc32(chunk, checksum)
                file.write(chunk)
        file.seek(0)
        file.write(_header(entries, checksum))


def load(path: File, like: Tree) -> Tree:
    """The tree that was saved; in containers, on devices and in the memory order of ``like``, and in fresh memory.

    Names, shapes and dtypes must be those of ``like``, or every difference is named. Nothing in the file is ever run, and
    nothing of it is returned before all of it was summed up: one that was cut short or changed is refused by its name.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     save(file.name, {"w": torch.ones(2)})
    ...     load(file.name, like={"w": torch.zeros(3)})
    Traceback (most recent call last):
    ...
    ValueError: ... does not fit like:
      tree['w'] is torch.float32 of shape (2,), and torch.float32 of shape (3,) was expected
    """
    leaves = state.named(like)
    with Path(path).open("rb") as file:
        entries, checksum = _read_header(file, path)
        kinds = {name: f"{dtype} of shape {shape}" for name, (dtype, shape) in entries.items()}
        state.check_fit(kinds, leaves, os.fspath(path))
        fresh = {name: state.empty_like(leaf) for name, leaf in leaves.items()}
        found = 0
        for name in entries:
            found = _read_into(fresh[name], file, found)
        if found != checksum or file.read(1):
            raise _damaged(path)
    return trees.unflatten(trees.flatten(like)[1], [fresh[name] for name in leaves])


def _header(entries: Mapping[str, Any], checksum: int) -> bytes:
    """The header and its length, as long for one checksum as for any other."""
    metadata = {"checksum": BLANK.decode(), "of the values": f"{checksum:08x}"}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sealed = START + b"%08x" % zlib.crc32(text) + text[len(START + BLANK) :]
    return len(text).to_bytes(8, "little") + sealed


def _read_header(
    file: BufferedReader, path: File
) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], int]:
    """Dtype and shape of each tensor, in the order of their values, and the checksum of these."""
    length = int.from_bytes(file.read(8), "little")
    text = file.read(min(length, LONGEST))
    summed = START + b"%08x" % zlib.crc32(START + BLANK + text[len(START + BLANK) :])
    if len(text) != length or not text.startswith(summed):
        raise _damaged(path)
    try:
        header = json.loads(text)
        checksum = int(header.pop("__metadata__")["of the values"], 16)
        entries = {
            name: (NAMES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()
        }
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise _damaged(path) from error
    return entries, checksum


def _damaged(path: File) -> ValueError:
    return ValueError(
        f"{os.fspath(path)} is no checkpoint of ps.checkpoint.save, or was cut short or changed since: take an earlier one, "
        "or begin anew with a different file"
    )


def _read_into(leaf: Tensor, file: BufferedReader, checksum: int) -> int:
    """Fills a leaf with the next values of a file, and goes on with their checksum."""
    direct = leaf.is_cpu and leaf.is_contiguous()
    values = leaf if direct else torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
    for chunk in _chunks(values):
        if file.readinto(chunk) != len(chunk):
            raise _damaged(file.name)
        checksum = zlib.crc32(chunk, checksum)
    if not direct:
        leaf.copy_(values)
    return checksum


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The memory of a contiguous tensor on the host, to be read or written."""
    # Not by numpy, which torch does without, and which does not know all dtypes.
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    whole = memoryview(memory).cast("B")
    for begin in range(0, tensor.nbytes, CHUNK):
        yield whole[begin : begin + CHUNK]


@contextmanager
def replacing(path: File) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of ``path`` when the block is through and all of it is on the disk.

    Whenever the program ends, there is a whole file, the old or the new one. After an error there is nothing else; what is
    left by a process that was killed, the next one to write to this path clears away. A link stays a link, to the new file,
    and the new file has the rights of the old one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/losses") as file:
    ...         _ = file.write(b"0.5")
    ...     Path(f"{folder}/losses").read_text()
    '0.5'
    """
    given, path = Path(path), Path(os.path.realpath(path))
    with _naming(given), _unfinished(path) as file:
        yield file
        file.flush()
        if path.exists():
            shutil.copymode(path, file.name)
        os.fsync(file.fileno())
        os.replace(file.name, path)
        # The new name, too, is on the disk; but for file systems that know nothing of the kind.
        with suppress(OSError):
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def check_writable(path: File) -> None:
    """Raises, before any work is done, what ``save`` would raise after it.

    >>> check_writable("nowhere/state")
    Traceback (most recent call last):
    ...
    OSError: nowhere/state cannot be written (No such file or directory): name a file in a folder that is there, ...
    """
    given, path = Path(path), Path(os.path.realpath(path))
    with _naming(given), _unfinished(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of the system say which file they are about."""
    try:
        yield
    except OSError as error:
        named = OSError(
            f"{path} cannot be written ({error.strerror or error}): name a file in a folder that is there, yours to write to, "
            "and has room; what was there is as it was"
        )
        named.errno = error.errno
        raise named from error


@contextmanager
def _unfinished(path: Path) -> Iterator[BinaryIO]:
    """A new file beside ``path``, of which others keep off while this process lives; gone afterwards, unless renamed."""
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.unfinished"):
        with suppress(OSError), leftover.open("r+b") as file:
            if _lock(file, wait=False):
                leftover.unlink()
    while True:
        unfinished = path.with_name(f"{path.name}.{os.urandom(4).hex()}.unfinished")
        with unfinished.open("xb") as file:
            _lock(file, wait=True)
            # In between, it may have been taken for a leftover.
            if unfinished.exists():
                try:
                    yield file
                finally:
                    unfinished.unlink(missing_ok=True)
                return


def _lock(file: BinaryIO, wait: bool) -> bool:
    """Whether the file is this process's now, until it closes it or ends in whatever way.

    No, where the system or the file system has no locks; leftovers stay there, and harm nobody.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True
