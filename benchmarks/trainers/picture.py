"""The table as a picture: the documented columns alone, readable at the width of a README."""

from pathlib import Path
from typing import Any

from benchmarks.trainers.findings import cells, finding, title

COLOURS = {
    "holds": "#4c8fbd",
    "wrong": "#d55e00",
    "by design": "#f0b48a",
    "convention": "#d9d2c5",
    "hangs": "#8b2f00",
    "refuses": "#f0c75e",
    "not asked": "#f2f2f2",
}
SIGNS = {
    "wrong": "✗",
    "by design": "–",
    "convention": "–",
    "hangs": "∞",
    "refuses": "!",
}
WIDTH, DPI = 8.5, 100
"""Inches, and pixels to an inch: as many as GitHub gives a page."""


def draw(report: dict[str, Any], path: Path) -> None:
    """Trainers as rows, laws as columns; where a law holds, in how many cases the two runs differed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch, Rectangle

    columns = [column for column in report["columns"] if column["documented"]]
    laws = cells(report)
    figure, axes = pyplot.subplots(figsize=(WIDTH, 0.235 * len(columns) + 1.5))
    for y, column in enumerate(columns):
        for x, law in enumerate(laws):
            found = finding(column, law)
            verdict = column["verdicts"].get(law, {})
            vacuous = found == "not asked" and verdict.get("vacuous")
            box = Rectangle(
                (x, y), 1, 1, facecolor=COLOURS[found], edgecolor="white", lw=1.5,
            )  # fmt: skip
            axes.add_patch(box)
            if vacuous:
                axes.add_patch(
                    Rectangle(
                        (x, y),
                        1,
                        1,
                        fill=False,
                        hatch="////",
                        edgecolor="#b0b0b0",
                        lw=0,
                    )
                )
            sign = SIGNS.get(
                found, str(verdict.get("cases", "✓")) if found == "holds" else ""
            )
            quiet = found in ("by design", "convention")
            colour = "#7a3a10" if quiet else "white"
            axes.text(
                x + 0.5, y + 0.52, sign, ha="center", va="center", color=colour,
                fontsize=7.5 if found == "holds" else 9,
            )  # fmt: skip
    axes.set_xlim(0, len(laws))
    axes.set_ylim(len(columns), 0)
    titles = [title(report, law) for law in laws]
    axes.set_xticks(
        [x + 0.4 for x in range(len(laws))], titles, fontsize=8, rotation=30, ha="left"
    )
    axes.xaxis.tick_top()
    names = [f"{column['name']}  $\\it{{{_version(column)}}}$" for column in columns]
    axes.set_yticks([y + 0.5 for y in range(len(columns))], names, fontsize=8)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    said = {
        "holds": "holds, in so many cases",
        "wrong": "wrong: breaks a promise",
        "by design": "by design, as documented",
        "convention": "convention",
        "refuses": "an error",
        "not asked": "not asked",
    }
    handles: list[Any] = [
        Patch(color=COLOURS[name], label=label) for name, label in said.items()
    ]
    handles.append(
        Patch(
            facecolor=COLOURS["not asked"],
            hatch="////",
            edgecolor="#b0b0b0",
            label="would hold vacuously",
        )
    )
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.3, -0.005), ncols=4, frameon=False,
        fontsize=7.5, handlelength=1.2, columnspacing=1.2,
    )  # fmt: skip
    figure.tight_layout(pad=0.3)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def _version(column: dict[str, Any]) -> str:
    """Of the first package."""
    return str(column["versions"][column["packages"][0]].split("+")[0])
