"""Trainers to be judged: a pure step, a loop of torch's, and programs in several processes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

from torch import nn

from purestep.axis import Axis, LocalAxis
from purestep.testing.problem import Batch, Problem
from purestep.testing.processes import World, values
from purestep.testing.threads import ThreadAxis
from purestep.testing.trainer import Abilities, Group, Observation
from purestep.testing.watch import Watch

Step: TypeAlias = Callable[..., Any]
MakeStep: TypeAlias = Callable[[Problem, Axis], tuple[Any, Any, Step]]
"""``make(problem, axis)`` returns params, optimizer state and a pure step:
``(params, state, microbatches) -> (params, state, metrics)``."""


class PureTrainer:
    """A pure step, whose ranks are threads. Params have the names of the problem's module.

    >>> import purestep as ps
    >>> def make(problem, axis):
    ...     params, apply = ps.from_module(problem.module())
    ...     loss_fn = lambda params, batch: problem.losses(lambda x: apply(params, x), batch)
    ...     optimizer = ps.optim.sgd(problem.learning_rate)
    ...     step = ps.make_update_step(loss_fn, optimizer, weight_fn=problem.weights, axis=axis)
    ...     return params, optimizer.init(params), step
    >>> ps.testing.check(PureTrainer(make, Abilities(ranks=3)), ["T2"], cases=10)
    """

    def __init__(self, make: MakeStep, abilities: Abilities) -> None:
        self.make, self.abilities = make, abilities

    def start(self, problem: Problem, ranks: int) -> None:
        """Makes the step."""
        self._axis: Any = ThreadAxis(ranks) if ranks > 1 else LocalAxis()
        made = [self.make(problem, self._axis) for _ in range(ranks)]
        self._steps = [step for _, _, step in made]
        self._states: list[Any] = [
            (params, opt_state, None) for params, opt_state, _ in made
        ]

    def update(self, group: Group) -> None:
        """One step on every rank."""

        def one(step: Step, state: Any, microbatches: Sequence[Batch]) -> Any:
            return step(*state[:2], microbatches)

        columns = self._steps, self._states, group
        threads = isinstance(self._axis, ThreadAxis)
        self._states = (
            self._axis.map(one)(*columns) if threads else [*map(one, *columns)]
        )

    def observe(self) -> Sequence[Observation]:
        """The parameters, and the metrics."""
        names = ("loss", "grad_norm", "num_tokens")
        told: list[Any] = [
            [getattr(it, name, None) for name in names] for *_, it in self._states
        ]
        return [
            Observation(it[0], *said)
            for it, said in zip(self._states, told, strict=True)
        ]

    def save(self) -> Any:
        """A copy of the state, since a step may be given it away."""
        return copy.deepcopy(self._states)

    def load(self, saved: Any) -> None:
        """The same state."""
        self._states = saved


class RankProgram(Protocol):
    """What one rank of a trainer does."""

    def start(self, problem: Problem) -> None:
        """Begins anew."""

    def update(self, microbatches: Sequence[Batch]) -> None:
        """One update, on what this rank holds."""

    def observe(self) -> Observation:
        """What this rank sees."""


Prepare: TypeAlias = Callable[[nn.Module, Problem], tuple[Any, Any]] | None
UpdateFn: TypeAlias = Callable[
    [Any, Any, Sequence[Batch], Problem], Mapping[str, Any] | None
]
"""``update(model, optimizer, microbatches, problem)`` makes one update in place.

It returns what it reports, by name, or None."""


class Loop:
    """A loop over a module and an optimizer of torch.

    Args:
        update: one update in place.
        prepare: makes the model and the optimizer for ``update``; None: the problem's own.
    """

    def __init__(self, update: UpdateFn, prepare: Prepare = None) -> None:
        self._update, self._prepare = update, prepare

    def start(self, problem: Problem) -> None:
        """A new module and a new optimizer."""
        module, self._problem = problem.module(), problem
        self._reported: dict[str, Any] = {}
        prepare: Any = self._prepare or (
            lambda module, own: (module, own.optimizer(module))
        )
        self._model, self._optimizer = prepare(module, problem)

    def update(self, microbatches: Sequence[Batch]) -> None:
        """One update in place."""
        reported = self._update(
            self._model, self._optimizer, microbatches, self._problem
        )
        self._reported = dict(reported or {})

    def observe(self) -> Observation:
        """The module's parameters; where they are wrapped, by the names that they had."""
        own = self._model.named_parameters()
        params = {n.removeprefix("module."): _whole(p.detach()).clone() for n, p in own}
        return Observation(params, **self._reported)


