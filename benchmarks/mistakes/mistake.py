"""Defines a mistake, and plants it in a loop that is right by replacing words of its source."""

import functools
import inspect
import textwrap
from typing import Any, NamedTuple

import purestep as ps
from benchmarks.mistakes import right_frameworks, right_optimizers, right_styles
from proofs.plain_mutants import Bug, build

Edits = list[tuple[str, str]]
"""Words of a loop, and their replacements; each occurs once."""


class Mistake(NamedTuple):
    """Tells what a wrong loop does, and how it comes from one that is right.

    Attributes:
        name: what is wrong.
        edits: replacements for words of the loop.
        base: the loop: the one of ``support.plain_loop``, or one of the right trainers.
        law: one that finds it, where one was recorded.
        required: whether ``proofs/test_kit.py`` demands that this law finds it.
    """

    name: str
    edits: Edits
    base: str = "PlainLoop"
    law: str = ""
    required: bool = False


def build_trainer(mistake: Mistake) -> Any:
    """Builds the loop with the mistake in it."""
    if mistake.base == "PlainLoop":
        return build(Bug(mistake.name, mistake.law, mistake.name, mistake.edits))
    edited = edit_definition(mistake.base, mistake.edits)
    if mistake.base == "divide_once":
        return ps.testing.loop(edited)
    return edited()


@functools.cache
def find_right(base: str) -> Any:
    """Finds the class or function of this name among the right trainers."""
    for module in (right_frameworks, right_styles, right_optimizers):
        if hasattr(module, base):
            return getattr(module, base)
    raise ValueError(f"no right trainer is called {base}")


def edit_definition(base: str, edits: Edits) -> Any:
    """Edits the source of a right trainer, and executes it among the names of its module."""
    definition = find_right(base)
    source = inspect.getsource(definition)
    for old, new in edits:
        source = replace_words(source, old, new)
    names = dict(vars(inspect.getmodule(definition)))
    exec(compile(source, f"<{base}>", "exec"), names)
    return names[base]


def replace_words(source: str, old: str, new: str) -> str:
    """Replaces words within a line, or whole lines at whatever depth they are indented."""
    old = textwrap.dedent(old).strip("\n")
    new = textwrap.dedent(new).strip("\n")
    if source.count(old) == 1:
        start = source.index(old)
        before = source[source.rfind("\n", 0, start) + 1 : start]
        indent = before
        if before.strip():
            indent = " " * (len(before) - len(before.lstrip()))
        return source.replace(old, new.replace("\n", "\n" + indent))
    for depth in range(4, 24, 4):
        lines = textwrap.indent(old, " " * depth)
        if source.count(lines) == 1:
            return source.replace(lines, textwrap.indent(new, " " * depth))
    raise ValueError(f"{old!r} occurs {source.count(old)} times")
