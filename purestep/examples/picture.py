"""What the small examples share: a command line of two options, and a picture."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from purestep.examples.docstrings import positive

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "0.45"


def parse(
    words: str | None, name: str, steps: int, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """``--steps`` and ``--picture`` of a program; a picture that cannot be written is refused."""
    parser = argparse.ArgumentParser(
        description=words, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=positive, default=steps)
    parser.add_argument("--picture", type=Path, default=Path(f"{name}.png"))
    options = parser.parse_args(arguments)
    try:
        os.scandir(options.picture.parent).close()
    except OSError as error:
        parser.error(f"--picture {options.picture}: {error}")
    return options


def panels(*titles: str, **how: Any) -> tuple[Figure, list[Any]]:
    """A figure with one panel under each title."""
    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(titles), squeeze=False, **how)[0].tolist()
    for each, title in zip(axes, titles, strict=True):
        each.set_title(title, loc="left", fontsize=12)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def say(axes: Any, words: str, at: tuple[float, float], color: str, **how: Any) -> None:
    """Words beside a point of the panel."""
    given: dict[str, Any] = {"xytext": (6, 0), "ha": "left", "va": "center", **how}
    axes.annotate(words, at, textcoords="offset points", color=color, fontsize=11, **given)


def save(figure: Figure, path: Path) -> None:
    """Writes the picture."""
    figure.savefig(path, format="png")
    print(f"picture: {path}")
