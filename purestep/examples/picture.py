"""What the examples share: a command line, and a picture."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "0.45"


def parser(words: str | None, name: str, steps: int) -> argparse.ArgumentParser:
    """A command line with ``--steps`` and ``--picture``."""
    made = argparse.ArgumentParser(
        description=words, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--steps", type=positive, default=steps)
    made.add_argument("--picture", type=_writable, default=f"{name}.png")
    return made


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _writable(text: str) -> Path:
    """A path in a folder that exists: a long run should not fail at its end."""
    try:
        os.scandir(Path(text).parent).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    return Path(text)


def panels(*titles: str, **how: Any) -> tuple[Figure, list[Any]]:
    """A figure with one panel under each title."""
    from matplotlib.figure import (
        Figure,
    )  # It takes a while to load, and ranks draw nothing.

    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(titles), squeeze=False, **how)[0].tolist()
    for each, title in zip(axes, titles, strict=True):
        each.set_title(title, loc="left", fontsize=12)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def say(axes: Any, words: str, at: tuple[float, float], color: str, **how: Any) -> None:
    """Words beside a point of the panel."""
    where: dict[str, Any] = {
        "xytext": (6, 0),
        "ha": "left",
        "va": "center",
        "fontsize": 11,
        **how,
    }
    axes.annotate(words, at, textcoords="offset points", color=color, **where)


def save(figure: Figure, path: Path) -> None:
    """Writes the picture."""
    figure.savefig(path, format="png")
    print(f"picture: {path}")
