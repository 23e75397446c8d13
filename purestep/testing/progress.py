"""Shows how far a run is, on a stream beside its results."""

import time
from typing import TextIO

CLEAR = "\r\x1b[K"
"""Moves to the start of a terminal's line, and clears it."""


class Progress:
    """Shows texts on a stream, at most one in 0.1 s on a terminal, and one in 10 s elsewhere.

    On a terminal they take one line, which ``clear`` removes. Other streams get a line for each.

    Args:
        stream: such as ``sys.stderr``.
        enabled: whether it shows anything; None: if the stream is a terminal.

    >>> import sys
    >>> progress = Progress(sys.stdout, enabled=True)
    >>> progress.show("T1 equal tokens: case 1 of 25")
    T1 equal tokens: case 1 of 25
    """

    def __init__(self, stream: TextIO, enabled: bool | None = None) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._enabled = self._is_terminal if enabled is None else enabled
        # A log of CI has a line now and then; a terminal moves.
        self._interval = 0.1 if self._is_terminal else 10.0
        self._next = 0.0

    def show(self, text: str) -> None:
        """Writes the text to the stream, if progress is enabled and the interval has passed."""
        now = time.monotonic()
        if self._enabled and now >= self._next:
            self._next = now + self._interval
            line = f"{CLEAR}{text}" if self._is_terminal else f"{text}\n"
            self._stream.write(line)
            self._stream.flush()

    def clear(self) -> None:
        """Clears the line of a terminal, so that others can be written."""
        if self._enabled and self._is_terminal:
            self._stream.write(CLEAR)
            self._stream.flush()
