"""Reads what the command line and pytest name: a trainer, laws, numbers, and files to write."""

import argparse
import importlib
import inspect
import os
from pathlib import Path
from typing import Any

from purestep.testing.judging import Names, Seed, check_can_be_judged


def load_trainer(path: str, laws: Names) -> Any:
    """Returns the object that a path ``module:trainer`` names; imports the module.

    It calls a class, or an object without ``update``, and returns the result. Raises ``ValueError``
    for a path of another form, for unknown laws, and for capabilities that ``run_laws`` refuses.
    Raises ``TypeError`` for an object that is no trainer and does not make one, or that cannot be
    called without arguments. What the import, the look-up of the name or the call raises passes
    through.
    """
    module, _, name = path.partition(":")
    if not module or not name or module.endswith(".py"):
        raise ValueError(f"{path!r} is not of the form MODULE:TRAINER, as mine:trainer")
    trainer: Any = getattr(importlib.import_module(module), name)
    if isinstance(trainer, type) or not hasattr(trainer, "update"):
        _check_is_maker(trainer, path)
        trainer = trainer()
    check_can_be_judged(trainer, laws)
    return trainer


def _check_is_maker(make: object, path: str) -> None:
    """Raises ``TypeError``, which names ``path``, unless an object can be called without arguments.

    A callable that has no signature, as some builtins, passes.
    """
    if not callable(make):
        raise TypeError(
            f"{path} is {type(make).__name__}, neither a trainer nor a function that makes one"
        )
    try:
        inspect.signature(make).bind()
    except ValueError:
        return  # It has no signature: the call will tell.
    except TypeError as error:
        raise TypeError(
            f"{path} cannot make a trainer without arguments, {error}: if it is the loop to be "
            "judged, name trainer = ps.testing.loop(...) of it"
        ) from error


def parse_laws(text: str) -> list[str]:
    """Returns the names in a text such as "T1,T4"."""
    return [name.strip() for name in text.split(",")]


def parse_cases(text: str) -> int:
    """Returns the whole number that a text is; raises ``ValueError`` for another text."""
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"cases is {text!r}, which is no whole number") from error


def parse_seed(text: str) -> Seed:
    """Returns "today", or the whole number that a text is; raises ``ValueError`` for others."""
    if text == "today":
        return "today"
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(
            f'seed is {text!r}: it is a whole number, or "today"'
        ) from error


def writable_path(text: str) -> Path:
    """Parses a path for ``argparse``; raises ``ArgumentTypeError`` for one that is a folder.

    It also raises if the path's folder cannot be read. A long run should not fail at its end.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    try:
        os.scandir(path.parent).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    return path
