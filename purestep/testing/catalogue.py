"""The laws of gradient accumulation, as data: each draws two ways to write the same training.

They are the theorems that purestep's own proofs are about, put to a trainer that is a black box.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from purestep.testing.case import Act, Case, DisagreementError, Run, agree, outcome
from purestep.testing.draws import Draw
from purestep.testing.problem import Batch
from purestep.testing.trainer import Abilities, Group, Resumable, Switchable
from purestep.testing.writing import (
    KINDS,
    Layout,
    Part,
    microbatches,
    padded,
    problem_of,
    written,
)

LAWS: dict[str, "TrainerLaw"] = {}
"""The laws, by their names."""


@dataclass
class TrainerLaw:
    """A law about trainers. It decorates what draws its cases, whose docstring states it.

    Args:
        name: of the theorem.
        title: in a word.
        able: whether the law can be put to a trainer.
        unable: what is said of one to which it cannot.
        claim: whether two runs agree to the bit; ``DisagreementError`` where they do not agree.
        parts: how far it may hold.
    """

    name: str
    title: str
    able: Callable[[Any], Any] = lambda trainer: True
    unable: str = ""
    claim: Callable[[Any, Case], bool] = agree
    parts: Sequence[str] = ("",)

    def __call__(self, cases: Callable[[Draw, Any, str], Case]) -> "TrainerLaw":
        """The law, with what draws a case of a part for a trainer."""
        self.cases, self.statement = cases, inspect.cleandoc(cases.__doc__ or "")
        LAWS[self.name] = self
        return self

    def missing(self, trainer: Any) -> str:
        """Why the law is not put to a trainer; empty: it is."""
        return "" if self.able(trainer) else self.unable


def _batch(draw: Draw, abilities: Abilities, **more: Any) -> Batch:
    return microbatches(draw, abilities, [draw], **more)[0]


def _updates(
    draw: Draw,
    abilities: Abilities,
    numbers: range,
    size: int = 1,
    *,
    keyed: bool = False,
) -> list[Group]:
    """Small updates on so many ranks; of a model that is no polynomial, as few as possible."""

    small = partial(
        _batch, abilities=abilities, most_rows=2, most_length=3, keyed=keyed
    )
    return [
        [[small(each) for _ in range(number)] for _ in range(size)]
        for each in draw.many(numbers if abilities.task.model is None else numbers[:1])
        for number in [each.one([1, 2])]
    ]


def _written_twice(
    draw: Draw, trainer: Any, change: str, part: str = "", dropout: float = 0.0
) -> Case:
    """One group in two ways, which differ in this respect, after the same earlier updates."""
    abilities, task, keyed = trainer.abilities, trainer.abilities.task, dropout > 0
    most = 1 if change == "cut" else abilities.ranks
    sizes = range(min(most, 1 + (change == "ranks")), most + 1)
    fitting = {
        count: [size for size in sizes if abilities.uneven or count % size == 0]
        for count in range(1 if change == "padding" else 2, 10)
    }
    parts = draw.many([count for count, some in fitting.items() if some])
    size = draw.one(fitting[len(parts)])
    problem = problem_of(draw, abilities, dropout=dropout)
    batch, cut = microbatches(draw, abilities, parts, part, keyed=keyed)
    first: Any = [[] for _ in range(size)]
    for at, rows in enumerate(cut):
        owner = (
            parts[at].one(range(size)) if abilities.uneven else at * size // len(cut)
        )
        first[owner].append(Part(rows))
    second, every = first, [*range(len(task.weights(batch)))]
    if change == "order":
        second = [
            [Part(draw.order(p.rows)) for p in draw.order(s)] for s in draw.order(first)
        ]
        if second == first:
            second = [
                [Part(part.rows[::-1]) for part in share[::-1]] for share in first[::-1]
            ]
    if change in ("cut", "all"):
        first = [[Part(every)]]
    elif change == "ranks":
        first = [[Part(rows) for rows in cut]]
    if change == "all":
        order = draw.order(every)
        second = [
            [Part([order[row] for row in part.rows]) for part in share]
            for share in second
        ]
    if change in ("padding", "all"):
        inside, length = not (keyed or task.vocabulary), task.weights(batch).shape[1]
        second = padded(draw, second, length, inside=inside, added=abilities.uneven)
    # Where an update that is not SGD has rounded in two ways, no later one has a bound.
    numbers = range(6 if abilities.sgd or len(first) == size else 1)
    before = _updates(draw, abilities, numbers, size, keyed=keyed)
    shares = [[batch for share in group for batch in share] for group in before]
    # Twice a half of a gradient is the gradient, to the bit.
    joined = [[share * 2 if len(share) == 1 else share] for share in shares]

    def run(layout: Layout) -> Run:
        on = [
            f" on rank {rank}" if len(layout) > 1 else "" for rank in range(len(layout))
        ]
        words = [
            f"rows {' | '.join(map(str, share))}" if share else "nothing"
            for share in layout
        ]
        own = layout is second or change in ("order", "padding") or not before
        how = "; ".join(map("".join, zip(words, on, strict=True)))
        how += (
            "" if own else ", after updates whose single microbatches are given twice"
        )
        return Run(
            [*(before if own else joined), written(batch, task, layout)],
            how,
            len(layout),
        )

    one, other = run(first), run(second)
    if change == "look":
        # Bits after a restart are T16's.
        more = ["restart"] * (part != "bits" and isinstance(trainer, Resumable))
        looks: list[Any] = [
            "look",
            *(each for act in other.acts for each in (act, "look", *more)),
        ]
        other = other._replace(acts=looks, how="the same again, and looked at")
    elif change == "setting":
        one, other = (
            one._replace(how=f"{one.how} in the setting {name!r}", setting=name)
            for name in draw.order(trainer.settings)[:2]
        )
    return Case(problem, one, other, part=part)


@TrainerLaw(
    "T0", "equation", lambda it: it.abilities.sgd, "its update is not plain SGD"
)
def _equation(draw: Draw, trainer: Any, part: str) -> Case:
    """An update on one microbatch is a step of SGD by the gradient of Σ wᵢ ℓᵢ / Σ wᵢ."""
    abilities = trainer.abilities
    groups = [
        *_updates(draw, abilities, range(6)),
        [[_batch(draw, abilities, most_rows=8)]],
    ]
    acts = [[share[:1] for share in group] for group in groups]
    return Case(
        problem_of(draw, abilities), None, Run(acts, "one microbatch in each update")
    )


def _is_cut(trainer: Any) -> bool:
    return not trainer.abilities.joins


@TrainerLaw("T1", "cut", _is_cut, "it joins its microbatches into one", parts=KINDS)
def _cut(draw: Draw, trainer: Any, part: str) -> Case:
    """Any cut of the batch into microbatches gives the update of the one large batch."""
    return _written_twice(draw, trainer, "cut", part)


@TrainerLaw("T2", "ranks", lambda it: it.abilities.ranks > 1, "it runs on one rank")
def _ranks(draw: Draw, trainer: Any, part: str) -> Case:
    """Microbatches spread over ranks give every rank the update of one that holds them all."""
    return _written_twice(draw, trainer, "ranks")


@TrainerLaw("T3", "order")
def _order(draw: Draw, trainer: Any, part: str) -> Case:
    """Rows, microbatches and ranks may stand in any order."""
    return _written_twice(draw, trainer, "order")


@TrainerLaw("T4", "padding")
def _padding(draw: Draw, trainer: Any, part: str) -> Case:
    """Ignored tokens, rows and microbatches change nothing."""
    return _written_twice(draw, trainer, "padding")


def _weighs(trainer: Any) -> bool:
    return trainer.abilities.weights != "mask" and not trainer.abilities.task.vocabulary


@TrainerLaw("T5", "weights", _weighs, "its tokens have no weights")
def _weights(draw: Draw, trainer: Any, part: str) -> Case:
    """Scaling all weights changes nothing; a token of weight k counts as the token k times."""
    abilities, scale = trainer.abilities, 1.0
    if draw.one([False, True]) and abilities.weights == "any":
        batch, scale = (
            _batch(draw, abilities),
            draw.one([2.0, 0.5, 4.0, 0.25, 16.0, 0.0625]),
        )
        other, how = {**batch, "w": batch["w"] * scale}, f"the weights times {scale}"
    else:
        whole = abilities._replace(weights="whole")
        batch, how = (
            _batch(draw, whole, most_rows=2, most_length=2),
            "each token weight times",
        )
        times = batch["w"]
        times[0, 0] += 1 + (times[0, 0] == 0)  # Once is no change.
        repeated = partial(torch.repeat_interleave, repeats=times.flatten(), dim=0)
        other = {
            key: repeated(x.flatten(0, 1)).unsqueeze(1) for key, x in batch.items()
        }
        other["w"] = torch.ones_like(other["w"])
    first, second = (
        Run([[[batch]]], "one microbatch of all rows"),
        Run([[[other]]], how),
    )
    return Case(problem_of(draw, abilities), first, second, scale=scale)


def _pure(trainer: Any, case: Case) -> bool:
    """The same bits twice; or what is beside the trainer is as it was."""
    if case.part == "bits":
        if not agree(trainer, case):
            raise DisagreementError(
                case, "the same run twice gives different bits", 0.0
            )
        return True
    for rank, seen in enumerate(outcome(trainer, case.problem, case.second)):
        for what in (what for part, what in seen.changed if part == case.part):
            raise DisagreementError(
                case, f"{what} is not as it was on rank {rank}", 1.0
            )
    return True


@TrainerLaw("T6", "purity", claim=_pure, parts=("bits", "inputs", "global state"))
def _purity(draw: Draw, trainer: Any, part: str) -> Case:
    """The same start and data give the same bits; data and global state stay as they were."""
    if part != "bits" and trainer.abilities.skips and draw.one([False, True]):
        return replace(
            _interrupted(draw, trainer, None, _dropout(draw, trainer)), part=part
        )
    return _written_twice(draw, trainer, "look", part, _dropout(draw, trainer))


def _dropout(draw: Draw, trainer: Any) -> float:
    return draw.one([0.0, 0.5]) if trainer.abilities.dropout else 0.0


def _interrupted(
    draw: Draw, trainer: Any, act: Act | None = None, dropout: float = 0.0
) -> Case:
    """Updates, and the same with something between them that makes no difference."""
    abilities = trainer.abilities
    size = draw.one(range(1, abilities.ranks + 1))
    updates = _updates(draw, abilities, range(1, 7), size, keyed=dropout > 0)
    batch, saving = updates[0][0][0], act is not None
    how = "saved and put back" if act == "restart" else "saved"
    if act is None and abilities.skips and "y" in batch and draw.one([False, True]):
        spoilt, at = {**batch, "y": batch["y"].clone()}, draw.one(range(size))
        spoilt["y"][tuple(batch["w"].nonzero()[0])] = draw.one(
            [float("nan"), float("inf")]
        )
        more = draw.one([[], [batch]])
        act = [[spoilt if rank == at else batch, *more] for rank in range(size)]
        how = f"with a target that is not finite on rank {at} of {size}"
    elif act is None:
        counts = [draw.one(range(3)) for _ in range(size)]
        counts = counts if abilities.uneven else counts[:1] * size
        act = written(batch, abilities.task, [[Part([-1])] * count for count in counts])
        how = f"with {counts} microbatches without tokens on the ranks"
    places = sorted(
        each.one(range(len(updates), -1, -1)) for each in draw.many(range(1, 3))
    )
    acts: list[Act] = [*updates]
    for place in reversed(places):
        acts.insert(place, act)
    how = f"{how} before update {' and '.join(str(place + 1) for place in places)}"
    first, second = Run(updates, "one run", size), Run(acts, how, size)
    compared = ("evaluation",) if saving else () if acts[-1] is act else Case.reports
    return Case(problem_of(draw, abilities, dropout=dropout), first, second, compared)


@TrainerLaw("T7", "identity")
def _identity(draw: Draw, trainer: Any, part: str) -> Case:
    """An update without tokens, or one that is skipped, leaves everything as it was."""
    return _interrupted(draw, trainer)


@TrainerLaw("T14", "repartition", _is_cut, "it joins its microbatches into one")
def _repartition(draw: Draw, trainer: Any, part: str) -> Case:
    """All of these at once: any group of the same rows gives the same update."""
    return _written_twice(draw, trainer, "all")


@TrainerLaw(
    "T15", "randomness", lambda it: it.abilities.dropout, "its model drops nothing"
)
def _randomness(draw: Draw, trainer: Any, part: str) -> Case:
    """Cut, ranks, order and padding change nothing where elements are dropped, either."""
    return _written_twice(draw, trainer, "all", dropout=0.5)


@TrainerLaw(
    "T16", "resume", lambda it: isinstance(it, Resumable), "it cannot be saved here"
)
def _resume(draw: Draw, trainer: Any, part: str) -> Case:
    """Saving, starting anew, loading and going on is never having stopped."""
    return _interrupted(
        draw, trainer, draw.one(["restart", "save"]), _dropout(draw, trainer)
    )


@TrainerLaw("T17", "settings", lambda it: isinstance(it, Switchable), "it has one way")
def _settings(draw: Draw, trainer: Any, part: str) -> Case:
    """Its ways to do one thing agree."""
    return _written_twice(draw, trainer, "setting")
