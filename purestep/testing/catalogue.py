"""The laws of gradient accumulation, as data: each draws two ways to write the same training.

They are the theorems that purestep's own proofs are about, put to a trainer that is a black box.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from purestep.testing.case import Case, DisagreementError, Run, agree, outcome
from purestep.testing.problem import Batch, Task
from purestep.testing.strategies import (
    Cut,
    cuts,
    exact_batches,
    ignored_like,
    orders,
    padded_group,
    problems,
    ranks,
    regrouped,
    taken,
)
from purestep.testing.trainer import Abilities, Resumable, Switchable, Trainer


@dataclass(frozen=True)
class TrainerLaw:
    """A law about trainers.

    Args:
        name: of the theorem.
        title: in a word.
        statement: in a sentence.
        cases: what is drawn, for a trainer of these abilities.
        missing: why the law is not put to a trainer; empty: it is.
        claim: whether two runs agree to the bit; ``DisagreementError`` where they do not agree.
    """

    name: str
    title: str
    statement: str
    cases: Callable[[Trainer], SearchStrategy[Case]]
    missing: Callable[[Trainer], str] = lambda trainer: ""
    claim: Callable[[Trainer, Case], bool] = agree


def _batches(abilities: Abilities, kind: Any = None, **more: Any) -> SearchStrategy[Batch]:
    """Sums that are a power of two hide in which dtype they divide: others are drawn, too."""
    kind = kind or abilities.weights

    def some(exact: bool) -> SearchStrategy[Batch]:
        return exact_batches(abilities.task, kind=kind, exact=exact, dtype=abilities.dtype, **more)

    return st.booleans().flatmap(lambda inexact: some(not inexact))


@st.composite
def _updates(draw: st.DrawFn, abilities: Abilities, microbatches: int = 2) -> list[list[Batch]]:
    """Updates on one rank, each of at most so many microbatches; none of a model that is given."""
    if abilities.task.model is not None:
        return []
    group = st.lists(_batches(abilities, most_rows=2), min_size=1, max_size=microbatches)
    return draw(st.lists(group, max_size=2))


@st.composite
def _cut(draw: st.DrawFn, batch: Batch, task: Task) -> Cut:
    """Each microbatch has tokens; those without are T4's and T7's."""
    cut: Cut = []
    for rows in draw(cuts(len(next(iter(batch.values()))), empty=False)):
        if cut and not (counts(batch, cut[-1], task) and counts(batch, rows, task)):
            cut[-1] += rows
        else:
            cut.append(rows)
    return cut


def counts(batch: Batch, rows: Sequence[int], task: Task) -> bool:
    """Whether there is a token in these rows."""
    return bool(task.weights(taken(batch, rows)).any())


def _said(cut: Cut) -> str:
    return f"rows {' | '.join(map(str, cut))}"


def _shared(batch: Batch, shares: Sequence[Cut]) -> tuple[list[list[Batch]], str]:
    """What each rank holds, and in words."""
    group = [[taken(batch, rows) for rows in share] for share in shares]
    words = [_said(share) if share else "nothing" for share in shares]
    if len(shares) == 1:
        return group, words[0]
    return group, ", ".join(f"{said} on rank {rank}" for rank, said in enumerate(words))


def _after(updates: Sequence[Any]) -> str:
    return f"after {len(updates)} update{'s' if len(updates) > 1 else ''}, " if updates else ""


@st.composite
def _of_the_equation(draw: st.DrawFn, trainer: Trainer) -> Case:
    abilities = trainer.abilities
    problem = draw(problems(abilities))
    before = draw(_updates(abilities, microbatches=1))
    batch = draw(_batches(abilities))
    said = f"{_after(before)}one microbatch of all rows"
    return Case(problem, None, Run([*[[update] for update in before], [[batch]]], said))


@st.composite
def _in_parts(draw: st.DrawFn, trainer: Trainer) -> Case:
    """The whole batch as one microbatch, and cut; perhaps after other updates."""
    abilities = trainer.abilities
    problem = draw(problems(abilities))
    before = [[update] for update in draw(_updates(abilities))]
    batch = draw(_batches(abilities, least_rows=2))
    cut = draw(_cut(batch, abilities.task))
    group = [[taken(batch, rows) for rows in cut]]
    first = Run([*before, [[batch]]], f"{_after(before)}one microbatch of all rows")
    return Case(problem, first, Run([*before, group], _said(cut)))


@st.composite
def _spread(draw: st.DrawFn, trainer: Trainer) -> Case:
    """The same microbatches on one rank, and on several."""
    abilities = trainer.abilities
    problem = draw(problems(abilities))
    batch = draw(_batches(abilities, least_rows=2))
    cut = draw(_cut(batch, abilities.task))
    shares = draw(ranks(cut, abilities.ranks, uneven=abilities.uneven))
    group, how = _shared(batch, shares)
    first = Run([[[taken(batch, rows) for rows in cut]]], f"{_said(cut)} on one rank")
    return Case(problem, first, Run([group], how, len(group)))


@st.composite
def _reordered(draw: st.DrawFn, trainer: Trainer) -> Case:
    """Rows, microbatches and ranks in a different order."""
    abilities = trainer.abilities
    problem = draw(problems(abilities))
    batch = draw(_batches(abilities, least_rows=2))
    shares = draw(
        ranks(draw(_cut(batch, abilities.task)), abilities.ranks, uneven=abilities.uneven)
    )
    other = [draw(orders(share)) for share in draw(st.permutations(shares))]

    def run(shares: list[Cut]) -> Run:
        group, how = _shared(batch, shares)
        return Run([group], how, len(shares))

    return Case(problem, run(shares), run(other))


@st.composite
def _padded(draw: st.DrawFn, trainer: Trainer) -> Case:
    """The same microbatches, and with rows, columns and microbatches that count for nothing."""
    abilities = trainer.abilities
    problem = draw(problems(abilities))
    batch = draw(_batches(abilities))
    cut = draw(_cut(batch, abilities.task))
    plain = [taken(batch, rows) for rows in cut]
    group, how = draw(padded_group(plain, [str(rows) for rows in cut], abilities.task))
    return Case(problem, Run([[plain]], _said(cut)), Run([[group]], how))


@st.composite
def _regrouped(draw: st.DrawFn, trainer: Trainer, dropout: float = 0.0) -> Case:
    """The whole batch as one microbatch, and any group of its rows."""
    abilities = trainer.abilities
    problem = draw(problems(abilities, dropout=dropout))
    batch = draw(_batches(abilities, keyed=dropout > 0, least_rows=2))
    group, how = draw(
        regrouped(batch, abilities.task, most_ranks=abilities.ranks, uneven=abilities.uneven)
    )
    first = Run([[[batch]]], "one microbatch of all rows")
    return Case(problem, first, Run([group], how, len(group)))


@st.composite
def _weighted(draw: st.DrawFn, trainer: Trainer) -> Case:
    """Either all weights are scaled, or each token of weight k is there k times."""
    abilities = trainer.abilities
    problem = draw(problems(abilities))
    batch = draw(_batches(abilities, kind="whole"))
    if abilities.weights == "any" and draw(st.booleans()):
        scale = 2.0 ** draw(st.integers(-4, 4))
        first = {**batch, "w": batch["w"].to(abilities.dtype)}
        second = {**batch, "w": first["w"] * scale}
        how = f"the weights times {scale}"
        return Case(problem, Run([[[first]]], "weights"), Run([[[second]]], how), scale=scale)
    times = batch["w"].flatten().to(torch.int64)
    repeated = {
        key: value.flatten(0, 1).repeat_interleave(times, dim=0).unsqueeze(1)
        for key, value in batch.items()
    }
    repeated["w"] = torch.ones_like(repeated["w"])
    first_run = Run([[[batch]]], "whole weights")
    return Case(problem, first_run, Run([[[repeated]]], "each token as often as its weight says"))


@st.composite
def _twice(draw: st.DrawFn, trainer: Trainer) -> Case:
    """A run, and the same run again."""
    abilities = trainer.abilities
    problem = draw(problems(abilities))
    batch = draw(_batches(abilities))
    cut = draw(_cut(batch, abilities.task))
    group = [[taken(batch, rows) for rows in cut]]
    run = Run([*[[update] for update in draw(_updates(abilities))], group], _said(cut))
    return Case(problem, run, run._replace(how="the same again"))


def _pure(trainer: Trainer, case: Case) -> bool:
    """The same bits twice; what was given is as it was, and so is the program's global state."""

    def around() -> dict[str, Any]:
        return {
            "torch's global generator": torch.get_rng_state().tolist(),
            "Python's global generator": random.getstate(),
            "whether gradients are recorded": torch.is_grad_enabled(),
            "the default dtype": torch.get_default_dtype(),
        }

    assert case.first is not None
    given, before = copy.deepcopy(case.first.groups), around()
    outcome(trainer, case.problem, case.first, copied=False)
    for name, value in around().items():
        if value != before[name]:
            raise DisagreementError(case, f"{name} is not as it was before the updates", 1.0)
    old = [batch for group in given for share in group for batch in share]
    new = [batch for group in case.first.groups for share in group for batch in share]
    for one, other in zip(old, new, strict=True):
        for key, value in one.items():
            if key not in other or not torch.equal(value, other[key]):
                raise DisagreementError(case, f"the microbatch's {key} is not as it was given", 1.0)
    if not agree(trainer, case):
        raise DisagreementError(case, "the same run twice gives different bits", 0.0)
    return True


