"""The table as text, and what there is to say of each law that somebody breaks."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.trainers.by_hand import CASES
from benchmarks.trainers.history import COUNTS, HISTORY, LINES, SUMS, equation

UNEVEN = "T2 uneven"
"""T2, where ranks have different numbers of microbatches."""
SIGNS = {
    "wrong": "**wrong**",
    "by design": "wrong, by design",
    "hangs": "**hangs**",
    "refuses": "refuses",
    "not asked": "·",
}


def text(report: dict[str, Any]) -> str:
    """CONFORMANCE.md."""
    parts = [
        _first_screen(report),
        _table(report),
        _coverage(report),
        _how_far(report),
        _promises(report),
        *(NOTES[law](report) for law in NOTES),
        _smallest(report),
        _history(),
        _checked(report),
        _laws(report),
        _versions(report),
        _usages(report),
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def cells(report: Mapping[str, Any]) -> list[str]:
    """The laws, with T2 of uneven ranks beside T2."""
    laws = [*report["laws"]]
    at = laws.index("T2") + 1
    return [*laws[:at], UNEVEN, *laws[at:]]


def finding(column: Mapping[str, Any], law: str) -> str:
    """What a cell says: "by design" is "wrong" where the documentation promises no more."""
    if law == UNEVEN:
        return _of_uneven(column)
    found = str(column["verdicts"][law]["finding"])
    return "by design" if found == "wrong" and law in column["promises"] else found


def _of_uneven(column: Mapping[str, Any]) -> str:
    from benchmarks.trainers.by_hand import UNEVEN as RIGHT

    results = column["uneven"]
    if not results:
        return "not asked"
    wrong = [
        (isinstance(result, str) and result.startswith("ranks differ"))
        or (isinstance(result, float) and abs(result - RIGHT[name][1]) > 1e-6)
        for name, result in results.items()
    ]  # fmt: skip
    if any(wrong):
        return "by design" if "T2" in column["promises"] else "wrong"
    if "hangs" in results.values():
        return "hangs"
    return (
        "refuses"
        if any(isinstance(result, str) for result in results.values())
        else "holds"
    )


def _names(columns: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(column["name"] for column in columns)


def _first_screen(report: dict[str, Any]) -> str:
    documented = [c for c in report["columns"] if c["documented"]]
    others = [c for c in documented if c["packages"][0] != "purestep"]

    def those(law: str, *findings: str) -> list[Any]:
        return [c for c in others if finding(c, law) in findings]

    cut, scaled = those("T1", "wrong", "by design"), those("T0", "wrong")
    designed = those("T1", "by design")
    kept = those("T1", "holds")
    empty = [c for c in others if c["moved_by_momentum"]]
    unlike = [c for c in others if c["verdicts"]["T6"]["parts"].get("bits") == "wrong"]
    hanging = [c["name"] for c in others if "hangs" in c["uneven"].values()]
    return f"""
# Conformance

**What is asked.** Does an update depend on how its batch was cut, padded, ordered and spread over ranks? {len(documented)} documented ways to
train are judged by `ps.testing.run_laws`, each as its documentation writes it, with torch's own `cross_entropy(ignore_index=-100)` where it
has a choice. What is wrong was found by running each trainer, on cases that are told below, and was computed again without the kit.

**What was found.** Of {len(others)} documented trainers that are not purestep's,

- {len(cut)} give another update where microbatches have different numbers of labels (T1). {len(designed)} of them say so, or promise equal
  microbatches only. {len(kept)} hold: {_names(kept)}.
- {len(scaled)} count labels that their loss leaves out, so that even the update of one batch is too short (T0): {_names(scaled)}.
- {len(empty)} move the parameters in an update without a single label, by momentum and by weight decay (T7).
- A rank without any microbatch, beside one that has some, makes these hang: {"; ".join(hanging)}.
- {len(unlike)} give other bits the second time. Those that seed global generators say so.

**What to change.** Count the labels of the whole group, on all ranks, before the first backward pass. Let each microbatch contribute the
sum of its losses over that count, times whatever the library divides by: the number of microbatches in Accelerate and Lightning, the
number of ranks in DistributedDataParallel and fully_shard. Where the count is 0, leave the step out on all ranks. The columns named "sums"
and "guarded" are these few lines. They hold, but for a rank without any microbatch: give it one in which no label counts.

![trainers as rows, laws as columns](results/conformance.png)

