"""Tests the theorems on a device that is not the CPU, where no step may wait for it.

The claims and their cases are those of the other files. CONTRIBUTING.md names those that cannot run on
lazy tensors. ``PURESTEP_DEVICE=cuda`` runs them on a real device.
"""

from dataclasses import replace
from typing import Any

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
    test_t10_transforms as t10,
    test_t13_donation as t13,
    test_t15_random as t15,
    test_t17_denominators as t17,
)
from support.devices import DEVICE_TYPE, ON_DEVICE, move_case
from support.strategies import StepCase
from support.theorem import PURESTEP, Theorem

# torch.utils.checkpoint asks for a module of torch that is called as the device, and there is no
# torch.lazy, which has no sparse tensors either. Experts ask which tokens they have.
EXCLUDED_PROGRAMS = {
    "lazy": {"checkpointed", "rematerialised", "sparse", "experts"},
    "cuda": {"experts"},
    "cpu": set[str](),
}[DEVICE_TYPE]


def exclude_programs(
    drawn: tuple[StepCase, list[str]],
) -> tuple[StepCase, list[str]]:
    """Keeps the programs that can run on the device, on one rank."""
    (case, setup, groups), names = drawn
    names = [name for name in names if name not in EXCLUDED_PROGRAMS]
    return (case, setup._replace(axis="one"), groups), names


def choose_keyed_loss(drawn: tuple[StepCase, Any]) -> tuple[StepCase, Any]:
    """Takes modules with checkpoints on one rank, and replaces modules on lazy tensors.

    The first call of a module needs addresses, which lazy tensors do not have.
    """
    (case, setup, groups), loss_fn = drawn
    if loss_fn is t15.by_checkpoints:
        setup = setup._replace(axis="one")
    if DEVICE_TYPE == "lazy":
        loss_fn = t15.by_hand
    return (case, setup, groups), loss_fn


PROGRAMS = replace(t01.programs, cases=t01.programs.cases.map(exclude_programs))
KEYED_DROPOUT = replace(
    t15.keyed_dropout, cases=t15.keyed_dropout.cases.map(choose_keyed_loss)
)

ON_THE_HOST = {
    "many_microbatches",
    "recomputation",
    "programs",
    "rank_terms",
    "ranks_within_bound",
    "traffic",
    "separate_ranks",
    "context_parallel",
    "donation",
    "any_denominator",
    "keyed_dropout",
}
"""Claims that need threads, thousands of operations or addresses; and claims that are added below."""
if DEVICE_TYPE == "lazy":
    # The first call of a module needs addresses.
    ON_THE_HOST.add("encoder_within_bound")


def theorems_of(module: Any) -> list[Theorem]:
    """Returns the theorems whose claims a module defines, except those in ``ON_THE_HOST``."""
    theorems = []
    for name, value in vars(module).items():
        if name in ON_THE_HOST or not isinstance(value, Theorem):
            continue
        if value.claim.__module__ == module.__name__:
            theorems.append(value)
    return theorems


WITHOUT_WAITS = [PROGRAMS, KEYED_DROPOUT]
for module in (t01, t02, t03, t04, t05, t06, t07, t10, t13, t15, t17):
    WITHOUT_WAITS += theorems_of(module)


@pytest.mark.parametrize(
    "theorem",
    [*WITHOUT_WAITS, t13.donation],
    ids=lambda theorem: f"{theorem.name} {theorem.claim.__name__}",
)
def test_holds_on_a_device(theorem: Theorem) -> None:
    """Checks that each claim holds, with no wait in any step.

    Steps of T13's ``donation`` may wait: foreign optimizers read there whether a step is taken.

    Each example of lazy tensors is traced, compiled and run, so there are fewer of them. Where a process has compiled
    thousands of graphs of lazy tensors, torch runs one that is of different tensors, now and then.
    """
    system = PURESTEP if theorem is t13.donation else ON_DEVICE
    test = theorem.test(system, move_case)
    max_examples = settings().max_examples
    if DEVICE_TYPE != "cuda":
        max_examples //= 16
    settings(max_examples=min(max_examples, 20))(test)()


# Lazy tensors have no forward mode, and no compiler takes them.
if DEVICE_TYPE != "lazy":

    @pytest.mark.parametrize("normalize", ["loss", "grads"])
    @pytest.mark.parametrize("recipe", t10.OPTIMIZERS)
    def test_t10_derivatives_at_zero_on_a_device(recipe: str, normalize: str) -> None:
        """Each optimizer, exactly at the minimum."""
        t10.check_derivatives_at_zero(recipe, normalize, move_case)

    @pytest.mark.parametrize(
        "check", [t10.check_compiled_derivative, t10.check_compiled_ranks]
    )
    def test_t10_compiles_on_a_device(check: Any) -> None:
        """As one graph, a step computes the same."""
        check(move_case)
