"""A folder of checkpoints, one for each step that was saved: ``save_step`` and ``latest``."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from purestep.checkpoint.file import UNFINISHED, File, naming
from purestep.checkpoint.folder import Group, is_first, world
from purestep.checkpoint.store import save
from purestep.types import Tree


def save_step(folder: File, step: int, tree: Tree, keep: int = 3) -> None:
    """``save`` to ``folder/step``; then all but the last ``keep`` checkpoints there are removed.

    The folder is made where it is missing; whatever else is in it stays. One that holds a later
    step is refused, since ``latest`` would go on to find that one.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in range(100, 600, 100):
    ...         save_step(folder, step, {"w": torch.ones(2)}, keep=2)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['00000400', '00000500']
    """
    path = begin(folder, step, keep)
    save(path, tree)
    tidy(path, keep, world(tree))


def latest(folder: File) -> Path | None:
    """The checkpoint of the last step that was saved there, a whole one; None where there is none.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_step(folder, 100, {"w": torch.ones(2)})
    ...     latest(folder).name, latest(f"{folder}/elsewhere")
    ('00000100', None)
    """
    return max(_found(folder), key=_step, default=None)


def begin(folder: File, step: int, keep: int) -> Path:
    """Where a step is saved, in a folder that is there; refused where it holds a later one."""
    for name, number, least in [("step", step, 0), ("keep", keep, 1)]:
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"{name}={number!r} must be a whole number, {least} or more")
    with naming(folder):
        Path(folder).mkdir(exist_ok=True)
    last = latest(folder)
    if last is not None and _step(last) > step:
        raise ValueError(
            f"{folder} holds step {_step(last)}, which is later than {step}: remove what is later, "
            "or save to a different folder"
        )
    return Path(folder, f"{step:08}")


def tidy(path: Path, keep: int, group: Group) -> None:
    """Removes what this checkpoint makes superfluous, and what killed programs have left."""
    if is_first(group):
        for old in sorted(_found(path.parent), key=_step)[:-keep]:
            old.rename(f"{old}{UNFINISHED}")  # so that half of one is none
        for left in _found(path.parent, rf".*\{UNFINISHED}"):
            if _step(left) < _step(path):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _found(folder: File, end: str = "") -> list[Path]:
    """The checkpoints in a folder, or what has the name of one and this end."""
    return [path for path in Path(folder).glob("*") if re.fullmatch(f"[0-9]{{8,}}{end}", path.name)]


def _step(path: Path) -> int:
    return int(path.name.split(".")[0])
