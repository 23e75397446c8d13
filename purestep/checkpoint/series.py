"""A folder of checkpoints, one for each step that was saved: ``save_step`` and ``latest``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from purestep.checkpoint.ranks import Group, is_first, together, world
from purestep.checkpoint.trees import slots_of, write
from purestep.checkpoint.whole import File, clear, naming, remove
from purestep.state import Slot
from purestep.types import Tree


def save_step(folder: File, step: int, tree: Tree, keep: int = 3) -> None:
    """``save`` to ``folder/step``, under its number; afterwards all but the last ``keep`` checkpoints there are removed.

    The folder is made where it is missing; whatever else is in it stays. One that holds a later step is refused, since ``latest``
    would go on to find that one.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in range(100, 600, 100):
    ...         save_step(folder, step, {"w": torch.ones(2)}, keep=2)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['00000400', '00000500']
    """
    check_step(step, keep)
    group = world(tree)
    write_step(folder, step, slots_of(tree, group, Path(folder, str(step))), keep, group)


def latest(folder: File) -> Path | None:
    """The checkpoint of the last step that was saved there, which is a whole one; None where there is none.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_step(folder, 100, {"w": torch.ones(2)})
    ...     latest(folder).name, latest(f"{folder}/elsewhere")
    ('00000100', None)
    """
    return next(reversed(_steps(Path(folder)).values()), None)


def check_step(step: int, keep: int) -> None:
    """Refuses what is no number of a step, or of checkpoints."""
    for name, number, least in [("step", step, 0), ("keep", keep, 1)]:
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"{name}={number!r} must be a whole number, {least} or more")


def write_step(folder: File, step: int, slots: Mapping[str, Slot], keep: int, group: Group) -> None:
    """Writes one checkpoint of a folder, and takes away those that it makes superfluous."""
    folder = Path(folder)

    def begin() -> None:
        if is_first(group):
            with naming(folder):
                folder.mkdir(exist_ok=True)
            last = max(_steps(folder), default=step)
            if last > step:
                raise ValueError(
                    f"{folder} holds step {last}, which is later than {step}: remove what is later, or save to a different folder"
                )

    def tidy() -> None:
        if is_first(group):
            with naming(folder):
                for superfluous in [*_steps(folder).values()][:-keep]:
                    remove(superfluous)
                clear(folder, "[0-9]*")

    together(group, begin)
    write(folder / f"{step:08}", slots, group)
    together(group, tidy)


def _steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder by step, the last one last."""
    found = [path for path in folder.glob("*") if re.fullmatch("[0-9]{8,}", path.name)]
    return {int(path.name): path for path in sorted(found, key=lambda path: int(path.name))}
