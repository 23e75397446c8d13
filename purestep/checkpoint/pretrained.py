"""Reads weights that other tools wrote, as safetensors: each rank the part that it holds.

A file begins with the length of its header. The header is JSON, with dtype, shape and place of
each tensor. It is read here, since the library of the format maps the whole file when it opens it.
A rank whose address space is smaller than the file could not do that.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.checkpoint.file import File
from purestep.tree.shard import Shard

_INDEX = ".safetensors.index.json"
"""How a folder's list of names and files ends, as Hugging Face's hub has it."""
_MAX_NAMES = 5
"""How many names an error lists."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class _SavedTensor(NamedTuple):
    """Says where a tensor is: its file, its first byte there, dtype and shape."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


def load_safetensors(
    path: File,
    like: Mapping[str, Tensor | Shard],
    *,
    device: torch.device | str | int | None = None,
) -> dict[str, Any]:
    """Loads named tensors from safetensors that any tool wrote; of a ``Shard``, this rank's part.

    No rank reads more than it holds, so the weights may be larger than its memory. ``like`` holds
    the params of ``ps.from_module`` or ``ps.shard``, also those on "meta". The tensors are new, and
    their values are converted to the dtypes of ``like``. The files may hold more tensors. A missing
    name, a different shape, an unknown dtype or a damaged header raises ``ValueError``, and so does
    a tensor that is cut short. Changed values go unnoticed. A path without files raises
    ``FileNotFoundError``. So do several files without one index, and an index that names a missing
    file. ``export_safetensors`` writes a file that it reads, except for rare dtypes such as
    ``float8_e8m0fnu``.

    Args:
        path: a file, or a folder as on Hugging Face's hub: one file, or several with an index.
        like: the params, by their names in the files.
        device: where to load them. None: to the devices of ``like``; from "meta", to those of the
            shards' axes, or the host.

    >>> import tempfile
    >>> from purestep import checkpoint, from_module
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.export_safetensors(f"{folder}/model.safetensors", {"weight": torch.eye(2)})
    ...     with torch.device("meta"):
    ...         params, apply = from_module(torch.nn.Linear(2, 2, bias=False))
    ...     load_safetensors(folder, like=params)
    {'weight': tensor([[1., 0.],
            [0., 1.]])}
    """
    _check_like(like)
    saved = _find_tensors(Path(path))
    _check_names(path, saved, like)
    loaded: dict[str, Any] = {}
    for name, leaf in like.items():
        loaded[name] = _read_leaf(name, saved[name], leaf, device)
    return loaded


def _find_tensors(path: Path) -> dict[str, _SavedTensor]:
    """Finds each tensor of a file, or of a folder's one file, or of those that its index names.

    Returns where each is, by name. Raises ``FileNotFoundError`` unless a folder has one index, or
    one file and no index. Raises it also if the index names a missing file. Raises ``ValueError``
    if a header or the index is damaged, or if a file lacks a tensor that the index says is there.
    """
    if path.is_file():
        return _read_header(path)
    files = sorted(path.glob("*.safetensors"))
    indices = sorted(path.glob(f"*{_INDEX}"))
    if len(indices) == 1:
        return _find_by_index(indices[0])
    if len(files) != 1 or indices:
        names = sorted(file.name for file in [*files, *indices])
        raise FileNotFoundError(
            f"{path} is neither a file of safetensors nor a folder with one, or with several and "
            f"one index of them (*{_INDEX}); it has {names or 'none'}"
        )
    return _read_header(files[0])


def _find_by_index(path: Path) -> dict[str, _SavedTensor]:
    """Finds each tensor that an index names, in the file that it names for it.

    Such a file may hold other tensors, too, even one that the index has elsewhere. Raises as
    ``_find_tensors``.
    """
    file_of = _read_index(path)
    headers = {file: _read_header(file) for file in set(file_of.values())}
    saved = {}
    for name, file in file_of.items():
        if name not in headers[file]:
            raise ValueError(
                f"{path} says that {name} is in {file.name}, which lacks it: copy both again"
            )
        saved[name] = headers[file][name]
    return saved


def _read_index(path: Path) -> dict[str, Path]:
    """Returns the file of each tensor by an index; raises ``ValueError`` if it is damaged."""
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        return {name: path.parent / file for name, file in weight_map.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no index of files of safetensors, or was cut short: copy it again"
        ) from error


def _read_header(path: Path) -> dict[str, _SavedTensor]:
    """Reads where each tensor of a file is, with its dtype and shape, from the header, by name.

    Raises ``ValueError`` if the header is cut short, or does not describe tensors.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size:
            raise _damage_error(path)
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise _damage_error(path) from error
    if not isinstance(header, dict):
        raise _damage_error(path)
    header.pop("__metadata__", None)
    saved = {}
    for name, entry in header.items():
        try:
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if not 0 <= operator.index(start) <= operator.index(end):
                raise ValueError(f"data_offsets of {name}")
            dtype = str(entry["dtype"])
            if dtype in _DTYPES:
                num_bytes = math.prod(shape) * _DTYPES[dtype].itemsize
                if end - start != num_bytes:
                    raise ValueError(f"data_offsets of {name}")
            saved[name] = _SavedTensor(path, 8 + length + start, dtype, shape)
        except (KeyError, TypeError, ValueError) as error:
            raise _damage_error(path) from error
    return saved


