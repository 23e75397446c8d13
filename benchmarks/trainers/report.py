"""The page: what was asked and found, the table, the cases by hand, and a section for each project."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.trainers.by_hand import CASES, FIRST
from benchmarks.trainers.findings import BROKEN, SIGNS, UNEVEN, cells, finding, title
from benchmarks.trainers.history import COUNTS, HISTORY, LINES, SUMS, equation
from benchmarks.trainers.sections import sections


def text(report: dict[str, Any]) -> str:
    """CONFORMANCE.md."""
    parts = [
        _first_screen(report),
        _table(report),
        _laws(report),
        _how_far(report),
        _of_ranks(report),
        sections(report),
        _smallest(report),
        _coverage(report),
        _history(),
        _checked(report),
        _versions(report),
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _documented(report: Mapping[str, Any]) -> list[Any]:
    """The documented variants, but for purestep's."""
    columns = [column for column in report["columns"] if column["documented"]]
    return [column for column in columns if column["project"] != "purestep"]


def _names(columns: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(column["name"] for column in columns)


def _first_screen(report: dict[str, Any]) -> str:
    others = _documented(report)
    projects = dict.fromkeys(column["project"] for column in others)

    def those(law: str, *findings: str) -> list[Any]:
        return [c for c in others if finding(c, law) in findings]

    designed, kept = those("T1", "by design"), those("T1", "holds")
    convention = those("T7", "convention")
    return f"""
# Conformance

**What is asked.** Does an update depend on how its batch was cut, padded, ordered and spread over ranks? {len(projects)} projects, in
{len(others)} documented variants, are judged by `ps.testing.run_laws`, each as its documentation writes it, with torch's own
`cross_entropy(ignore_index=-100)` where it has a choice; purestep is judged beside them. What is wrong was found by running each
trainer, on cases that are told below, and was computed again without the kit.

**What was found.** Of these {len(others)} variants,

{_broken(report)}
- {len(designed)} give another update where microbatches have different numbers of rows or labels, and their documentation promises no more.
  {len(kept)} give the same: {_names(kept)}.
- {len(convention)} let the optimizer step on a gradient of zero where no label counts, as torch's own optimizers do. That is a convention.

**What to change.** Count the labels of the whole group, on all ranks, before the first backward pass. Let each microbatch contribute the
sum of its losses over that count, times whatever the library divides by: the number of microbatches in Accelerate and Lightning, the
number of ranks in DistributedDataParallel and fully_shard. Where the count is 0, leave the step out on all ranks. The rows named "sums"
and "guarded" are these few lines. They hold, but for a rank without any microbatch: give it one in which no label counts.

![trainers as rows, laws as columns](results/conformance.png)

- **holds**, and in how many cases. In each of them the two runs differ in what the law is about.
- **wrong**: other numbers than those that the law asks for, without an error, where the documentation promises the right ones.
- *by design*: other numbers, or a hang, where the documentation promises no more. The project's section quotes the sentence.
- *convention*: an update without labels moves parameters by momentum or weight decay, because the optimizer steps on a gradient of zero.
- *refuses*: an error, where a law asks for a number. That is safe.
- **·**: not asked, because the trainer has no such thing, or because both runs would be the same.
"""


def _broken(report: dict[str, Any]) -> str:
    """Lists the projects that break a promise, with their variants and the laws."""
    found: dict[str, list[str]] = {}
    for column in _documented(report):
        broken = [
            title(report, law)
            for law in cells(report)
            if finding(column, law) in BROKEN
        ]
        if broken:
            said = f"{column['name']} ({', '.join(broken)})"
            found.setdefault(column["project"], []).append(said)
    count = sum(map(len, found.values()))
    lines = [
        f"    - [{project}](#{anchor(project)}): {'; '.join(variants)}"
        for project, variants in found.items()
    ]
    start = f"- {count}, of {len(found)} projects, break a promise: they give wrong numbers without an error."
    return "\n".join([start, *lines])


def anchor(heading: str) -> str:
    """How GitHub and MkDocs call a heading."""
    return heading.lower().replace(" ", "-")


def _table(report: dict[str, Any]) -> str:
    laws = cells(report)
    lines = [
        "## The table\n",
        f"| trainer | {' | '.join(title(report, law) for law in laws)} |",
        f"| --- |{' --- |' * len(laws)}",
    ]
    for column in report["columns"]:
        name = f"[{column['name']}](#{anchor(column['project'])})"
        name = name if column["documented"] else f"*{name}*"
        lines.append(f"| {name} | {' | '.join(_cell(column, law) for law in laws)} |")
    lines.append(
        "\n*In italics*: not the documented usage, but a way to make more laws hold. After a colon: the kinds of cases, or what of "
        "purity, for which alone the law does not hold."
    )
    return "\n".join(lines)


def _cell(column: Mapping[str, Any], law: str) -> str:
    found = finding(column, law)
    if found == "holds":
        cases = column["verdicts"].get(law, {}).get("cases")
        return f"holds {cases}" if cases else "holds"
    said = SIGNS[found]
    parts = column["verdicts"].get(law, {}).get("parts", {})
    broken = [
        part for part, each in parts.items() if each not in ("holds", "not asked")
    ]
    return (
        f"{said}: {', '.join(broken)}" if broken and len(broken) < len(parts) else said
    )


def _laws(report: dict[str, Any]) -> str:
    lines = ["The columns are these laws:\n", "| column | law | claim |"]
    lines.append("| --- | --- | --- |")
    for law in cells(report):
        name = title(report, law)
        claim = (
            "As ranks, where ranks hold different numbers of microbatches, or none."
            if law == UNEVEN
            else report["laws"][law]["statement"]
        )
        lines.append(f"| {name} | {law.split()[0]} | {claim} |")
    return "\n".join(lines)


def _coverage(report: dict[str, Any]) -> str:
    """Which kinds of cases each law was asked with, of all columns."""
    lines = []
    for law in report["laws"]:
        found: dict[str, set[str]] = {}
        cases = 0
        for column in report["columns"]:
            verdict = column["verdicts"][law]
            cases += verdict.get("cases", 0)
            for what, numbers in verdict.get("coverage", {}).items():
                found.setdefault(what, set()).update(numbers)
        spans = [
            f"{what} {' to '.join(dict.fromkeys([min(them, key=_size), max(them, key=_size)]))}"
            if what != "weights"
            else f"weights {', '.join(sorted(them))}"
            for what, them in found.items()
        ]
        lines.append(f"| {title(report, law)} | {cases} | {'; '.join(spans)} |")
    return "\n".join(
        [
            "## The cases\n",
            "| law | cases, of all trainers | with |",
            "| --- | --- | --- |",
            *lines,
        ]
    )


def _size(number: str) -> float:
    return float(number) if number.replace(".", "").isdigit() else 0.0


def _number(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.4g}"


def _how_far(report: dict[str, Any]) -> str:
    """The hand case of each trainer."""
    rights = [right for _, right, _ in CASES.values()] + [0.5]
    lines = [
        f"| trainer | {' | '.join([*CASES, FIRST])} |",
        f"| --- |{' --- |' * len(rights)}",
        "| **the equation** | "
        + " | ".join(f"**{_number(right)}**" for right in rights)
        + " |",
    ]
    rows: dict[str, list[str]] = {}
    for column in report["columns"]:
        found = column["biases"]
        if not found:
            continue
        values = [
            " / ".join(
                dict.fromkeys(
                    _number(found[key])
                    for key in (name, f"{name}, 2 ranks")
                    if key in found
                )
            )
            for name in [*CASES, FIRST]
        ]
        rows.setdefault(" | ".join(values), []).append(column["name"])
    lines += [f"| {'; '.join(names)} | {values} |" for values, names in rows.items()]
    return f"""
## How far the cut holds

The model returns its bias, b = (0, 0), for every input. A token of label 0 has the gradient (-½, ½), one of label 1 the gradient (½, -½). The step is b - g, and the table has its first number, by each trainer's own run.

- **equal**: two microbatches of two labels: 0 0 | 0 1. Both ways give g = (-½ - ½ - ½ + ½) / 4 = -¼.
- **unequal rows**: the same labels in two rows, and in one. A mean weighted by rows gives (2 · (-½) + 1 · 0) / 3 = -⅓.
- **unequal tokens**: 0 | 1 1 1. The equation gives (-½ + ½ + ½ + ½) / 4 = ¼; a mean of means gives (-½ + ½) / 2 = 0.
- **one empty**: 0 | nothing. The equation gives -½; a mean of means that counts the empty one gives -¼.
- **all empty**: nothing. There is no step.
- **momentum**: 0, and then nothing, with momentum ½. A step of a zero gradient moves b by ½ · ½ more.
- **first labelled**: 0, in a row whose first token has a label, too. Nothing predicts it; counted all the same, it halves the step.

{chr(10).join(lines)}

`cross_entropy(ignore_index=-100)` is no number where it ignores every label, but its gradient is zero. So parameters stay finite; what is
lost is the share of that microbatch. Two numbers are of one rank, and of one rank for each microbatch.
"""


def _of_ranks(report: dict[str, Any]) -> str:
    lines = [
        "| trainer | 3 + 1 (the equation: 0) | 1 + 0 (the equation: 0.5) |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {column['name']} | {_number(column['uneven']['3 + 1'])} | {_number(column['uneven']['1 + 0'])} |"
        for column in report["columns"]
        if column["uneven"]
    ]
    return f"""
## Ranks with different numbers of microbatches

*Ranks* is asked with as many microbatches on each rank, where a trainer needs that. *Uneven ranks* is what happens otherwise, once each, with
20 seconds for an answer: three microbatches, 0 | 0 | 1, and one, 1; or one, 0, and none. A rank without any microbatch leaves its loop
before the backward pass, as a loop over no data does. Programs of which each rank has to run as many passes hang, and say so.

{chr(10).join(lines)}
"""


def _smallest(report: dict[str, Any]) -> str:
    """The cases; those that are wrong in the same way, by the same law and the same formula, in one row."""
    rows: dict[tuple[str, ...], tuple[str, str, list[str]]] = {}
    for column in report["columns"]:
        for law, verdict in column["verdicts"].items():
            if verdict["finding"] in ("wrong", "refuses"):
                by_hand, why = verdict.get("by_hand", False), verdict["why"]
                kind = re.sub(r"[\d.e-]+", "", why) if by_hand else _kind(why)
                kind += finding(column, law)
                words = "by hand" if by_hand else verdict["words"].split("; ")[0]
                gives = "" if law in ("T6", "T7") else column["gives"]
                said = SIGNS[finding(column, law)]
                row = rows.setdefault(
                    (law, said, gives, kind), (_short(words), _short(why), [])
                )
                row[2].append(column["name"])
    lines = [
        "## The smallest cases found\n",
        "One row for all that differ in the same way, with the numbers of the first. results/conformance.json has each in full, and "
        "as a program.\n",
        "| law | called | case | found | trainers |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {title(report, law)} | {said} | {words} | {why} | {'; '.join(names)} |"
        for (law, said, *_), (words, why, names) in sorted(
            rows.items(), key=lambda each: [*report["laws"]].index(each[0][0])
        )
    ]
    return "\n".join(lines)


def _kind(why: str) -> str:
    """In what the two runs differ: a report, parameters, or whether they are numbers."""
    what = why.split(":")[0]
    known = ("loss", "evaluation", "grad_norm", "num_tokens")
    return (
        f"{what if what in known else 'parameters'} {'nan' in why} {'generator' in why}"
    )


def _short(words: str) -> str:
    """Fewer digits, no line breaks, no bars; long lists are cut."""
    words = re.sub(r"\d+\.\d{4,}", lambda found: f"{float(found[0]):.4g}", words)
    words = re.sub(r"\[\[.*(?= they are)", "", words)
    words = re.sub(r"\s+", " ", words).replace("|", "/").replace("<", "&lt;")
    return words if len(words) < 260 else f"{words[:250]} ..."


def _history() -> str:
    lines = [
        "## The same bug, year by year\n",
        "These are lines of projects that do not install or run on a CPU here, and of two that do. They run by hand on the labels 0 and "
        f"0 0 0 1, where the equation's gradient is {equation(SUMS, COUNTS):g}:\n",
        "| project | reference | year | what was wrong | law | gradient |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {each.project} | {each.reference} | {each.year} | {each.wrong} | {each.law} | {each.gives(SUMS, COUNTS):g} |"
        for each in LINES
    ]
    lines.append("\nThe lines:\n")
    for each in LINES:
        lines.append(f"    # {each.project}")
        lines += [f"    {line}" for line in each.lines.split("\n")]
    lines += [
        "\nOther places, and the law of the kit that sees it:\n",
        "| project | reference | year | what was wrong | law |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {' | '.join(row)} |" for row in HISTORY]
    return "\n".join(lines)


def _checked(report: dict[str, Any]) -> str:
    found = [each for laws in report["again"].values() for each in laws.values()]
    confirmed = sum(each["confirmed"] for each in found)
    return f"""
## Computed again, without the kit

`python -m benchmarks.trainers.again` computes each cell that does not hold from its smallest case, by sums of plain losses times one
coefficient for each microbatch. It asks three things: does the equation give the same for both ways to write the update, are the trainer's
numbers those of its formula, and do they differ? {confirmed} of {len(found)} cells are confirmed. It computes the table "How far the cut holds", too.
"""


def _versions(report: dict[str, Any]) -> str:
    versions = "\n".join(
        f"    {name} {version}" for name, version in sorted(report["versions"].items())
    )
    return f"""
## Versions, and how to repeat it

On a CPU, with Python {report["python"]} and

{versions}

and, where a project's section says so, with other versions beside them. The command is

    make conformance

Each trainer runs in a separate process, and may take {report["limit"]:.0f} seconds; all of them took {report["seconds"] / 60:.0f} minutes of one core. The
cases are drawn from a fixed seed, so they are the same each time. `python -m benchmarks.trainers --only NAME` runs one column, and keeps the
others as they are. Projects that ask for other versions are installed beside the others, in folders below `build`: fastai asks for
torchvision, whose wheel for torch's CPU build is not on PyPI, and Composer 0.32 for torch 2.6. Neither needs them here;
for torchvision and mcli, which Composer imports, there are empty modules, as for some that LLaMA-Factory and axolotl import. torchtune 0.6.1 cannot be imported beside the torchao of today
(0.18), so that its recipe's lines are run as they stand. Lightning, Ignite, fastai, Composer, Keras, TRL, mlx-lm and tunix run on one process here.
"""
