"""Prints which laws of the kit find each wrong loop, and what it says against right ones.

python -m benchmarks.mistakes.kit                     which laws find each mistake, with the cases of default
python -m benchmarks.mistakes.kit ranks noise         those of some files
python -m benchmarks.mistakes.kit right 120 [SEED]    false alarms about right loops, in so many seconds
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

import purestep as ps
from benchmarks.mistakes import (
    accumulation,
    clipping,
    counting,
    evaluated_model,
    evaluation,
    low_precision,
    noise,
    optimizer,
    purity,
    rank_counts,
    ranks,
    reported_loss,
    reporting,
    resuming,
    right_loops,
    rows,
    saving,
    skipping,
    weighting,
    windows,
)
from benchmarks.mistakes.mistake import Mistake, build_trainer
from purestep.testing import Capabilities
from support.plain_loop import PlainLoop

FILES: dict[str, list[Mistake]] = {
    "windows": windows.MISTAKES,
    "accumulation": accumulation.MISTAKES,
    "rows": rows.MISTAKES,
    "weighting": weighting.MISTAKES,
    "counting": counting.MISTAKES,
    "ranks": ranks.MISTAKES,
    "rank_counts": rank_counts.MISTAKES,
    "optimizer": optimizer.MISTAKES,
    "low_precision": low_precision.MISTAKES,
    "clipping": clipping.MISTAKES,
    "skipping": skipping.MISTAKES,
    "evaluation": evaluation.MISTAKES,
    "evaluated_model": evaluated_model.MISTAKES,
    "reported_loss": reported_loss.MISTAKES,
    "reporting": reporting.MISTAKES,
    "noise": noise.MISTAKES,
    "saving": saving.MISTAKES,
    "resuming": resuming.MISTAKES,
    "purity": purity.MISTAKES,
}
"""Mistakes by the file that lists them."""

MISTAKES = [mistake for mistakes in FILES.values() for mistake in mistakes]
REQUIRED = [mistake for mistake in MISTAKES if mistake.required]

RIGHT: dict[str, Callable[[], Any]] = {
    "the loop of the proofs": PlainLoop,
    "divided first": lambda: ps.testing.loop(right_loops.divided_first),
    "divided last": lambda: ps.testing.loop(right_loops.divided_last),
    "float32": lambda: ps.testing.loop(
        right_loops.divided_first, None, Capabilities(dtype=torch.float32)
    ),
    "AdamW": lambda: ps.testing.loop(
        right_loops.divided_first, right_loops.adamw, Capabilities(plain_sgd=False)
    ),
    "clipped": lambda: ps.testing.loop(
        right_loops.divided_last, right_loops.clipped, Capabilities(plain_sgd=False)
    ),
    "NumPy": right_loops.ByHand,
    "a right_loops.pure step on threads": lambda: ps.testing.PureTrainer(
        right_loops.pure, Capabilities(ranks=3)
    ),
    "two processes": lambda: ps.testing.loop(
        right_loops.divided_first, None, Capabilities(ranks=2)
    ),
}
"""Loops that the kit has to accept."""


def print_findings(mistakes: Iterable[Mistake]) -> None:
    """Prints which laws find each mistake, after how many seconds the first does."""
    for number, mistake in enumerate(mistakes):
        start = time.process_time()
        seconds = 0.0
        laws = []
        for law in ps.testing.LAWS:
            (verdict,) = ps.testing.run_laws(build_trainer(mistake), [law])
            if verdict.status in ("wrong", "refuses"):
                laws.append(law if verdict.status == "wrong" else f"({law})")
                seconds = seconds or time.process_time() - start
        name = f"{mistake.base}: {mistake.name}"
        findings = " ".join(laws) or "NOT FOUND"
        print(f"{number:3} {name:88} {seconds:4.1f} s  {findings}", flush=True)


def print_false_alarms(seconds: float, seed: int) -> Counter[str]:
    """Prints false alarms about right loops; returns how many cases each was asked."""
    cases: Counter[str] = Counter()
    trainers = {name: make() for name, make in RIGHT.items()}
    names = list(trainers)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        name = names[seed % len(names)]
        for verdict in ps.testing.run_laws(trainers[name], seed=seed):
            cases[name] += verdict.cases
            if verdict.case is not None:
                print(
                    f"{name}, seed {seed}: {verdict}; {verdict.case.describe()}",
                    flush=True,
                )
        seed += 1
    print(f"{cases.total()} cases, the next seed is {seed}: {dict(cases)}")
    return cases


def main(arguments: list[str]) -> None:
    """Asks about right loops, about the mistakes of some files, or about all mistakes."""
    torch.set_num_threads(1)
    if arguments[:1] == ["right"]:
        seed = int(arguments[2]) if len(arguments) > 2 else 0
        print_false_alarms(float(arguments[1]), seed)
    elif arguments:
        print_findings(mistake for name in arguments for mistake in FILES[name])
    else:
        print_findings(MISTAKES)


if __name__ == "__main__":
    main(sys.argv[1:])