def _damage_error(path: Path) -> ValueError:
    return ValueError(
        f"{path} is no file of safetensors, or was cut short: copy it again"
    )


def _check_like(like: object) -> None:
    """Raises ``TypeError`` unless ``like`` maps texts to tensors or ``Shard``s."""
    if not isinstance(like, Mapping):
        raise TypeError(
            f"like must be a dict of params by name, got {type(like).__name__}: pass the params "
            "of ps.from_module, or ps.shard(params, axis)"
        )
    for name, leaf in like.items():
        if not isinstance(name, str):
            raise TypeError(
                f"like has the key {name!r}: names in files are texts, as those of ps.from_module"
            )
        if not isinstance(leaf, Tensor | Shard):
            raise TypeError(
                f"like[{name!r}] is {type(leaf).__name__}, no tensor: the names in files are "
                "flat, as those of ps.from_module are"
            )


def _check_names(path: File, saved: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` if the files lack a name of ``like``."""
    missing = [name for name in like if name not in saved]
    if missing:
        shown = ", ".join(missing[:_MAX_NAMES])
        present = ", ".join([*saved][:_MAX_NAMES])
        raise ValueError(
            f"{os.fspath(path)} lacks {len(missing)} of {len(like)} tensors: {shown}; it has "
            f"{present}: rename the keys of like= to those of the files, and back (of a tied "
            "weight, call model.tie_weights() before from_module)"
        )


def _read_leaf(
    name: str,
    saved: _SavedTensor,
    leaf: Tensor | Shard,
    device: torch.device | str | int | None,
) -> Tensor | Shard:
    """Reads a tensor, or this rank's part of it, in the dtype of ``leaf``, to ``device``.

    None is the device of ``leaf``. If that is the meta device, it is the device of the axis of a
    ``Shard``, or the host. Returns a ``Shard`` for a ``Shard``.

    Raises ``ValueError`` if ``leaf`` has another shape, or if the file's dtype is not in
    ``_DTYPES``.
    """
    if saved.shape != tuple(leaf.shape):
        raise ValueError(
            f"{name} has shape {saved.shape} in {saved.path}, but like= has {tuple(leaf.shape)}: "
            "load the weights of the same configuration"
        )
    if saved.dtype not in _DTYPES:
        raise ValueError(
            f"{name} is {saved.dtype} in {saved.path}, which is none of {', '.join(_DTYPES)}: "
            "convert the file"
        )
    if isinstance(leaf, Shard):
        (local,) = tree.leaves(leaf)
        shard_spec = leaf.inner_spec
        default_device = getattr(leaf.axis, "device", "cpu")
        loaded = _read_block(saved, shard_spec.local_block)
        return shard_spec.wrap(_convert(loaded, local, device, default_device))
    full_block = [(0, length) for length in leaf.shape]
    return _convert(_read_block(saved, full_block), leaf, device)


def _convert(
    loaded: Tensor,
    like: Tensor,
    device: torch.device | str | int | None,
    default_device: torch.device | str = "cpu",
) -> Tensor:
    """Converts a tensor to the dtype of ``like``, and moves it to ``device``.

    None is the device of ``like``, or ``default_device`` if ``like`` is on the meta device.
    """
    if device is None:
        device = default_device if like.is_meta else like.device
    return loaded.to(device, like.dtype)


def _read_block(saved: _SavedTensor, block: Sequence[tuple[int, int]]) -> Tensor:
    """Reads one block of a tensor from its file, and nothing else.

    ``block`` has ``(start, length)`` for each dimension. The dtype must be one of ``_DTYPES``.
    Returns a new tensor on the host. Raises ``ValueError`` if the file ends before the block does.
    """
    dtype = _DTYPES[saved.dtype]
    loaded = torch.empty([length for _, length in block], dtype=dtype, device="cpu")
    # The entries from the last dimension on of which a part is read are next to each other.
    last = 0
    for dim, (_, length) in enumerate(block):
        if length != saved.shape[dim]:
            last = dim
    strides = [math.prod(saved.shape[dim + 1 :]) for dim in range(len(block))]
    runs = [range(start, start + length) for start, length in block[:last]]
    num_bytes = loaded[(0,) * last].nbytes if loaded.numel() else 0
    address = loaded.data_ptr()
    with saved.path.open("rb", buffering=0) as file:
        for indices in itertools.product(*runs):
            starts = [*indices, *(start for start, _ in block[last:])]
            position = sum(i * n for i, n in zip(starts, strides, strict=True))
            file.seek(saved.offset + position * dtype.itemsize)
            _read_into(file, address, num_bytes, saved.path)
            address += num_bytes
    return loaded


def _read_into(file: Any, address: int, num_bytes: int, path: Path) -> None:
    """Reads ``num_bytes`` to a memory address, from the position of an open ``file``.

    Raises ``ValueError``, which names ``path``, if the file ends before.
    """
    while num_bytes:
        memory = (ctypes.c_ubyte * num_bytes).from_address(address)
        num_read = file.readinto(memory)
        if not num_read:
            raise _damage_error(path)
        address += num_read
        num_bytes -= num_read
