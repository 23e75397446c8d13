"""What a process of the benchmark does: it judges a column, or runs the examples that are checked by hand."""

import copy
import gc
import json
import random
import tempfile
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

import purestep as ps
from benchmarks.trainers import by_hand
from benchmarks.trainers.again import marked
from benchmarks.trainers.column import Column
from benchmarks.trainers.columns import COLUMNS
from purestep.testing.adapters import Processes
from purestep.testing.case import Case, RefusalError, Run, outcome

WORST = ("wrong", "hangs", "refuses", "holds", "not asked")


def prepare() -> None:
    """One thread; and no chatter, of which there is a line for each of thousands of updates."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def judged(name: str, cases: int, shrink: int) -> dict[str, Any]:
    """A column."""
    prepare()
    (column,) = [column for column in COLUMNS if column.name == name]
    start = time.monotonic()
    trainer = column.make()
    gc.collect()
    gc.freeze()  # transformers' Trainer collects garbage after each run.
    by_momentum, biases = by_hand.moved_by_momentum(trainer), by_hand.biases(column)
    found = {
        law: _verdict(column, trainer, law, cases, shrink) for law in ps.testing.LAWS
    }
    _add_what_is_by_hand(
        found, by_momentum, {} if trainer.capabilities.merges_microbatches else biases
    )
    by_uneven = by_hand.uneven(column)
    about = {
        "verdicts": found,
        "uneven": by_uneven,
        "biases": biases,
        "moved_by_momentum": by_momentum,
        "seconds": time.monotonic() - start,
    }
    says = " ".join(
        f"{law}:{each['finding'].split()[0]}" for law, each in found.items()
    )
    print(f"{name}, {about['seconds']:.0f} s\n    {says}", flush=True)
    return about


def by_hand_again(name: str) -> dict[str, Any]:
    """Of a column, the cases by hand alone."""
    prepare()
    (column,) = [column for column in COLUMNS if column.name == name]
    gc.collect()
    gc.freeze()
    return {
        "biases": by_hand.biases(column),
        "uneven": by_hand.uneven(column),
    }


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


def _verdict(
    column: Column, trainer: Any, law: str, cases: int, shrink: int
) -> dict[str, Any]:
    """As a table."""
    if law in column.vacuous:
        return {"finding": "not asked", "why": column.vacuous[law], "vacuous": True}
    (verdict,) = ps.testing.run_laws(trainer, [law], cases=cases, shrink=shrink)
    found: dict[str, Any] = {
        "finding": verdict.status,
        "vacuous": trainer.capabilities.merges_microbatches and law in ("T1", "T14"),
        "cases": verdict.cases,
        "to_the_bit": verdict.num_bitwise,
        "why": verdict.reason,
        "size": verdict.size,
        "parts": {part: each.status for part, each in verdict.parts.items()},
        "coverage": {
            what: {str(number): times for number, times in sorted(numbers.items())}
            for what, numbers in verdict.coverage.items()
        },
    }
    if verdict.case is not None:
        found |= {
            "words": verdict.case.describe(),
            "code": verdict.case.reproducer(),
            "case": json.dumps(plain(verdict.case)),
            "seen": json.dumps(seen(trainer, verdict.case)),
        }
    return found


def plain(case: Case) -> dict[str, Any]:
    """Its numbers and data, for those who compute without the kit. A tensor of the linear model is a list."""

    def run(run: Run) -> dict[str, Any]:
        acts = [
            act
            if isinstance(act, str)
            else [[_lists(part) for part in share] for share in act]
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
    """What the first rank sees after each run: parameters, loss, and loss in evaluation; and marks of the generators."""
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
        found.append(
            {
                "params": {name: p.tolist() for name, p in each.params.items()},
                "loss": None if each.loss is None else float(each.loss),
                "evaluation": None
                if each.evaluation is None
                else float(each.evaluation),
                "generator": generator_after(trainer, case) if case.part else None,
            }
        )
    return found


def generator_after(trainer: Any, case: Case) -> str:
    """A mark of Python's global generator after an update in this process; of a program for ranks, in a group of one."""
    alone = isinstance(trainer, Processes)
    batch = copy.deepcopy(case.second.groups[-1][0][0])
    if alone:
        with tempfile.TemporaryDirectory() as folder:
            where = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
            program = trainer.make()
            program.start(case.problem)
            program.update([batch])
            dist.destroy_process_group()
    else:
        trainer.start(case.problem, 1)
        trainer.update([[batch]])
    return marked(random.getstate())


def examples(which: str) -> Any:
    """What is checked by hand, by the trainers' own runs."""
    prepare()
    return {
        "heads": by_hand.heads,
        "torchtune": by_hand.torchtune_losses,
        "evaluation": by_hand.evaluation_losses,
        "torchopt": by_hand.torchopt_buffers,
    }[which]()
