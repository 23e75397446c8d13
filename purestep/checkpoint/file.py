"""One file in the format of safetensors, with a checksum of its tensors in its metadata."""

import ctypes
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from purestep import state
from purestep.state import NamedLeaf
from purestep.tree import format_leaf
from purestep.tree.shard import Shard

File: TypeAlias = str | os.PathLike[str]

UNFINISHED = ".unfinished"
"""How a name ends of what is not whole yet, or no longer."""


def write(path: File, tensors: Mapping[str, Tensor]) -> None:
    """Puts a file of these tensors in the place of the one that was there."""
    tensors = {
        name: tensor.cpu().contiguous() for name, tensor in sorted(tensors.items())
    }
    place, checksum = Path(os.path.realpath(path)), 0
    for name, tensor in tensors.items():
        checksum = _sum(name, tensor, checksum)
    with (
        naming(path),
        TemporaryDirectory(UNFINISHED, f"{place.name}.", place.parent) as folder,
    ):
        new, blank = Path(folder, "new"), Path(folder, "blank")
        specs = {name: _spec(tensor) for name, tensor in tensors.items()}
        serialize_file(specs, new, {"format": "pt", "crc32": f"{checksum:08x}"})
        blank.touch()  # with the rights of any new file
        shutil.copymode(place if place.exists() else blank, new)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(new, place)


def read(
    path: File, slots: Mapping[str, NamedLeaf]
) -> tuple[dict[str, NamedLeaf], str]:
    """The values of a file in fresh memory, of a ``Shard`` the piece; and their checksum."""
    fresh = {name: state.empty_like(slot) for name, slot in slots.items()}
    found, checksum = dict[str, str](), 0
    try:
        # Not mapped: that opens the file twice, and it may be replaced in between.
        with safe_open(os.fspath(path), "pt", backend="pread") as file:
            for name in sorted(file.keys()):
                values = file.get_tensor(name)
                found[name], checksum = (
                    format_leaf(values),
                    _sum(name, values, checksum),
                )
                slot = fresh.get(name)
                if slot is not None and state.format_named_leaf(slot) == found[name]:
                    if isinstance(slot, Shard):
                        values = values.narrow(slot.dim, *slot.spec.local_range)
                    state.local_tensor(slot).copy_(values)
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise damaged(path) from error
    state.check_fit(found, slots, os.fspath(path))
    if metadata.get("crc32") != (computed := f"{checksum:08x}"):
        raise damaged(path)
    return fresh, computed


def damaged(path: File) -> ValueError:
    """The error for bytes that ``save`` did not write."""
    return ValueError(
        f"{os.fspath(path)} is no checkpoint of ps.checkpoint.save, or was cut short or changed "
        "since: take an earlier one, or begin anew with another name"
    )


@contextmanager
def naming(path: File) -> Iterator[None]:
    """Errors of the system name the file, and what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{os.fspath(path)} cannot be written ({getattr(error, 'strerror', None) or error}): "
            "name a file in a folder that has room. A tree with Shard makes a folder, which is "
            "never replaced: give each a different name, as save_step does"
        ) from error


def _spec(tensor: Tensor) -> TensorSpec:
    """What safetensors takes; its ``save_file`` needs numpy."""
    # Without "_x2" it refuses two numbers of four bits in a byte, which it writes and cannot read.
    dtype, at = str(tensor.dtype)[6:].removesuffix("_x2"), tensor.data_ptr()
    return TensorSpec(
        dtype=dtype, shape=tensor.shape, data_ptr=at, data_len=tensor.nbytes
    )


def _sum(name: str, tensor: Tensor, checksum: int) -> int:
    """Goes on with the checksum of names, dtypes, shapes and values."""
    checksum = zlib.crc32(f"{name}: {format_leaf(tensor)}".encode(), checksum)
    if not tensor.nbytes:
        return checksum  # Of the null pointer of an empty tensor, crc32 would begin again at 0.
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return zlib.crc32(memory, checksum)
