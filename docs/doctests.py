"""Examples of docstrings as blocks of code: mkdocstrings would read them as text."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)(>>> .*(?:\n\1.+)*)$", re.M)


class Doctests(griffe.Extension):
    """Puts each example between fences."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute of the package."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(
                r"\1```pycon\n\1\2\n\1```", obj.docstring.value
            )
