"""What a process of the benchmark does: it judges a column, or runs the examples that are checked by hand."""

import gc
import time
import warnings
from typing import Any

import torch

import purestep as ps
from benchmarks.conformance import by_hand
from benchmarks.conformance.columns import COLUMNS


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
    # Masks of small batches are seldom uneven, so that a mean of means is easily missed.
    tokens = trainer.abilities.task.model is not None and trainer.abilities.ranks == 1
    more = {"T1": 5 * cases} if tokens else {}
    gc.collect()
    gc.freeze()  # transformers' Trainer collects garbage after each run.
    verdicts = {
        verdict.law.name: {
            "finding": verdict.finding,
            "cases": verdict.cases,
            "to_the_bit": verdict.to_the_bit,
            "why": verdict.why,
            "size": verdict.size,
            "words": verdict.case.words() if verdict.case else "",
            "code": verdict.case.code() if verdict.case else "",
        }
        for law in ps.testing.LAWS
        for verdict in ps.testing.judge(trainer, [law], cases=more.get(law, cases), shrink=shrink)
    }
    found = {
        "name": column.name,
        "documented": column.documented,
        "packages": column.packages,
        "source": column.source,
        "follows": column.follows,
        "verdicts": verdicts,
        "seconds": time.monotonic() - start,
    }
    says = " ".join(f"{law}:{str(about['finding']).split()[0]}" for law, about in verdicts.items())
    print(f"{name}, {found['seconds']:.0f} s\n    {says}", flush=True)
    return found


def examples(which: str) -> Any:
    """What is checked by hand, by the trainers' own runs."""
    prepare()
    return {
        "biases": lambda: by_hand.biases(COLUMNS),
        "heads": by_hand.heads,
        "torchtune": by_hand.torchtune_losses,
        "evaluation": by_hand.evaluation_losses,
        "torchopt": by_hand.torchopt_buffers,
    }[which]()