- **holds**, and in how many cases. In each of them the two runs differ in what the law is about.
- **wrong**: other numbers than those that the law asks for, without an error. The smallest case found is below.
- *wrong, by design*: the documentation promises no more. The sentence is quoted below.
- **refuses**: an error, where a law asks for a number. That is safe. **hangs**: a rank waits for another without end.
- **·**: not asked, because the trainer has no such thing, or because both runs would be the same.
"""


def _table(report: dict[str, Any]) -> str:
    laws = cells(report)
    lines = [
        "## The table\n",
        f"| trainer | {' | '.join(laws)} |",
        f"| --- |{' --- |' * len(laws)}",
    ]
    for column in report["columns"]:
        name = column["name"] if column["documented"] else f"*{column['name']}*"
        lines.append(f"| {name} | {' | '.join(_cell(column, law) for law in laws)} |")
    lines.append(
        "\n*In italics*: not the documented usage, but a way to make more laws hold. After a colon: the kinds of cases, or what of "
        "purity, for which alone the law does not hold."
    )
    return "\n".join(lines)


def _coverage(report: dict[str, Any]) -> str:
    """Which kinds of cases each law was asked with, of all columns."""
    lines = []
    for law, about in report["laws"].items():
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
        lines.append(f"| {law} {about['title']} | {cases} | {'; '.join(spans)} |")
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


def _number(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.4g}"


def _how_far(report: dict[str, Any]) -> str:
    """The hand case of each trainer."""
    uneven = ("3 + 1", "1 + 0")
    lines = [
        f"| trainer | {' | '.join(CASES)} | {' | '.join(uneven)} |",
        f"| --- |{' --- |' * (len(CASES) + len(uneven))}",
        "| **the equation** | "
        + " | ".join(f"**{_number(right)}**" for _, right, _ in CASES.values())
        + " | **0** | **0.5** |",
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
            for name in CASES
        ]
        values += [_number(column["uneven"].get(name)) for name in uneven]
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
- **3 + 1** and **1 + 0**: one update, of so many microbatches on two ranks: 0 | 0 | 1 + 1, and 0 + nothing.

{chr(10).join(lines)}

`cross_entropy(ignore_index=-100)` is no number where it ignores every label, but its gradient is zero. So parameters stay finite; what is
lost is the share of that microbatch. The two numbers are of one rank, and of one rank for each microbatch.
"""


def _promises(report: dict[str, Any]) -> str:
    sentences: dict[tuple[str, str], list[str]] = {}
    for column in report["columns"]:
        broken = {
            law: column["promises"][law]
            for law in column["promises"]
            if column["verdicts"][law]["finding"] == "wrong"
        }
        for sentence in dict.fromkeys(broken.values()):
            laws = ", ".join(law for law, said in broken.items() if said == sentence)
            sentences.setdefault((laws, sentence), []).append(column["name"])
    lines = [
        "## What is wrong by design\n",
        "| trainer | laws | what its documentation says |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {'; '.join(names)} | {laws} | {sentence} |"
        for (laws, sentence), names in sentences.items()
    ]
    return "\n".join(lines)


