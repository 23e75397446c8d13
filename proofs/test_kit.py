"""The kit sees every bug that a black box can show, in a loop by hand.

It accepts the loop without the bug, and purestep.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import purestep as ps
from benchmarks import kit
from benchmarks.conformance import with_purestep
from proofs.plain_loop import PlainLoop
from proofs.plain_mutants import BUGS, UNSEEN, Bug, build
from purestep.testing import LAWS, Abilities, Problem

SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "grads": {"normalize": "grads"},
    "donated": {"donate": True},
    "sums in float64": {"accum_dtype": torch.float64},
    "torch.func": {"grad_and_value": torch.func.grad_and_value},
}


class Purestep(ps.testing.PureTrainer):
    """An update step on a module as it comes, in any of its settings."""

    def __init__(self) -> None:
        self._setting = "as it is"
        super().__init__(self._made, Abilities(ranks=3, dropout=True, skips=True))

    @property
    def settings(self) -> list[str]:
        """What makes no difference."""
        return [*SETTINGS]

    def use(self, setting: str) -> None:
        """From the next start on."""
        self._setting = setting

    def _made(self, problem: Problem, axis: ps.Axis) -> tuple[Any, Any, Any]:
        return with_purestep.make(
            problem, axis, on_nonfinite="skip", **SETTINGS[self._setting]
        )


class PurestepRank(with_purestep.Rank):
    """The same on one rank of a gloo group."""

    def start(self, problem: Problem) -> None:
        """A mesh of all processes."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        self._params, self._state, self._step = with_purestep.make(
            problem, ps.MeshAxis(mesh, "dp"), on_nonfinite="skip"
        )
        self._metrics: Any = None


test_purestep_on_processes = ps.testing.laws(
    lambda: ps.testing.Processes(
        PurestepRank, Abilities(ranks=3, dropout=True, skips=True)
    ),
    ["T2", "T3", "T7", "T14", "T15"],
    cases=6,
)
test_purestep = ps.testing.laws(Purestep, cases=20)
test_plain_loop = ps.testing.laws(
    PlainLoop, [name for name in LAWS if name != "T17"], cases=20
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.number)
def test_bug_is_found(bug: Bug) -> None:
    """By the law that it breaks."""
    (verdict,) = ps.testing.judge(build(bug), [bug.law], cases=60, shrink=0)
    assert verdict.finding == ("refuses" if bug.number == "38" else "wrong"), verdict


@pytest.mark.parametrize("number", range(len(kit.LOOPS)))
def test_what_shows_in_few_cases_alone_is_found(number: int) -> None:
    """With no more cases than by default."""
    law = kit.LOOPS[number][0]
    cases = 45 if law == "T6" else 100  # T6 goes on to its other parts.
    (verdict,) = ps.testing.judge(kit.of(number), [law], cases=cases, shrink=0)
    assert verdict.finding == "wrong", verdict


@pytest.mark.parametrize("name", kit.RIGHT)
def test_no_false_alarm(name: str) -> None:
    """About loops of other kinds."""
    ps.testing.check(kit.RIGHT[name](), cases=8)


def test_catalogue_is_complete() -> None:
    """Every bug that happened is put into the loop, or there is a reason why it cannot be seen."""
    put_in = {int(bug.number.rstrip("ab")) for bug in BUGS}
    assert put_in | {*UNSEEN} == {*range(1, 54)}
    assert not put_in & {*UNSEEN}