@st.composite
def _identity(draw: st.DrawFn, trainer: Trainer) -> Case:
    """A run with an update without tokens, or one that must be skipped, and a run without it."""
    abilities = trainer.abilities
    problem = draw(problems(abilities))
    size = draw(st.integers(1, abilities.ranks)) if abilities.uneven else 1
    at = draw(st.integers(0, size - 1))

    def on_ranks(microbatches: list[Batch], others: list[Batch]) -> list[list[Batch]]:
        return [microbatches if rank == at else others for rank in range(size)]

    before = [on_ranks(update, []) for update in draw(_updates(abilities))]
    batch = draw(_batches(abilities))
    one = on_ranks([batch], [])
    if abilities.skips and "y" in batch and draw(st.booleans()):
        spoilt = {**batch, "y": batch["y"].clone()}
        spoilt["y"][tuple(batch["w"].nonzero()[0])] = draw(
            st.sampled_from([float("nan"), float("inf")])
        )
        idle, how = on_ranks([spoilt], [batch]), "a target that is not finite"
    else:
        parts = [ignored_like(batch, abilities.task.ignored)] * draw(st.integers(0, 2))
        idle, how = (
            on_ranks(parts, []),
            f"an update of {len(parts)} microbatch{'' if len(parts) == 1 else 'es'} without tokens",
        )
    where = f" on rank {at} of {size}" if size > 1 else ""
    last = draw(st.booleans()) if before else False
    acts = [*before, idle] if last else [*before, idle, one]
    plain = before if last else [*before, one]
    first = Run(plain, "updates without it", size)
    reports = () if last else ("loss", "grad_norm", "num_tokens")
    return Case(
        problem, first, Run(acts, f"{how}{where}{'' if last else ', and one more'}", size), reports
    )


