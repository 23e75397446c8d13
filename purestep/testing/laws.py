"""The laws of gradient accumulation, as data: each draws two ways to write the same training.

They are the theorems that purestep's own proofs are about, put to a trainer that is a black box.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from purestep.testing.case import Case, DisagreementError, Run, agree
from purestep.testing.problem import Batch
from purestep.testing.strategies import (
    exact_batches,
    ignored_like,
    problems,
    regrouped,
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
        claim: raises ``DisagreementError`` where two runs do not agree; else whether they agree to the bit.
    """

    name: str
    title: str
    statement: str
    cases: Callable[[Trainer], SearchStrategy[Case]]
    missing: Callable[[Trainer], str] = lambda trainer: ""
    claim: Callable[[Trainer, Case], bool] = agree


def _batches(abilities: Abilities, kind: Any = None, **more: Any) -> SearchStrategy[Batch]:
    return exact_batches(
        abilities.task, kind=kind or abilities.weights, dtype=abilities.dtype, **more
    )


@st.composite
def _updates(draw: st.DrawFn, abilities: Abilities) -> list[list[Batch]]:
    """Some updates on one rank, of one or several microbatches; of what is no polynomial, none."""
    if abilities.task.model is not None:
        return []
    return draw(
        st.lists(st.lists(_batches(abilities, most_rows=2), min_size=1, max_size=2), max_size=2)
    )


def _one(batch: Batch) -> list[list[Batch]]:
    return [[batch]]


def _after(updates: list[list[Batch]]) -> str:
    return f"after {len(updates)} update{'s' if len(updates) > 1 else ''}, " if updates else ""


def _same_batch(
    *, cut: bool = False, ranks: bool = False, order: bool = False, pad: bool = False
) -> Callable[[Trainer], SearchStrategy[Case]]:
    """The whole batch as one microbatch of one rank, and the same rows grouped in these respects differently."""

    @st.composite
    def cases(draw: st.DrawFn, abilities: Abilities, keyed: bool = False) -> Case:
        problem = draw(problems(abilities, dropout=0.5 if keyed else 0.0))
        before = draw(_updates(abilities)) if not keyed else []
        batch = draw(_batches(abilities, keyed=keyed))
        group, how = draw(
            regrouped(
                batch,
                abilities.task,
                cut=cut or ranks or order,
                most_ranks=abilities.ranks if ranks else 1,
                uneven=abilities.uneven,
                order=order,
                pad=pad,
            )
        )
        earlier = [[update] for update in before]
        spread = [[update, *[[] for _ in group[1:]]] for update in before]
        if not abilities.uneven and len(group) > 1:
            earlier, spread, before = [], [], []
        first = Run([*earlier, _one(batch)], f"{_after(before)}one microbatch of all rows")
        return Case(problem, first, Run([*spread, group], how, len(group)))

    return lambda trainer: cases(trainer.abilities)


def _keyed(trainer: Trainer) -> SearchStrategy[Case]:
    """Any group, in which elements are dropped."""

    @st.composite
    def cases(draw: st.DrawFn) -> Case:
        abilities = trainer.abilities
        problem = draw(problems(abilities, dropout=0.5))
        batch = draw(_batches(abilities, keyed=True))
        group, how = draw(
            regrouped(batch, abilities.task, most_ranks=abilities.ranks, uneven=abilities.uneven)
        )
        first = Run([_one(batch)], "one microbatch of all rows")
        return Case(problem, first, Run([group], how, len(group)))

    return cases()


@st.composite
def _of_the_equation(draw: st.DrawFn, trainer: Trainer) -> Case:
    abilities = trainer.abilities
    problem = draw(problems(abilities))
    before = draw(_updates(abilities))
    batch = draw(_batches(abilities))
    said = f"{_after(before)}one microbatch of all rows"
    return Case(problem, None, Run([*[[update] for update in before], _one(batch)], said))


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
        return Case(problem, Run([_one(first)], "weights"), Run([_one(second)], how), scale=scale)
    times = batch["w"].flatten().to(torch.int64)
    repeated = {
        key: value.flatten(0, 1).repeat_interleave(times, dim=0).unsqueeze(1)
        for key, value in batch.items()
    }
    repeated["w"] = torch.ones_like(repeated["w"])
    first_run = Run([_one(batch)], "whole weights")
    return Case(problem, first_run, Run([_one(repeated)], "each token as often as its weight says"))


@st.composite
def _twice(draw: st.DrawFn, trainer: Trainer) -> Case:
    """A run, and the same run again."""
    abilities = trainer.abilities
    problem = draw(problems(abilities))
    group, how = draw(regrouped(draw(_batches(abilities)), abilities.task, order=False, pad=False))
    run = Run([*[[update] for update in draw(_updates(abilities))], group], how)
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
    bits = agree(trainer, case)
    for name, value in around().items():
        if value != before[name]:
            raise DisagreementError(case, f"{name} is not as it was before the updates", 1.0)
    for kept, group in zip(given, case.first.groups, strict=True):
        for old_share, share in zip(kept, group, strict=True):
            for old, batch in zip(old_share, share, strict=True):
                for key, value in old.items():
                    if key not in batch or not torch.equal(value, batch[key]):
                        raise DisagreementError(
                            case, f"the microbatch's {key} is not as it was given", 1.0
                        )
    if not bits:
        raise DisagreementError(case, "the same run twice gives different bits", 0.0)
    return bits


