"""Writes and reads one file of safetensors, whose metadata holds a checksum of its tensors."""

import ctypes
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeAlias

from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from purestep import state
from purestep.state import NamedLeaves
from purestep.tree import format_leaf
from purestep.tree.shard import Shard

File: TypeAlias = str | os.PathLike[str]

UNFINISHED = ".unfinished"
"""The suffix of files and folders that are not complete, or about to be removed."""


def write_file(path: File, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors and a checksum to a file; an older file is replaced atomically.

    It follows a link, and keeps the permissions of an older file. Raises ``OSError`` with the path
    if that fails, also for a dtype that safetensors lacks. The older file then stays as it was.
    """
    sorted_tensors = {
        name: tensors[name].cpu().contiguous() for name in sorted(tensors)
    }
    checksum = 0
    for name, tensor in sorted_tensors.items():
        checksum = _add_to_checksum(checksum, name, tensor)
    target = Path(os.path.realpath(path))
    with (
        path_in_errors(path),
        TemporaryDirectory(UNFINISHED, f"{target.name}.", target.parent) as folder,
    ):
        new = Path(folder, "new")
        specs = {name: _make_spec(tensor) for name, tensor in sorted_tensors.items()}
        serialize_file(specs, new, {"format": "pt", "crc32": f"{checksum:08x}"})
        blank = Path(folder, "blank")
        blank.touch()  # It has the permissions of any new file.
        shutil.copymode(target if target.exists() else blank, new)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(new, target)


class SavedLeaves(NamedTuple):
    """Holds leaves that were read from a checkpoint.

    Attributes:
        leaves: by name, in new memory.
        save_id: tells apart two saves under one path.
    """

    leaves: NamedLeaves
    save_id: str


def read_file(path: File, like: NamedLeaves) -> SavedLeaves:
    """Reads the leaves of ``like`` from a file to their devices; of a ``Shard``, this rank's part.

    The leaves are new. Raises ``ValueError`` if the file is damaged, or if names, shapes or dtypes
    differ from ``like``. Raises ``FileNotFoundError`` if there is no file, and another ``OSError``
    if it cannot be read. The ``save_id`` is the checksum.
    """
    # safe_open calls each file missing that it cannot open, also one without permission to read. A
    # program that then starts anew would lose its run.
    with open(path, "rb"):
        pass
    loaded = {name: state.empty_like(leaf) for name, leaf in like.items()}
    formatted = {}
    checksum = 0
    try:
        # Not mapped: that opens the file twice, and it may be replaced in between.
        with safe_open(os.fspath(path), "pt", backend="pread") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                checksum = _add_to_checksum(checksum, name, tensor)
                formatted[name] = format_leaf(tensor)
                leaf = loaded.get(name)
                if leaf is None or state.format_named_leaf(leaf) != formatted[name]:
                    continue  # check_fit names all such differences.
                if isinstance(leaf, Shard):
                    for dim, part in enumerate(leaf.inner_spec.local_block):
                        tensor = tensor.narrow(dim, *part)
                state.local_tensor(leaf).copy_(tensor)
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise make_damage_error(path) from error
    state.check_fit(formatted, like, os.fspath(path))
    save_id = f"{checksum:08x}"
    if metadata.get("crc32") != save_id:
        raise make_damage_error(path)
    return SavedLeaves(loaded, save_id)


def make_damage_error(path: File) -> ValueError:
    """Makes the ``ValueError`` for a file that ``save`` did not write, or that changed since."""
    return ValueError(
        f"{os.fspath(path)} is no checkpoint of ps.checkpoint.save, or was cut short or changed "
        "since: take an earlier one, or begin anew with another name"
    )


@contextmanager
def path_in_errors(path: File) -> Iterator[None]:
    """Turns an ``OSError`` or ``SafetensorError`` of the block into an ``OSError`` with advice.

    The error names ``path``. Other errors pass.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"{os.fspath(path)} cannot be written ({reason}): "
            "name a file in a folder that has room. A tree with Shard makes a folder, which is "
            "never replaced: give each a different name, as save_step does"
        ) from error


def _make_spec(tensor: Tensor) -> TensorSpec:
    """Describes a tensor to safetensors, by the address of its memory.

    The tensor must be contiguous, on the host, and kept until the file is written. An address
    needs no numpy, which the ``save_file`` of safetensors needs. Raises ``SafetensorError`` for
    a dtype that safetensors lacks.
    """
    # Without "_x2" it refuses two numbers of four bits in a byte, which it writes and cannot read.
    dtype = str(tensor.dtype).removeprefix("torch.").removesuffix("_x2")
    return TensorSpec(
        dtype=dtype,
        shape=tensor.shape,
        data_ptr=tensor.data_ptr(),
        data_len=tensor.nbytes,
    )


def _add_to_checksum(checksum: int, name: str, tensor: Tensor) -> int:
    """Returns ``checksum``, a CRC-32, continued by one tensor: name, dtype, shape and values.

    The tensor must be contiguous and on the host.
    """
    checksum = zlib.crc32(f"{name}: {format_leaf(tensor)}".encode(), checksum)
    if not tensor.nbytes:
        return checksum  # For the null pointer of an empty tensor, crc32 would start again at 0.
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return zlib.crc32(memory, checksum)