@st.composite
def _resumed(draw: st.DrawFn, trainer: Trainer) -> Case:
    """A run, and the same with saves and fresh starts between the updates."""
    abilities = trainer.abilities
    problem = draw(problems(abilities))
    updates = [[update] for update in draw(_updates(abilities))]
    updates.append([[draw(_batches(abilities))]])
    acts: list[Any] = []
    for update in updates:
        acts += ["restart", update] if draw(st.booleans()) else [update]
    acts += ["restart"] if len(acts) == len(updates) else []
    return Case(problem, Run(updates, "one run"), Run(acts, "saved and put back"), ())


@st.composite
def _switched(draw: st.DrawFn, trainer: Trainer) -> Case:
    """A run in two settings."""
    assert isinstance(trainer, Switchable)
    abilities = trainer.abilities
    problem = draw(problems(abilities))
    batch = draw(_batches(abilities, least_rows=2))
    cut = draw(_cut(batch, abilities.task))
    shares = draw(ranks(cut, abilities.ranks, uneven=abilities.uneven))
    group, how = _shared(batch, shares)
    one, other = draw(st.permutations([*trainer.settings]))[:2]
    run = Run([group], f"{how} in the setting {one!r}", len(group), one)
    return Case(problem, run, run._replace(how=f"in the setting {other!r}", setting=other))


def _needs(kind: Any, what: str) -> Callable[[Trainer], str]:
    return lambda trainer: "" if isinstance(trainer, kind) else what


def _weights_missing(trainer: Trainer) -> str:
    weights, task = trainer.abilities.weights, trainer.abilities.task
    return "its tokens have no weights" if weights == "mask" or task.vocabulary else ""


LAWS: dict[str, TrainerLaw] = {
    law.name: law
    for law in [
        TrainerLaw(
            "T0", "equation",
            "An update on one microbatch is a step of SGD by the gradient of Σ wᵢ ℓᵢ / Σ wᵢ.",
            _of_the_equation,
        ),
        TrainerLaw(
            "T1", "cut",
            "Any cut of the batch into microbatches gives the update of the one large batch.",
            _in_parts,
        ),
        TrainerLaw(
            "T2", "ranks",
            "Microbatches spread over ranks give every rank the update of one that holds them all.",
            _spread,
            lambda trainer: "" if trainer.abilities.ranks > 1 else "it runs on one rank",
        ),
        TrainerLaw(
            "T3", "order",
            "Rows, microbatches and ranks may stand in any order.",
            _reordered,
        ),
        TrainerLaw(
            "T4", "padding",
            "Ignored tokens, rows and microbatches change nothing.",
            _padded,
        ),
        TrainerLaw(
            "T5", "weights",
            "Scaling all weights changes nothing; a token of weight k counts as the token k times.",
            _weighted,
            _weights_missing,
        ),
        TrainerLaw(
            "T6", "purity",
            "The same start and data give the same bits; data and global state stay as they were.",
            _twice,
            claim=_pure,
        ),
        TrainerLaw(
            "T7", "identity",
            "An update without tokens, or one that is skipped, leaves everything as it was.",
            _identity,
        ),
        TrainerLaw(
            "T14", "repartition",
            "All of these at once: any group of the same rows gives the same update.",
            _regrouped,
        ),
        TrainerLaw(
            "T15", "randomness",
            "Cut, ranks, order and padding change nothing where elements are dropped, either.",
            lambda trainer: _regrouped(trainer, dropout=0.5),
            lambda trainer: "" if trainer.abilities.dropout else "its model drops nothing",
        ),
        TrainerLaw(
            "T16", "resume",
            "Saving, starting anew, loading and going on is never having stopped.",
            _resumed,
            _needs(Resumable, "it cannot be saved here"),
        ),
        TrainerLaw(
            "T17", "settings",
            "Its ways to do one thing agree.",
            _switched,
            _needs(Switchable, "it has one way"),
        ),
    ]
}  # fmt: skip
"""The laws, by their names."""
