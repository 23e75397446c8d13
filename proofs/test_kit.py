"""Tests that the kit finds every bug that a black box can show, in a loop by hand.

It accepts the loop without the bug, and purestep.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch.distributed.device_mesh import init_device_mesh

import purestep as ps
from benchmarks.mistakes import kit, right_optimizers, right_trainers
from benchmarks.mistakes.mistake import Mistake, build_trainer
from benchmarks.trainers import with_purestep
from proofs.mutants import UNSEEN
from proofs.plain_mutants import BUGS, Bug, build
from purestep.testing import LAWS, Capabilities, Problem
from support.plain_loop import PlainLoop

SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "grads": {"normalize": "grads"},
    "donated": {"donate": True},
    "sums in float64": {"accum_dtype": torch.float64},
    "torch.func": {"grad_and_value": torch.func.grad_and_value},
}


ABILITIES = Capabilities(ranks=3, dropout=True, skips_nonfinite=True)


class Purestep(ps.testing.PureTrainer):
    """Trains a module as it comes by an update step, in any of its settings."""

    def __init__(self) -> None:
        self._setting = "as it is"
        super().__init__(self._make, ABILITIES)

    @property
    def settings(self) -> list[str]:
        """Lists settings that make no difference."""
        return [*SETTINGS]

    def select_setting(self, setting: str) -> None:
        """Selects a setting, from the next start on."""
        self._setting = setting

    def _make(self, problem: Problem, axis: ps.Axis) -> tuple[Any, Any, Any]:
        settings = SETTINGS[self._setting]
        return with_purestep.make(problem, axis, on_nonfinite="skip", **settings)


class PurestepRank(with_purestep.Rank):
    """Trains the same on one rank of a gloo group."""

    def start(self, problem: Problem) -> None:
        """Begins anew, on a mesh of all processes."""
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
        self._params, self._state, self._step = with_purestep.make(
            problem, ps.MeshAxis(mesh, "dp"), on_nonfinite="skip"
        )
        self._metrics: Any = None


test_purestep_on_processes = ps.testing.law_tests(
    lambda: ps.testing.Processes(PurestepRank, ABILITIES),
    ["T2", "T3", "T7", "T14", "T15"],
    cases=4,
)
test_purestep = ps.testing.law_tests(Purestep, cases=14)
test_plain_loop = ps.testing.law_tests(
    PlainLoop,
    # The loop has no settings, of which T17 is.
    [name for name in LAWS if name != "T17"],
    cases=14,
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.number)
def test_bug_is_found(bug: Bug) -> None:
    """The law that it breaks finds a bug."""
    (verdict,) = ps.testing.run_laws(build(bug), [bug.law], cases=60, shrink=0)
    # Bug 38 is a hang, which the loop reports as an error.
    expected = "refuses" if bug.number == "38" else "wrong"
    assert verdict.status == expected, verdict


@pytest.mark.parametrize("mistake", kit.REQUIRED, ids=lambda mistake: mistake.name)
def test_what_shows_in_few_cases_alone_is_found(mistake: Mistake) -> None:
    """No more cases than by default are needed."""
    # A case of T6 costs more: it has several parts.
    cases = 45 if mistake.law == "T6" else 100
    (verdict,) = ps.testing.run_laws(
        build_trainer(mistake), [mistake.law], cases=cases, shrink=0
    )
    assert verdict.status == "wrong", verdict


def test_every_mistake_is_planted_once() -> None:
    """The words that a mistake replaces occur in its loop, and no two give the same loop."""
    edits = {(mistake.base, str(mistake.edits)) for mistake in kit.MISTAKES}
    names = {(mistake.base, mistake.name) for mistake in kit.MISTAKES}
    assert len(edits) == len(names) == len(kit.MISTAKES)
    for mistake in kit.MISTAKES:
        build_trainer(mistake)


@pytest.mark.parametrize("name", kit.RIGHT)
def test_no_false_alarm(name: str) -> None:
    """Right loops of other kinds are accepted."""
    ps.testing.check(kit.RIGHT[name](), cases=5)


@pytest.mark.parametrize("name", right_trainers.RIGHT)
def test_no_false_alarm_in_any_style(name: str) -> None:
    """Right trainers are accepted, whatever their code, their schedule and their optimizer."""
    ps.testing.check(right_trainers.RIGHT[name](), cases=settings().max_examples // 5)


@pytest.mark.parametrize("make", [right_optimizers.Lion, right_optimizers.Float32Lamb])
def test_a_gradient_that_is_zero_but_for_rounding_is_no_mistake(make: Any) -> None:
    """Nudges of a start may move two signs of Lion apart, and end LAMB's rule for a norm of 0."""
    (verdict,) = ps.testing.run_laws(make(), ["T4"], seed=20291, shrink=0)
    assert verdict.status == "holds", verdict


def test_catalogue_is_complete() -> None:
    """Every bug that happened is put into the loop, or there is a reason why it cannot be seen."""
    planted = {int(bug.number.rstrip("ab")) for bug in BUGS}
    unseen = {*UNSEEN}
    assert planted | unseen == {*range(1, 54)}
    assert not planted & unseen
