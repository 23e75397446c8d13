"""Theorems on a device that is not the CPU, where no step may wait for it.

The claims and their cases are those of the other files. What cannot run on lazy tensors is named in
CONTRIBUTING.md. ``PURESTEP_DEVICE=cuda`` runs them on a real device.
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
from proofs.devices import DEVICE_TYPE, ON_DEVICE, moved
from proofs.strategies import Drawn
from proofs.theorem import PURESTEP, Theorem

# torch.utils.checkpoint asks for a module of torch that is called as the device, and there is no
# torch.lazy, which has no sparse tensors either. Experts ask which tokens they have.
EXCLUDED_PROGRAMS = {
    "lazy": {"checkpointed", "rematerialised", "sparse", "experts"},
    "cuda": {"experts"},
    "cpu": set[str](),
}[DEVICE_TYPE]


def lazily(drawn: tuple[Drawn, list[str]]) -> tuple[Drawn, list[str]]:
    """On one rank, of those that can run there."""
    (case, how, groups), names = drawn
    names = [name for name in names if name not in EXCLUDED_PROGRAMS]
    return (case, how._replace(axis="one"), groups), names


def keyed_on_a_device(drawn: tuple[Drawn, Any]) -> tuple[Drawn, Any]:
    """Modules with checkpoints on one rank. The first call of a module asks lazy tensors for addresses."""
    (case, how, groups), loss_fn = drawn
    if loss_fn is t15.by_checkpoints:
        how = how._replace(axis="one")
    return (case, how, groups), t15.by_hand if DEVICE_TYPE == "lazy" else loss_fn


PROGRAMS = replace(t01.programs, cases=t01.programs.cases.map(lazily))
KEYED_DROPOUT = replace(
    t15.keyed_dropout, cases=t15.keyed_dropout.cases.map(keyed_on_a_device)
)

ON_THE_HOST = {
    "many_microbatches", "recomputation", "programs", "rank_terms", "ranks_within_bound", "traffic",
    "separate_ranks", "context_parallel", "donation", "any_denominator", "keyed_dropout",
}  # fmt: skip
"""What needs threads, thousands of operations or addresses; and what is looked at below."""
if DEVICE_TYPE == "lazy":
    ON_THE_HOST |= {
        "encoder_within_bound"
    }  # The first call of a module asks for addresses.
UNWAITED = [PROGRAMS, KEYED_DROPOUT] + [
    one
    for module in (t01, t02, t03, t04, t05, t06, t07, t10, t13, t15, t17)
    for name, one in vars(module).items()
    if isinstance(one, Theorem) and one.claim.__module__ == module.__name__
    if name not in ON_THE_HOST
]


@pytest.mark.parametrize(
    "theorem",
    [*UNWAITED, t13.donation],
    ids=lambda one: f"{one.name} {one.claim.__name__}",
)
def test_holds_on_a_device(theorem: Theorem) -> None:
    """The claim, with no wait in any step; but for optimizers of other people's, where the host reads whether it is taken.

    Each example of lazy tensors is traced, compiled and run, so there are fewer of them. Where a process has compiled
    thousands of graphs of lazy tensors, torch runs one that is of different tensors, now and then.
    """
    test = theorem.test(PURESTEP if theorem is t13.donation else ON_DEVICE, moved)
    fewer = 1 if DEVICE_TYPE == "cuda" else 6
    settings(max_examples=min(settings().max_examples // fewer, 20))(test)()


# Lazy tensors have no forward mode, and no compiler takes them.
if DEVICE_TYPE != "lazy":

    @pytest.mark.parametrize("normalize", ["loss", "grads"])
    @pytest.mark.parametrize("recipe", t10.OPTIMIZERS)
    def test_t10_derivatives_at_zero_on_a_device(recipe: str, normalize: str) -> None:
        """Each optimizer, exactly at the minimum."""
        t10.check_derivatives_at_zero(recipe, normalize, moved)

    @pytest.mark.parametrize(
        "check", [t10.check_compiled_derivative, t10.check_compiled_ranks]
    )
    def test_t10_compiles_on_a_device(check: Any) -> None:
        """As one graph, a step computes the same."""
        check(moved)