def _of_heads(report: dict[str, Any]) -> str:
    heads = report["heads"]
    right = [name for name, ratio in heads.items() if abs(ratio - 1) < 0.01]
    doubled = [name for name, ratio in heads.items() if abs(ratio - 2) < 0.01]
    tune = report["torchtune"]
    e = report["evaluation"]
    first, second = e["of the first"], e["of the second"]
    return f"""
## T0 and T1: transformers' heads, torchtune's recipe, mlx-lm, evaluation

**transformers' heads.** `Trainer` asks a model whether its `forward` takes `**kwargs`. If so, it passes `num_items_in_batch`, and
does not divide the loss by `gradient_accumulation_steps`. Some models, as those that classify rows or tokens, take `**kwargs` and return a
mean without that number. Then the gradient is ∇m₁ + ∇m₂, where the equation has (∇m₁ + ∇m₂) / 2. The factor compares two updates
of plain SGD: of two microbatches of two rows, and of one batch of the same four rows:

| model | factor |
| --- | --- |
{chr(10).join(f"| {name} | {ratio:.4f} |" for name, ratio in heads.items())}

{len(doubled)} of these {len(heads)} are doubled; {" and ".join(right)} are right. It is known upstream: huggingface/transformers#47688. What
to set: `compute_loss_func=`, which divides a sum by `num_items_in_batch`, makes the law hold; `model.accepts_loss_kwargs = False` brings
back the mean of means, which is right for equal microbatches.

**GPT-2 in `Trainer`.** `Trainer` counts the labels behind each row's first where it knows that the loss shifts them
(huggingface/transformers#46204). It goes by `model.loss_type`, which transformers takes from the name of the class: `LlamaForCausalLM` has one,
`GPT2LMHeadModel` has none. So N is too large by one for each row whose first token has a label, as in text, and T0 is wrong. What to set:
`model.loss_type = "ForCausalLM"`, with which T0 holds, or -100 at the first place of each row.

**torchtune's recipe** counts labels before it shifts them. A row of 2 tokens has 1 prediction but counts 2 labels; a row of 4 has 3
and counts 4. With the row sums s₁ and s₂ of losses, in a microbatch each:

    the equation   (s₁ + s₂) / (1 + 3)                                  = 0.25 s₁ + 0.25 s₂
    the recipe     (s₁ / 1 · 2 + s₂ / 3 · 4) / (2 + 4)                  = 0.3333 s₁ + 0.2222 s₂

In its own run it reports {tune["reported"]:.6f}; by hand that is {tune["by hand"]:.6f}, and the equation gives {tune["equation"]:.6f}. Where the
first label of each row is ignored (a masked prompt), both counts are the same, and the law holds.

**mlx-lm** counts one place behind each row's end, where its collator has put a 0: `steps <= lengths[:, 1:]`. So T0 is wrong as well. It is
known upstream: ml-explore/mlx-lm#1697.

**Evaluation.** `Trainer.evaluate` repeats each batch's mean loss as often as a full batch has rows, and takes the mean. A batch with one row of
1 token, of loss {first:.6f}, and one with one row of 3 tokens, of mean loss {second:.6f}:

    the equation        (1 · {first:.6f} + 3 · {second:.6f}) / 4 = {(first + 3 * second) / 4:.6f}      one batch of both: {e["of both as one batch"]:.6f}
    the mean of means   ({first:.6f} + {second:.6f}) / 2 = {(first + second) / 2:.6f}              two batches: {e["of both"]:.6f}

What to change: sum the losses and count the tokens in `compute_metrics` or in a loop of your own, and divide once.
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
## T2: ranks, and ranks with different numbers of microbatches

T2 is asked with as many microbatches on each rank, where a trainer needs that. Beside it stands what happens otherwise, once each, with
20 seconds for an answer. A rank without any microbatch leaves its loop before the backward pass, as a loop over no data does.

{chr(10).join(lines)}

DistributedDataParallel exchanges gradients in the last backward pass of each rank, so that numbers may differ but not be 0; fully_shard gathers
parameters in each forward pass, and waits for a rank that has fewer. What to change: give each rank as many microbatches, those without data
with labels that are all -100; or use `Join` with DistributedDataParallel.
"""


def _of_padding(report: dict[str, Any]) -> str:
    return """
## T4: padding

A microbatch without labels adds nothing to a sum of means, but counts in the number of microbatches or rows that it is divided by. So the step is
too short: see "one empty" above. The recipe of torchtune multiplies the mean by the number of labels, so its gradient is right. The loss that it
reports is 0 · nan, which is nan. `Trainer` replaces a loss that is no number by the sum so far (`logging_nan_inf_filter`). There the reported loss
is too large, and the parameters are right. mlx-lm divides by the number of labels, even where that is 0: from then on, its parameters are no numbers.
"""


def _of_identity(report: dict[str, Any]) -> str:
    moved = [c["name"] for c in report["columns"] if c["moved_by_momentum"]]
    kept = [c["name"] for c in report["columns"] if c["moved_by_momentum"] == 0]
    return f"""
## T7: an update without labels

The gradient is zero there, and plain SGD does nothing. But the optimizer steps, so momentum goes on, weight decay shrinks, and AdamW's
moments and its count of steps move. By hand, with momentum ½, an update without labels after one with labels moves the parameters
by half of what that one did. torchtune's recipe multiplies a gradient of zero by 1 / 0, and mlx-lm divides 0 by 0: both are no
numbers from then on.

- These step: {"; ".join(moved)}.
- These leave all as it was: {"; ".join(kept)}.

What to change: leave out the step where the count is 0, on all ranks.
"""


def _of_purity(report: dict[str, Any]) -> str:
    return """
## T6: purity

transformers' `Trainer` and TRL's, which is one, seed the global generators of Python, NumPy and torch before training; Composer seeds them with a
random number. They say so. A program that draws from these generators later draws different numbers. Updates stay as they are.

A `DataLoader` without a generator draws its base seed from torch's global one each time that it is iterated over. So all loaders
of this page have a generator.
"""