def _whole(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


class OneRank:
    """A rank program as a trainer, in this process."""

    def __init__(self, program: RankProgram, abilities: Abilities) -> None:
        self.program, self.abilities = program, abilities

    def start(self, problem: Problem, ranks: int) -> None:
        """Begins anew."""
        self.program.start(problem)

    def update(self, group: Group) -> None:
        """One update."""
        self.program.update(group[0])

    def observe(self) -> Sequence[Observation]:
        """What the one rank sees."""
        return [self.program.observe()]


def loop(
    update: UpdateFn, prepare: Prepare = None, abilities: Abilities = Abilities()
) -> OneRank | Processes:
    """A trainer of a loop: ``update(model, optimizer, microbatches, problem)`` updates in place.

    With ``abilities.ranks`` above 1 it runs in as many processes of a gloo group, on a single rank
    too: both functions then stand at the top of a module.

    >>> import purestep as ps
    >>> def update(model, optimizer, microbatches, problem):
    ...     optimizer.zero_grad()
    ...     for batch in microbatches:
    ...         problem.losses(model, batch).mean().div(len(microbatches)).backward()
    ...     optimizer.step()
    >>> print(*ps.testing.judge(loop(update, abilities=Abilities(weights="mask")), ["T1"]))
    T1 cut: holds for equal tokens, wrong for unequal rows, unequal tokens, ...
    """
    if abilities.ranks == 1:
        return OneRank(Loop(update, prepare), abilities)
    return Processes(partial(Loop, update, prepare), abilities)


class Processes:
    """A program for each rank, in the processes of a gloo group, which stay from run to run.

    Args:
        make: a function at the top of a module, that makes a ``RankProgram`` in each process.
        abilities: of the trainer; ``ranks`` is how many processes there are at most.
        timeout: after how many seconds a rank that waits for others is a refusal.
    """

    def __init__(
        self,
        make: Callable[[], RankProgram],
        abilities: Abilities,
        timeout: float = 60.0,
    ) -> None:
        self.make, self.abilities, self._timeout = make, abilities, timeout
        self._worlds: dict[int, World] = {}
        weakref.finalize(
            self, lambda worlds: [*map(World.stop, worlds.values())], self._worlds
        )

    def start(self, problem: Problem, ranks: int) -> None:
        """Begins anew, in processes that may have been there before."""
        if ranks not in self._worlds:
            self._worlds[ranks] = World(ranks, self._timeout, strict=False)
            self._worlds[ranks].start()
        self._world = self._worlds[ranks]
        self._run(_start, [self.make] * ranks, [problem] * ranks)

    def update(self, group: Group) -> None:
        """One update in all processes."""
        self._run(_update, [list(share) for share in group])

    def observe(self) -> Sequence[Observation]:
        """What each process sees, and what is no longer as it was there."""
        return self._run(_observe)

    def _run(self, function: Callable[..., Any], *args: Sequence[Any]) -> list[Any]:
        return values(self._world.run(function, *args))


_running: dict[str, Any] = {}


def _start(rank: int, make: Callable[[], RankProgram], problem: Problem) -> None:
    _running.update(watch=Watch(), program=make())
    _running["program"].start(problem)


def _update(rank: int, share: list[Batch]) -> None:
    _running["watch"].call(lambda group: _running["program"].update(group[0]), [share])


def _observe(rank: int) -> Observation:
    seen: Observation = _running["program"].observe()
    return seen._replace(changed=_running["watch"].changed())
