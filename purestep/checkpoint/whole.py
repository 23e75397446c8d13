"""Files and folders that are always whole ones: written beside their place, and put there when all of it is on the disk."""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeAlias

File: TypeAlias = str | os.PathLike[str]

SUMS = "checksums"
"""The file by which a folder is known to be a checkpoint, and whole."""


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
    with naming(path), replaced(path) as file:
        yield file


@contextmanager
def replaced(path: File) -> Iterator[BinaryIO]:
    """The same, whose errors are the system's own."""
    with _unfinished(real := Path(os.path.realpath(path))) as file:
        yield file
        file.flush()
        if real.exists():
            shutil.copymode(real, file.name)
        os.fsync(file.fileno())
        os.replace(file.name, real)
        _sync(real.parent)


@contextmanager
def replaced_folder(path: File) -> Iterator[Path]:
    """The same of a folder to write files to, which are on the disk when the block is through; one that is no checkpoint stays."""
    with _unfinished(real := Path(os.path.realpath(path))) as file:
        _check_replaceable(real)
        folder = _folder_of(Path(file.name))
        folder.mkdir()
        yield folder
        _sync(folder)
        if real.exists():
            shutil.copymode(real, folder)
            _exchange(folder, real)
        else:
            folder.rename(real)
        _sync(real.parent)


def check_writable(path: File) -> None:
    """Raises, before any work is done, what ``save`` would raise after it.

    >>> check_writable("nowhere/state")
    Traceback (most recent call last):
    ...
    OSError: nowhere/state cannot be written (No such file or directory): name a file in a folder that is there, ...
    """
    with naming(path), _unfinished(real := Path(os.path.realpath(path))):
        _check_replaceable(real)


def is_folder(path: Path) -> bool:
    """Whether this is a folder that ``save`` has made."""
    return (path / SUMS).is_file()


def _check_replaceable(path: Path) -> None:
    if path.is_dir() and not is_folder(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


@contextmanager
def naming(path: File) -> Iterator[None]:
    """Errors of the system say which file they are about."""
    try:
        yield
    except OSError as error:
        named = OSError(
            f"{Path(path)} cannot be written ({error.strerror or error}): name a file in a folder that is there, yours to write to, "
            "and has room; what was there is as it was"
        )
        named.errno = error.errno
        raise named from error


@contextmanager
def _unfinished(path: Path) -> Iterator[BinaryIO]:
    """A new file beside ``path``, of which others keep off while this process lives; gone afterwards, unless renamed.

    The same is true of a folder of its name.
    """
    clear(path.parent, glob.escape(path.name))
    while True:
        unfinished = path.with_name(f"{path.name}.{os.urandom(4).hex()}.unfinished")
        with unfinished.open("xb") as file:
            _lock(file, wait=True)
            # In between, it may have been taken for a leftover.
            if unfinished.exists():
                try:
                    yield file
                finally:
                    _remove(unfinished)
                return


def clear(folder: Path, names: str) -> None:
    """Takes away what those who were killed have left beside files of such names."""
    for leftover in folder.glob(f"{names}.{'[0-9a-f]' * 8}.unfinished"):
        with suppress(OSError), leftover.open("r+b") as file:
            if _lock(file, wait=False):
                _remove(leftover)


def _folder_of(unfinished: Path) -> Path:
    return unfinished.with_suffix(".folder")


def _remove(unfinished: Path) -> None:
    folder = _folder_of(unfinished)
    if folder.exists():
        remove(folder)
    # Last, so that whoever is killed before leaves something by which the folder is found.
    unfinished.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Takes a file or a folder away."""
    if path.is_dir():
        # What makes it a checkpoint goes first, so that half of one is none.
        (path / SUMS).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> None:
    """Each has the other's name, at once."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)
    if rename is None or rename(here, os.fsencode(one), here, os.fsencode(other), exchange):
        raise OSError(
            f"{os.strerror(ctypes.get_errno() or errno.ENOSYS)}: this system, or this file system, cannot replace a folder at "
            "once; give each checkpoint a name of its own, as ps.checkpoint.save_step does"
        )


def _sync(folder: Path) -> None:
    """New names, too, are on the disk; but for file systems that know nothing of the kind."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


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
