"""The entries of a section: on the disk as soon as they are added, errors included."""

from __future__ import annotations

import json
import os
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Entries = dict[str, Any]

FALLBACK = "cannot make one graph"
"""What purestep warns of where a loss that should be compiled runs eagerly."""


class Run:
    """One run of a section: what it may use, and the entries that it adds.

    Args:
        section: its name.
        device: "cuda" or "cpu"; sections that count waits take "lazy" as well.
        tiny: whether sizes are so small that figures mean nothing.
        folder: where the entries go, and where the turn of a prepared section is announced.
        seconds: how long the section may take.
    """

    def __init__(
        self,
        section: str,
        *,
        device: str = "cpu",
        tiny: bool = False,
        folder: Path | None = None,
        seconds: float = 600.0,
    ) -> None:
        self.section = section
        self.device = device
        self.tiny = tiny
        self.folder = folder
        self.entries: Entries = {}
        self._deadline = time.monotonic() + seconds

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device == "cuda"

    def seconds_left(self) -> float:
        """Returns how long the section may still take."""
        return self._deadline - time.monotonic()

    def add(self, *path: str, **values: Any) -> None:
        """Adds values under a path of names, and writes all entries to the disk."""
        entries = self.entries
        for name in path:
            entries = entries.setdefault(name, {})
        entries.update(values)
        if self.folder is not None:
            write_atomically(self.folder / f"{self.section}.json", dump(self.entries))

    def check(self, *path: str, **claims: bool) -> None:
        """Adds claims, and an error if one of them is false."""
        broken = [name for name, holds in claims.items() if not holds]
        if broken:
            self.add(*path, **claims, error=f"does not hold: {', '.join(broken)}")
        else:
            self.add(*path, **claims)

    @contextmanager
    def attempt(self, *path: str) -> Iterator[None]:
        """Makes an entry of an error within, and of warnings.

        A warning that something runs eagerly although it should be compiled is an error.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            except Exception as error:
                self.add(*path, error=describe_error(error))
                print(f"!! {self.section} {path}", flush=True)
                traceback.print_exc()
        messages = sorted({str(warning.message)[:300] for warning in caught})
        if messages:
            self.add(*path, warnings=messages[:4])
        fallbacks = [message for message in messages if FALLBACK in message]
        if fallbacks:
            self.add(*path, error=fallbacks[0])

    def has_time(self, seconds: float, *path: str) -> bool:
        """Returns whether so many seconds are left, and adds an entry if they are not."""
        if self.seconds_left() >= seconds:
            return True
        self.add(*path, skipped="no time was left")
        return False

    def wait_for_turn(self) -> None:
        """Says that the section is prepared, and sleeps until it has the device to itself.

        Its time stands still meanwhile: other sections may take minutes.
        """
        if self.folder is None:
            return
        gate = gate_file(self.folder, self.section)
        ready_file(self.folder, self.section).touch()
        parent = os.getppid()
        while not gate.exists():
            if os.getppid() != parent:
                raise RuntimeError("the program has ended before the section's turn")
            time.sleep(0.05)
        self._deadline = time.monotonic() + float(gate.read_text())


def ready_file(folder: Path, section: str) -> Path:
    """Returns the file that exists once a section is prepared."""
    return folder / f"{section}.ready"


def gate_file(folder: Path, section: str) -> Path:
    """Returns the file that gives a prepared section its turn, and the seconds for it."""
    return folder / f"{section}.turn"


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that is never seen half written."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def dump(entries: Entries) -> str:
    """Returns entries as JSON, whatever they hold."""
    return json.dumps(entries, indent=1, default=str)


def describe_error(error: BaseException) -> str:
    """Returns the type, the message and the innermost lines of an error."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    lines = [
        f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames)
    ]
    return f"{type(error).__name__}: {str(error).strip()[:700]} [{' < '.join(lines)}]"


def find_errors(entries: Any, path: str = "") -> dict[str, str]:
    """Returns every error among entries, by its path.

    >>> find_errors({"a": {"error": "x", "ms": 1}, "b": {"c": {"error": "y"}}})
    {'a': 'x', 'b/c': 'y'}
    """
    if not isinstance(entries, dict):
        return {}
    errors: dict[str, str] = {}
    for name, value in entries.items():
        if name == "error":
            errors[path] = str(value)
        else:
            errors |= find_errors(value, f"{path}/{name}" if path else name)
    return errors
