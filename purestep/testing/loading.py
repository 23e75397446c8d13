"""Loads what the command line and pytest name: a trainer, laws and a seed."""

import importlib
from typing import Any

from purestep.testing.judging import Names, Seed, run_laws


def load_trainer(path: str, laws: Names) -> Any:
    """Returns the object that a path ``module:trainer`` names; imports the module.

    It calls a class, or an object without ``update``, and returns the result. Raises ``ValueError``
    for a path of another form, for unknown laws, and for a dtype that rounds too much to be judged.
    Raises ``TypeError`` for an object that is no trainer. What the module or the call raises passes
    through.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"{path!r} is not of the form MODULE:TRAINER, as mine:trainer")
    trainer: Any = getattr(importlib.import_module(module), name)
    if isinstance(trainer, type) or not hasattr(trainer, "update"):
        trainer = trainer()
    # No case yet: this refuses unknown laws, and objects that are no trainers.
    run_laws(trainer, laws, cases=0)
    return trainer


def parse_laws(text: str) -> list[str]:
    """Returns the names in a text such as "T1,T4"."""
    return [name.strip() for name in text.split(",")]


def parse_seed(text: str) -> Seed:
    """Returns "today", or the number that the text is; raises ``ValueError`` for another text."""
    return "today" if text == "today" else int(text)