def _of_resuming(report: dict[str, Any]) -> str:
    found = report["torchopt"]
    return f"""
## T16: resuming

`torchopt.sgd` with momentum μ keeps a flag for the first call beside the state that it returns (`first_call` in torchopt/transform/trace.py).
On that call the buffer is m + g instead of μ m + g. From a fresh state, m = 0, and there is no difference. A state that is
put back into a new optimizer meets the flag again: with μ = 0.5 and the gradients 2 and 1,

    going on                                        m = 2, then 0.5 · 2 + 1 = 2     its own run: {found["going on"]:g}
    put back between the two, into new functions    m = 2, then 2 + 1 = 3           its own run: {found["put back"]:g}
    put back by load_state_dict of torchopt.SGD     m = 2, then 2 + 1 = 3           its own run: {found["object put back"]:g}

The object's `state_dict` has no flag either. What to change: keep the optimizer as long as its state; or let a new one make one call on a
state that is thrown away, before it gets the saved one. `optax.MultiSteps` is saved in the middle of each accumulation, as bytes, and holds.
"""


def _of_settings(report: dict[str, Any]) -> str:
    return """
## T17: settings

`optax.microbatching.microbatch` cuts a batch itself, so that what T1 asks of the others is asked here: with `microbatch_size=1` and without. T1 and
T14 are not asked of it, since it would be given the same batch twice. A MEAN of means over rows is right where all rows have equally
many tokens. What to set: SUM, of gradients of sums, and one division by the count.
"""


NOTES = {
    "T1": _of_heads,
    "T2": _of_ranks,
    "T4": _of_padding,
    "T6": _of_purity,
    "T7": _of_identity,
    "T16": _of_resuming,
    "T17": _of_settings,
}


def _smallest(report: dict[str, Any]) -> str:
    """The cases; those that are wrong in the same way, by the same law and the same formula, in one row."""
    rows: dict[tuple[str, ...], tuple[str, str, list[str]]] = {}
    for column in report["columns"]:
        for law, verdict in column["verdicts"].items():
            if verdict["finding"] in ("wrong", "refuses"):
                by_hand, why = verdict.get("by_hand", False), verdict["why"]
                kind = re.sub(r"[\d.e-]+", "", why) if by_hand else _kind(why)
                kind += verdict["finding"]
                words = "by hand" if by_hand else verdict["words"].split("; ")[0]
                gives = "" if law in ("T6", "T7") else column["gives"]
                row = rows.setdefault(
                    (law, gives, kind), (_short(words), _short(why), [])
                )
                row[2].append(column["name"])
    lines = [
        "## The smallest cases found\n",
        "One row for all that are wrong in the same way, with the numbers of the first. results/conformance.json has each in full, and "
        "as a program.\n",
        "| law | case | found | trainers |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {law} | {words} | {why} | {'; '.join(names)} |"
        for (law, *_), (words, why, names) in sorted(
            rows.items(), key=lambda each: _place(report, each[0][0])
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


def _place(report: Mapping[str, Any], law: str) -> int:
    return [*report["laws"]].index(law)


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

`python -m benchmarks.trainers.again` computes each cell that says wrong from its smallest case, by sums of plain losses times one
coefficient for each microbatch. It asks three things: does the equation give the same for both ways to write the update, are the trainer's
numbers those of its formula, and do they differ? {confirmed} of {len(found)} cells are confirmed. It computes the table "How far the cut holds", too.
"""


def _laws(report: dict[str, Any]) -> str:
    lines = ["## The laws\n", "| law | claim |", "| --- | --- |"]
    lines += [
        f"| {law} {about['title']} | {about['statement']} |"
        for law, about in report["laws"].items()
    ]
    return "\n".join(lines)


def _versions(report: dict[str, Any]) -> str:
    versions = "\n".join(
        f"    {name} {version}" for name, version in report["versions"].items()
    )
    return f"""
## Versions, and how to repeat it

On a CPU, with Python {report["python"]} and

{versions}

The command is

    make conformance

Each trainer runs in a separate process, and may take {report["limit"]:.0f} seconds; all of them took {report["seconds"] / 60:.0f} minutes of one core. The
cases are drawn from a fixed seed, so they are the same each time. fastai and Composer are installed beside the others, in folders below
`build`: fastai asks for torchvision, whose wheel for torch's CPU build is not on PyPI, and Composer 0.32 for torch 2.6. Neither needs them here;
for torchvision and mcli, which Composer imports, there are empty modules. torchtune 0.6.1 cannot be imported beside the torchao of today
(0.18), so that its recipe's lines are run as they stand. Lightning, Ignite, fastai, Composer, Keras, TRL and mlx-lm run on one process here.
"""


def _usages(report: dict[str, Any]) -> str:
    lines = ["## What was followed\n"]
    for column in report["columns"]:
        packages = ", ".join(
            f"{name} {report['versions'][name]}" for name in column["packages"]
        )
        source = f" {column['source']}" if column["source"] else ""
        lines.append(f"### {column['name']}\n\n{packages}.{source}\n")
        lines += [f"    {line}".rstrip() for line in column["follows"].split("\n")]
        lines.append("")
    return "\n".join(lines)
