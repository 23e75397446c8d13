"""Provides the command line and the drawing that all examples share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from purestep.testing.loading import writable_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE = "#0072b2"
ORANGE = "#d55e00"
GREEN = "#009e73"
GREY = "0.45"
FONT_SIZE = 15
"""Readable where the picture is as narrow as a phone."""


def make_parser(
    description: str | None, name: str, steps: int
) -> argparse.ArgumentParser:
    """Makes a parser of two options, ``--steps`` and ``--picture``, an int and a ``Path``.

    They default to ``steps`` and to ``name`` with the suffix ".png".
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--steps", type=positive_int, default=steps)
    parser.add_argument("--picture", type=writable_path, default=f"{name}.png")
    return parser


# argparse shows the names of the next two in its errors: "invalid positive_int value".


def positive_int(text: str) -> int:
    """Parses a whole number for ``argparse``; raises ``ArgumentTypeError`` below 1.

    Raises ``ValueError`` for other text.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def make_panels(*titles: str, **options: Any) -> tuple[Figure, list[Any]]:
    """Makes a figure with one panel under each title; returns both, panels left to right.

    ``options`` go to ``Figure.subplots``.
    """
    # matplotlib takes a while to load, and most ranks draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, 4.2), dpi=130, layout="constrained")
    (panels,) = figure.subplots(1, len(titles), squeeze=False, **options)
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=FONT_SIZE)
        axes.tick_params(labelsize=FONT_SIZE - 2)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(panels)


def plot_line(axes: Any, x: Any, y: Any, color: str, **options: Any) -> None:
    """Plots a curve into a panel; ``options`` go to ``axes.plot``."""
    axes.plot(x, y, color=color, linewidth=1.8, markersize=4, **options)


def annotate(
    axes: Any,
    text: str,
    point: tuple[float, float],
    color: str,
    shift: tuple[float, float] = (6, 0),
    **options: Any,
) -> None:
    """Writes text beside a point of a panel, moved right and up by ``shift``, in points of type.

    ``options`` go to ``axes.annotate``, and replace the settings here.
    """
    settings = {
        "xytext": shift,
        "textcoords": "offset points",
        "va": "center",
        "fontsize": FONT_SIZE,
    }
    axes.annotate(text, point, color=color, **(settings | options))


def annotate_end(
    axes: Any,
    text: str,
    x: Sequence[float],
    y: Sequence[float],
    color: str,
    shift: tuple[float, float],
) -> None:
    """Writes text that ends at a curve's last point, moved right and up by ``shift`` in points."""
    end = (x[-1], y[-1])
    annotate(axes, text, end, color, shift, ha="right")


def save(figure: Figure, path: Path) -> None:
    """Writes the figure to a file as PNG, and prints the path."""
    figure.savefig(path, format="png")
    print(f"picture: {path}")
