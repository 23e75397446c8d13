"""The laws of gradient accumulation, as data: each draws two ways to write the same training.

They are the theorems that purestep's own proofs are about, put to a trainer that is a black box.
"""

import copy
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from purestep.testing.case import Case, DisagreementError, Run, agree, outcome
from purestep.testing.problem import Batch, Problem, Task
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
        cases: what is drawn, for a trainer of these abilities; its docstring states the law.
        missing: why the law is not put to a trainer; empty: it is.
        claim: whether two runs agree to the bit; ``DisagreementError`` where they do not agree.
    """

    name: str
    title: str
    cases: Callable[[Trainer], SearchStrategy[Case]]
    missing: Callable[[Trainer], str] = lambda trainer: ""
    claim: Callable[[Trainer, Case], bool] = agree

    @property
    def statement(self) -> str:
        """The law in a sentence."""
        return inspect.cleandoc(self.cases.__doc__ or "")


def _batches(abilities: Abilities, kind: Any = None, **more: Any) -> SearchStrategy[Batch]:
    """Sums that are a power of two hide in which dtype they divide: others are drawn, too."""
    kind = kind or abilities.weights

    def some(exact: bool) -> SearchStrategy[Batch]:
        return exact_batches(abilities.task, kind=kind, exact=exact, dtype=abilities.dtype, **more)

    return st.booleans().flatmap(lambda inexact: some(not inexact))


@st.composite
def _cut(draw: st.DrawFn, batch: Batch, task: Task) -> Cut:
    """Each microbatch has tokens; those without are T4's and T7's."""

    def counts(rows: list[int]) -> bool:
        return bool(task.weights(taken(batch, rows)).any())

    cut: Cut = []
    for rows in draw(cuts(len(next(iter(batch.values()))), empty=False)):
        if cut and not (counts(cut[-1]) and counts(rows)):
            cut[-1] += rows
        else:
            cut.append(rows)
    return cut


@st.composite
def _drawn(
    draw: st.DrawFn, abilities: Abilities, least_rows: int = 1
) -> tuple[Problem, Batch, Cut]:
    """A problem, rows to learn from, and a cut of them."""
    problem = draw(problems(abilities))
    batch = draw(_batches(abilities, least_rows=least_rows))
    return problem, batch, draw(_cut(batch, abilities.task))


@st.composite
def _updates(draw: st.DrawFn, abilities: Abilities, microbatches: int = 2) -> list[list[Batch]]:
    """Earlier updates on one rank; of a model that is no polynomial, none."""
    if abilities.task.model is not None:
        return []
    group = st.lists(_batches(abilities, most_rows=2), min_size=1, max_size=microbatches)
    return draw(st.lists(group, max_size=2))


def _ranks(abilities: Abilities, cut: Cut) -> SearchStrategy[list[Cut]]:
    """The microbatches over as many ranks as the trainer has."""
    return ranks(cut, abilities.ranks, uneven=abilities.uneven)


def _run(batch: Batch, *shares: Cut, before: Sequence[list[Batch]] = ()) -> Run:
    """A run whose last update is on these rows of the batch on each rank."""
    group = [[taken(batch, rows) for rows in share] for share in shares]
    words = [f"rows {' | '.join(map(str, share))}" if share else "nothing" for share in shares]
    if len(shares) > 1:
        words = [f"{said} on rank {rank}" for rank, said in enumerate(words)]
    return Run([*[[update] for update in before], group], ", ".join(words), len(shares))


def _whole(batch: Batch, before: Sequence[list[Batch]] = ()) -> Run:
    """A run whose last update is on all rows at once."""
    return Run([*[[update] for update in before], [[batch]]], "one microbatch of all rows")


@st.composite
def _of_the_equation(draw: st.DrawFn, trainer: Trainer) -> Case:
    """An update on one microbatch is a step of SGD by the gradient of Σ wᵢ ℓᵢ / Σ wᵢ."""
    problem, batch, _ = draw(_drawn(trainer.abilities))
    before = draw(_updates(trainer.abilities, microbatches=1))
    return Case(problem, None, _whole(batch, before))


@st.composite
def _in_parts(draw: st.DrawFn, trainer: Trainer) -> Case:
    """Any cut of the batch into microbatches gives the update of the one large batch."""
    problem, batch, cut = draw(_drawn(trainer.abilities, 2))
    before = draw(_updates(trainer.abilities))
    return Case(problem, _whole(batch, before), _run(batch, cut, before=before))


@st.composite
def _spread(draw: st.DrawFn, trainer: Trainer) -> Case:
    """Microbatches spread over ranks give every rank the update of one that holds them all."""
    problem, batch, cut = draw(_drawn(trainer.abilities, 2))
    shares = draw(_ranks(trainer.abilities, cut))
    return Case(problem, _run(batch, cut), _run(batch, *shares))


@st.composite
def _reordered(draw: st.DrawFn, trainer: Trainer) -> Case:
    """Rows, microbatches and ranks may stand in any order."""
    problem, batch, cut = draw(_drawn(trainer.abilities, 2))
    shares = draw(_ranks(trainer.abilities, cut))
    other = [draw(orders(share)) for share in draw(st.permutations(shares))]
    return Case(problem, _run(batch, *shares), _run(batch, *other))


@st.composite
def _padded(draw: st.DrawFn, trainer: Trainer) -> Case:
    """Ignored tokens, rows and microbatches change nothing."""
    problem, batch, cut = draw(_drawn(trainer.abilities))
    parts, names = [taken(batch, rows) for rows in cut], [str(rows) for rows in cut]
    group, how = draw(padded_group(parts, names, trainer.abilities.task))
    return Case(problem, _run(batch, cut), Run([[group]], how))


@st.composite
def _regrouped(draw: st.DrawFn, trainer: Trainer, dropout: float = 0.0) -> Case:
    """All of these at once: any group of the same rows gives the same update."""
    abilities = trainer.abilities
    problem = draw(problems(abilities, dropout=dropout))
    batch = draw(_batches(abilities, keyed=dropout > 0, least_rows=2))
    group, how = draw(
        regrouped(batch, abilities.task, most_ranks=abilities.ranks, uneven=abilities.uneven)
    )
    return Case(problem, _whole(batch), Run([group], how, len(group)))


def _dropped(trainer: Trainer) -> SearchStrategy[Case]:
    """Cut, ranks, order and padding change nothing where elements are dropped, either."""
    return _regrouped(trainer, dropout=0.5)


@st.composite
def _weighted(draw: st.DrawFn, trainer: Trainer) -> Case:
    """Scaling all weights changes nothing; a token of weight k counts as the token k times."""
    abilities = trainer.abilities
    problem, batch = draw(problems(abilities)), draw(_batches(abilities, kind="whole"))
    if abilities.weights == "any" and draw(st.booleans()):
        scale = 2.0 ** draw(st.integers(-4, 4))
        batch = {**batch, "w": batch["w"].to(abilities.dtype)}
        scaled = Run([[[{**batch, "w": batch["w"] * scale}]]], f"the weights times {scale}")
        return Case(problem, _whole(batch), scaled, scale=scale)
    times = batch["w"].flatten().to(torch.int64)
    repeated = {
        key: value.flatten(0, 1).repeat_interleave(times, dim=0).unsqueeze(1)
        for key, value in batch.items()
    }
    repeated["w"] = torch.ones_like(repeated["w"])
    return Case(
        problem, _whole(batch), Run([[[repeated]]], "each token as often as its weight says")
    )


@st.composite
def _twice(draw: st.DrawFn, trainer: Trainer) -> Case:
    """The same start and data give the same bits; data and global state stay as they were."""
    problem, batch, cut = draw(_drawn(trainer.abilities))
    run = _run(batch, cut, before=draw(_updates(trainer.abilities)))
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
    """An update without tokens, or one that is skipped, leaves everything as it was."""
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
        value = draw(st.sampled_from([float("nan"), float("inf")]))
        spoilt["y"][tuple(batch["w"].nonzero()[0])] = value
        idle, how = on_ranks([spoilt], [batch]), "a target that is not finite"
    else:
        parts = [ignored_like(batch, abilities.task.ignored)] * draw(st.integers(0, 2))
        idle, how = on_ranks(parts, []), f"an update of {len(parts)} microbatches without tokens"
    where = f" on rank {at} of {size}" if size > 1 else ""
    last = draw(st.booleans()) if before else False
    after = [] if last else [one]
    first = Run([*before, *after], "updates without it", size)
    reports = () if last else Case.reports
    how += where if last else f"{where}, and one more"
    return Case(problem, first, Run([*before, idle, *after], how, size), reports)


@st.composite
def _resumed(draw: st.DrawFn, trainer: Trainer) -> Case:
    """Saving, starting anew, loading and going on is never having stopped."""
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
    """Its ways to do one thing agree."""
    assert isinstance(trainer, Switchable)
    problem, batch, cut = draw(_drawn(trainer.abilities, 2))
    run = _run(batch, *draw(_ranks(trainer.abilities, cut)))
    one, other = draw(st.permutations([*trainer.settings]))[:2]
    first = run._replace(how=f"{run.how} in the setting {one!r}", setting=one)
    return Case(problem, first, run._replace(how=f"in the setting {other!r}", setting=other))


def _needs(kind: Any, what: str) -> Callable[[Trainer], str]:
    return lambda trainer: "" if isinstance(trainer, kind) else what


def _one_rank(trainer: Trainer) -> str:
    return "" if trainer.abilities.ranks > 1 else "it runs on one rank"


def _no_weights(trainer: Trainer) -> str:
    weights, task = trainer.abilities.weights, trainer.abilities.task
    return "its tokens have no weights" if weights == "mask" or task.vocabulary else ""


def _no_dropout(trainer: Trainer) -> str:
    return "" if trainer.abilities.dropout else "its model drops nothing"


LAWS: dict[str, TrainerLaw] = {
    law.name: law
    for law in [
        TrainerLaw("T0", "equation", _of_the_equation),
        TrainerLaw("T1", "cut", _in_parts),
        TrainerLaw("T2", "ranks", _spread, _one_rank),
        TrainerLaw("T3", "order", _reordered),
        TrainerLaw("T4", "padding", _padded),
        TrainerLaw("T5", "weights", _weighted, _no_weights),
        TrainerLaw("T6", "purity", _twice, claim=_pure),
        TrainerLaw("T7", "identity", _identity),
        TrainerLaw("T14", "repartition", _regrouped),
        TrainerLaw("T15", "randomness", _dropped, _no_dropout),
        TrainerLaw("T16", "resume", _resumed, _needs(Resumable, "it cannot be saved here")),
        TrainerLaw("T17", "settings", _switched, _needs(Switchable, "it has one way")),
    ]
}
"""The laws, by their names."""
