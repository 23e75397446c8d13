"""Which sections there are, in which order they run, and how long each may take."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

Phase = Literal["first", "together", "prepared", "alone"]
"""When a section runs.

first: before all others, and reads the libraries from the disk for them
together: several at once, since only correctness is asked for
prepared: compiles beside those, then sleeps until it has the device to itself
alone: has the device to itself from its start
"""


class Section(NamedTuple):
    """A part of the program that is one process: ``run_NAME`` of ``benchmarks.gpu.MODULE``."""

    name: str
    module: str
    phase: Phase
    limit: float
    """Seconds; of a prepared section, until it is ready."""
    turn: float = 0.0
    """Seconds that a prepared section may take once it has the device to itself."""


SECTIONS = [
    Section("env", "env", "first", 90),
    Section("exact", "exact", "together", 90),
    Section("theorems", "theorems", "together", 150),
    Section("waits", "waits", "together", 150),
    Section("losses", "losses", "together", 150),
    Section("nccl", "nccl", "together", 110),
    Section("gloo", "gloo", "together", 100),
    Section("labels", "labels", "together", 90),
    Section("gpt", "gpt", "alone", 100),
    Section("gpt_by_hand_compiled", "gpt", "prepared", 175, 25),
    Section("gpt_compiled", "gpt", "prepared", 175, 30),
    Section("gpt_cpp_wrapper", "gpt", "prepared", 240, 15),
    Section("gpt_whole", "gpt", "prepared", 240, 15),
    Section("gpt_stacked", "gpt", "prepared", 240, 25),
    Section("mlp", "mlp", "prepared", 160, 35),
    Section("prefetch", "prefetch", "alone", 30),
    Section("jax", "jax_gpt", "alone", 90),
]
"""The most valuable first: what the time does not suffice for is dropped from the end."""

TOTAL_SECONDS = 445.0
"""For all of them, on a real device."""

LEAST_SECONDS = 15.0
"""A section that would have less than this is not begun."""

SLOWNESS = 10.0
"""How much longer all may take where sizes are tiny and the processor is anything."""


def select_sections(only: str) -> list[Section]:
    """Returns the sections that a comma-separated list names, and ``env``; all, if it is empty.

    >>> [section.name for section in select_sections("gloo,exact")]
    ['env', 'exact', 'gloo']
    """
    names = {name for name in only.split(",") if name}
    unknown = names - {section.name for section in SECTIONS}
    if unknown:
        raise ValueError(f"no sections are called {sorted(unknown)}")
    return [
        section
        for section in SECTIONS
        if not names or section.name in names or section.phase == "first"
    ]


def in_phase(sections: Sequence[Section], *phases: Phase) -> list[Section]:
    """Returns those of the sections that run in one of these phases."""
    return [section for section in sections if section.phase in phases]


def time_limit(wanted: float, spent: float, total: float) -> float | None:
    """Returns how long a section may take, after so many seconds; None if it is too late to begin.

    >>> time_limit(100, spent=200, total=385), time_limit(100, 340, 385), time_limit(100, 380, 385)
    (100, 45, None)
    """
    limit = min(wanted, total - spent)
    return limit if limit >= min(wanted, LEAST_SECONDS) else None
