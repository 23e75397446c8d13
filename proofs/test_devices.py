"""Theorems on a device that is not the CPU, where no step may wait for it.

The claims and their cases are those of the other files. What cannot run on lazy tensors is named in
CONTRIBUTING.md.
"""

from dataclasses import replace

import pytest
from hypothesis import settings

from proofs import (
    test_t01_cut as t01,
    test_t02_ranks as t02,
    test_t03_order as t03,
    test_t04_padding as t04,
    test_t05_weights as t05,
    test_t06_purity as t06,
    test_t07_identity as t07,
    test_t13_donation as t13,
    test_t17_denominators as t17,
)
from proofs.devices import ON_DEVICE, moved
from proofs.strategies import Drawn
from proofs.theorem import PURESTEP, Theorem

# torch.utils.checkpoint asks for a module of torch that is called as the device, and there is no
# torch.lazy, which has no sparse tensors either. Experts ask which tokens they have.
NOT_LAZY = {"checkpointed", "rematerialised", "sparse", "experts"}


def lazily(drawn: tuple[Drawn, list[str]]) -> tuple[Drawn, list[str]]:
    """On one rank, of those that can run there."""
    (case, how, groups), names = drawn
    return (case, how._replace(axis="one"), groups), [*{*names} - NOT_LAZY]


PROGRAMS = replace(t01.programs, cases=t01.programs.cases.map(lazily))

UNWAITED = [
    t01.cut_invariance,
    t01.terms,
    t01.cut_within_bound,
    PROGRAMS,
    t01.unreached,
    t02.rank_invariance,
    t03.order_invariance,
    t04.padding_invariance,
    t04.nan_at_weight_zero,
    t05.scale_invariance,
    t05.repetition,
    t05.counted_once,
    t06.inputs_untouched,
    t06.no_memory,
    t06.grad_untouched,
    t07.no_tokens,
    t07.nonfinite,
    t07.as_if_it_never_was,
    t07.ensembles,
    t13.overlaps,
    t17.denominators,
]


def holds(theorem: Theorem, *, waits: bool = False) -> None:
    """Each example is traced, compiled and run, so there are fewer of them.

    Where a process has compiled thousands of graphs of lazy tensors, torch runs one that is of different tensors, now and then.
    """
    test = theorem.test(PURESTEP if waits else ON_DEVICE, moved)
    settings(max_examples=min(settings().max_examples // 6, 20))(test)()


@pytest.mark.parametrize("theorem", UNWAITED, ids=lambda one: f"{one.name} {one.claim.__name__}")
def test_holds_on_a_device(theorem: Theorem) -> None:
    """The claim, with no wait in any step."""
    holds(theorem)


def test_donation_holds_on_a_device() -> None:
    """It tries optimizers of other people's too, for which the host reads whether a step is taken."""
    holds(t13.donation, waits=True)
