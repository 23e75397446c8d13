"""The table as a picture."""

from pathlib import Path
from typing import Any

COLOURS = {"holds": "#4c8fbd", "wrong": "#d55e00", "refuses": "#f0c75e", "not asked": "#eeeeee"}
SIGNS = {"holds": "✓", "wrong": "✗", "refuses": "!", "not asked": ""}


def draw(report: dict[str, Any], path: Path) -> None:
    """Laws as rows, trainers as columns; the names of those that are not the documented usage in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch, Rectangle

    columns, laws = report["columns"], report["laws"]
    figure, axes = pyplot.subplots(figsize=(0.42 * len(columns) + 2.5, 0.38 * len(laws) + 4.2))
    for x, column in enumerate(columns):
        for y, law in enumerate(laws):
            finding = column["verdicts"][law]["finding"]
            box = Rectangle((x, y), 1, 1, facecolor=COLOURS[finding], edgecolor="white", lw=2)
            axes.add_patch(box)
            axes.text(x + 0.5, y + 0.5, SIGNS[finding], ha="center", va="center", color="white")
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(laws), 0)
    axes.set_xticks([x + 0.5 for x in range(len(columns))], [c["name"] for c in columns])
    axes.set_yticks(
        [y + 0.5 for y in range(len(laws))], [f"{law} {laws[law]['title']}" for law in laws]
    )
    axes.xaxis.tick_top()
    for label, column in zip(axes.get_xticklabels(), columns, strict=True):
        label.set(rotation=60, ha="left", rotation_mode="anchor", fontsize=9)
        label.set_color("black" if column["documented"] else "#777777")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    handles = [Patch(color=colour, label=finding) for finding, colour in COLOURS.items()]
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, -0.02), ncols=4, frameon=False
    )
    figure.text(
        0.99, 0.01, "black: as documented; grey: with a setting or a change that the report names",
        ha="right", fontsize=8, color="#555555",
    )  # fmt: skip
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
