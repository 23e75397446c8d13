"""What a process of the benchmark does: it judges a column, or runs the examples that are checked by hand."""

import copy
import gc
import random
import time
import warnings
from typing import Any

import torch

import purestep as ps
from benchmarks.conformance import by_hand
from benchmarks.conformance.again import marked
from benchmarks.conformance.column import Column
from benchmarks.conformance.columns import COLUMNS
from purestep.testing.case import Case, RefusalError, Run, outcome

WORST = ("wrong", "hangs", "refuses", "holds", "not asked")


def prepare() -> None:
    """One thread; and no chatter, of which there is a line for each of thousands of updates."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    random.seed(1)


def judged(name: str, cases: int, shrink: int) -> dict[str, Any]:
    """A column."""
    prepare()
    (column,) = [column for column in COLUMNS if column.name == name]
    start = time.monotonic()
    trainer = column.make()
    gc.collect()
    gc.freeze()  # transformers' Trainer collects garbage after each run.
    by_momentum, biases = by_hand.moved_by_momentum(trainer), by_hand.biases(column)
    # Now that all is imported: a trainer that seeds generators finds them as it left them the second time.
    prepare()
    laws = sorted(ps.testing.LAWS, key=lambda law: law != "T6")
    found = {law: _verdict(column, trainer, law, cases, shrink) for law in laws}
    _add_what_is_by_hand(found, by_momentum, biases)
    by_uneven = by_hand.uneven(column)
    about = {
        "verdicts": {law: found[law] for law in ps.testing.LAWS},
        "uneven": by_uneven,
        "biases": biases,
        "moved_by_momentum": by_momentum,
        "seconds": time.monotonic() - start,
    }
    says = " ".join(f"{law}:{each['finding'].split()[0]}" for law, each in found.items())
    print(f"{name}, {about['seconds']:.0f} s\n    {says}", flush=True)
    return about


def _add_what_is_by_hand(
    found: dict[str, dict[str, Any]], by_momentum: float | None, biases: dict[str, Any]
) -> None:
    """What the cases by hand show that no case of the kit did: models of tokens have neither momentum nor a second update."""
    if by_momentum and found["T7"]["finding"] in ("holds", "refuses"):
        words = (
            "with momentum ½, an update without labels after one with labels moves the parameters by "
            f"{by_momentum:.3g} of what that one did"
        )
        found["T7"] |= {"finding": "wrong", "why": words, "by_hand": True}
    for law, name in [*(("T1", name) for name in by_hand.CUTS), ("T4", "one empty")]:
        right, bias = by_hand.CASES[name][1], biases.get(name)
        told = isinstance(bias, float) and abs(bias - right) > 1e-6
        if told and found[law]["finding"] == "holds":
            words = f"{name}: the first bias is {bias}, and not {right}"
            found[law] |= {"finding": "wrong", "why": words, "by_hand": True}


def _verdict(column: Column, trainer: Any, law: str, cases: int, shrink: int) -> dict[str, Any]:
    """As a table. ``asked`` is in how many cases the two runs differ in what the law is about."""
    if law in column.vacuous:
        return {"finding": "not asked", "why": column.vacuous[law], "vacuous": True}
    # Masks of small batches are seldom uneven, so that a mean of means is easily missed.
    if law == "T1" and trainer.abilities.weights == "mask" and trainer.abilities.ranks == 1:
        cases *= 3
    asked = 0
    the_law = ps.testing.LAWS[law]
    counting = copy.copy(the_law)

    def counted(trainer: Any, case: Case) -> bool:
        nonlocal asked
        held = the_law.claim(trainer, case)
        asked += is_asked(law, case)
        return held

    vars(counting)["claim"] = counted
    ps.testing.LAWS[law] = counting
    try:
        (verdict,) = ps.testing.judge(trainer, [law], cases=cases, shrink=shrink)
    finally:
        ps.testing.LAWS[law] = the_law
    found: dict[str, Any] = {
        "finding": verdict.finding,
        "cases": verdict.cases,
        "asked": asked,
        "to_the_bit": verdict.to_the_bit,
        "why": verdict.why,
        "size": verdict.size,
    }
    # Of a kit that tells them: how far a law holds, and which kinds of cases were drawn.
    parts, coverage = (getattr(verdict, name, {}) for name in ("parts", "coverage"))
    found["parts"] = {part: each.finding for part, each in parts.items()}
    found["coverage"] = {
        what: {str(number): times for number, times in sorted(numbers.items())}
        for what, numbers in coverage.items()
    }
    if verdict.case is not None:
        found |= {
            "words": verdict.case.words(),
            "code": verdict.case.code(),
            "case": plain(verdict.case),
            "seen": seen(trainer, verdict.case),
        }
    return found


def is_asked(law: str, case: Case) -> bool:
    """Whether the two runs of a case differ in what the law is about."""
    shares = case.second.groups[-1]
    full = [sum(bool(case.problem.weights(part).any()) for part in share) for share in shares]
    if law in ("T1", "T17"):
        return sum(full) > 1 or law == "T17"
    if law == "T2":
        return len(shares) > 1
    if law in ("T14", "T15"):
        return sum(full) > 1 or len(shares) > 1
    if law == "T16":
        return any(act == "restart" for act in case.second.acts[1:])
    if law in ("T3", "T4", "T5"):
        assert case.first is not None
        return not _equal(case.first.groups, case.second.groups)
    return True


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return all(_equal(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(_equal, one, other))


def plain(case: Case) -> dict[str, Any]:
    """Its numbers and data, for those who compute without the kit. A tensor of the linear model is a list."""

    def run(run: Run) -> dict[str, Any]:
        acts = [
            act if isinstance(act, str) else [[_lists(part) for part in share] for share in act]
            for act in run.acts
        ]
        return {"acts": acts, "setting": run.setting}

    problem = case.problem
    return {
        "task": problem.task.name,
        "learning_rate": problem.learning_rate,
        "momentum": problem.momentum,
        "weight_decay": problem.weight_decay,
        "params": {name: p.tolist() for name, p in problem.params().items()}
        if isinstance(problem.model, ps.testing.Linear)
        else None,
        "dtype": str(next(iter(problem.params().values())).dtype),
        "runs": [None if case.first is None else run(case.first), run(case.second)],
    }


def _lists(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: value.tolist() for key, value in batch.items()}


def seen(trainer: Any, case: Case) -> list[Any]:
    """What the first rank sees after each run: parameters, loss, loss in evaluation, and marks of the generators."""
    found: list[Any] = []
    for run in (case.first, case.second):
        if run is None:
            found.append(None)
            continue
        try:
            each = outcome(trainer, case.problem, run)[0]
        except RefusalError as refusal:
            found.append(str(refusal))
            continue
        evaluation = getattr(each, "evaluation", None)
        if evaluation is None and isinstance(trainer, ps.testing.Evaluating):
            evaluation = trainer.evaluate(run.groups[-1])
        found.append(
            {
                "params": {name: p.tolist() for name, p in each.params.items()},
                "loss": None if each.loss is None else float(each.loss),
                "evaluation": None if evaluation is None else float(evaluation),
                "python": marked(random.getstate()),
                "torch": marked(torch.get_rng_state().tolist()),
            }
        )
    return found


def examples(which: str) -> Any:
    """What is checked by hand, by the trainers' own runs."""
    prepare()
    return {
        "heads": by_hand.heads,
        "torchtune": by_hand.torchtune_losses,
        "evaluation": by_hand.evaluation_losses,
        "torchopt": by_hand.torchopt_buffers,
    }[which]()