@st.composite
def _identity(draw: st.DrawFn, trainer: Trainer) -> Case:
    """An update without tokens in the middle, or one that must be skipped; and a run in which it never was."""
    abilities = trainer.abilities
    problem = draw(problems(abilities))
    before = [[update] for update in draw(_updates(abilities))]
    batch = draw(_batches(abilities))
    if abilities.skips and draw(st.booleans()):
        spoilt = {**batch, "y": batch["y"].clone()}
        spoilt["y"][tuple(batch["w"].nonzero()[0])] = draw(
            st.sampled_from([float("nan"), float("inf")])
        )
        idle, how = [[spoilt]], "a target that is not finite"
    else:
        parts = [ignored_like(batch, abilities.task.ignored)] * draw(st.integers(0, 2))
        idle, how = [parts], f"an update of {len(parts)} microbatches without tokens"
    last = draw(st.booleans())
    acts = [*before, idle] if last else [*before, idle, _one(batch)]
    plain = before if last else [*before, _one(batch)]
    first = Run(plain, "updates without it")
    reports = () if last else ("loss", "grad_norm", "num_tokens")
    return Case(problem, first, Run(acts, f"{how}{'' if last else ', and one more'}"), reports)


@st.composite
def _resumed(draw: st.DrawFn, trainer: Trainer) -> Case:
    """A run, and the same with saves and fresh starts between the updates."""
    abilities = trainer.abilities
    problem = draw(problems(abilities))
    updates = [[update] for update in draw(_updates(abilities))]
    updates.append(_one(draw(_batches(abilities))))
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
    group, how = draw(
        regrouped(
            draw(_batches(abilities)),
            abilities.task,
            most_ranks=abilities.ranks,
            uneven=abilities.uneven,
        )
    )
    one, other = draw(st.permutations([*trainer.settings]))[:2]
    run = Run([group], f"{how} in the setting {one!r}", len(group), one)
    return Case(problem, run, run._replace(how=f"in the setting {other!r}", setting=other))


def _needs(kind: Any, what: str) -> Callable[[Trainer], str]:
    return lambda trainer: "" if isinstance(trainer, kind) else what


def _weights_missing(trainer: Trainer) -> str:
    return "its tokens have no weights" if trainer.abilities.weights == "mask" else ""


LAWS: dict[str, TrainerLaw] = {
    law.name: law
    for law in [
        TrainerLaw(
            "T0", "equation",
            "An update on one microbatch is a step of SGD by the gradient of Σ wᵢ ℓᵢ / Σ wᵢ.",
            lambda trainer: _of_the_equation(trainer),
        ),
        TrainerLaw(
            "T1", "cut",
            "Any cut of the batch into microbatches gives the update of the one large batch.",
            _same_batch(cut=True),
        ),
        TrainerLaw(
            "T2", "ranks",
            "Any way to spread the microbatches over ranks gives that update, on every rank.",
            _same_batch(ranks=True),
            lambda trainer: "" if trainer.abilities.ranks > 1 else "it runs on one rank",
        ),
        TrainerLaw(
            "T3", "order",
            "Rows, microbatches and ranks may stand in any order.",
            _same_batch(order=True),
        ),
        TrainerLaw(
            "T4", "padding",
            "Ignored tokens, rows and microbatches change nothing.",
            _same_batch(cut=True, pad=True),
        ),
        TrainerLaw(
            "T5", "weights",
            "Scaling all weights changes nothing; a token of weight k counts as the token k times.",
            lambda trainer: _weighted(trainer),
            _weights_missing,
        ),
        TrainerLaw(
            "T6", "purity",
            "The same start and data give the same bits; data and the program's global state stay as they were.",
            lambda trainer: _twice(trainer),
            claim=_pure,
        ),
        TrainerLaw(
            "T7", "identity",
            "An update without tokens, or one that is skipped, leaves everything as if it had never been.",
            lambda trainer: _identity(trainer),
        ),
        TrainerLaw(
            "T14", "repartition",
            "All of these at once: any group of the same rows gives the same update.",
            _same_batch(cut=True, ranks=True, order=True, pad=True),
        ),
        TrainerLaw(
            "T15", "randomness",
            "Where elements are dropped, the cut, the ranks, the order and the padding still change nothing.",
            _keyed,
            lambda trainer: "" if trainer.abilities.dropout else "its model drops nothing",
        ),
        TrainerLaw(
            "T16", "resume",
            "Saving, starting anew, loading and going on is never having stopped.",
            lambda trainer: _resumed(trainer),
            _needs(Resumable, "it cannot be saved here"),
        ),
        TrainerLaw(
            "T17", "settings",
            "Its ways to do one thing agree.",
            lambda trainer: _switched(trainer),
            _needs(Switchable, "it has one way"),
        ),
    ]
}  # fmt: skip
"""The laws, by their names."""
