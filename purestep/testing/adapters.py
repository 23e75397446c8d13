"""Adapts pure steps, loops of torch's and programs in several processes to trainers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn

from purestep.axis import Axis, LocalAxis
from purestep.testing.problem import Batch, Problem
from purestep.testing.processes import World, values
from purestep.testing.threads import ThreadAxis
from purestep.testing.trainer import Capabilities, Group, Observation
from purestep.testing.watch import Watch

Params: TypeAlias = Any
OptState: TypeAlias = Any
Step: TypeAlias = Callable[..., Any]
MakeStep: TypeAlias = Callable[[Problem, Axis], tuple[Params, OptState, Step]]
"""``make(problem, axis)`` returns params, optimizer state and a pure step:
``(params, state, microbatches) -> (params, state, metrics)``."""


class _RankState(NamedTuple):
    """Holds the state of a pure step on one rank, and the metrics of its last update."""

    params: Params
    opt_state: OptState
    metrics: Any = None


class PureTrainer:
    """Trains by a pure step that ``make(problem, axis)`` returns after params and optimizer state.

    With several ranks, these are threads. ``make`` must return params under the names of the
    problem's module. The trainer can also save and load its state.

    >>> import purestep as ps
    >>> def make(problem, axis):
    ...     params, apply = ps.from_module(problem.module())
    ...     loss_fn = lambda params, batch: problem.losses(lambda x: apply(params, x), batch)
    ...     optimizer = ps.optim.sgd(problem.learning_rate)
    ...     step = ps.make_update_step(loss_fn, optimizer, weight_fn=problem.weights, axis=axis)
    ...     return params, optimizer.init(params), step
    >>> ps.testing.check(PureTrainer(make, Capabilities(ranks=3)), ["T2"], cases=10)
    """

    def __init__(self, make: MakeStep, capabilities: Capabilities) -> None:
        self.make = make
        self.capabilities = capabilities

    def start(self, problem: Problem, ranks: int) -> None:
        """Makes new params, state and a step for each rank by ``make``, in the calling thread.

        Several ranks share a ``ThreadAxis``; a single one has a ``LocalAxis``.
        """
        self._axis: Any = ThreadAxis(ranks) if ranks > 1 else LocalAxis()
        self._steps: list[Step] = []
        self._states: list[_RankState] = []
        for _ in range(ranks):
            params, opt_state, step = self.make(problem, self._axis)
            self._steps.append(step)
            self._states.append(_RankState(params, opt_state))

    def update(self, group: Group) -> None:
        """Steps once on every rank, on the rank's share of the group, and keeps the new state."""

        def run_step(
            step: Step, state: _RankState, microbatches: Sequence[Batch]
        ) -> _RankState:
            new_state = step(state.params, state.opt_state, microbatches)
            return _RankState(*new_state)

        if isinstance(self._axis, ThreadAxis):
            run_steps = self._axis.map(run_step)
            self._states = run_steps(self._steps, self._states, group)
        else:
            (step,) = self._steps
            (state,) = self._states
            self._states = [run_step(step, state, group[0])]

    def observe(self) -> Sequence[Observation]:
        """Returns for each rank the params, and loss, gradient norm and token count of its metrics.

        What the metrics lack is None, as all three are before the first update.
        """
        return [
            Observation(
                state.params,
                loss=getattr(state.metrics, "loss", None),
                grad_norm=getattr(state.metrics, "grad_norm", None),
                num_tokens=getattr(state.metrics, "num_tokens", None),
            )
            for state in self._states
        ]

    def save(self) -> Any:
        """Returns a deep copy of each rank's params, optimizer state and metrics.

        A donated step would write over the originals.
        """
        return copy.deepcopy(self._states)

    def load(self, saved: Any) -> None:
        """Puts a deep copy of a saved state back, so that it can be loaded again."""
        self._states = copy.deepcopy(saved)


class RankProgram(Protocol):
    """Trains on one rank, for ``Processes`` or ``OneRank``."""

    def start(self, problem: Problem) -> None:
        """Forgets all that was before, and begins at the problem's parameters."""

    def update(self, microbatches: Sequence[Batch]) -> None:
        """Makes one update on this rank's microbatches."""

    def observe(self) -> Observation:
        """Returns full parameters, and the last update's reports; all ranks call it together."""


Prepare: TypeAlias = Callable[[nn.Module, Problem], tuple[Any, Any]] | None
UpdateFn: TypeAlias = Callable[
    [Any, Any, Sequence[Batch], Problem], Mapping[str, Any] | None
]
"""``update(model, optimizer, microbatches, problem)`` makes one update in place.

It returns what it reports, by name, or None."""


class Loop:
    """Runs a loop over a module and an optimizer of torch's, as the program of one rank.

    Args:
        update: ``update(model, optimizer, microbatches, problem)`` makes one update in place. It
            may return a mapping of what it reports, such as "loss".
        prepare: ``prepare(module, problem)`` makes the model and the optimizer for ``update``;
            None: the problem's module and SGD.
    """

    def __init__(self, update: UpdateFn, prepare: Prepare = None) -> None:
        self._update = update
        self._prepare = prepare

    def start(self, problem: Problem) -> None:
        """Makes a new module and optimizer, and forgets reports.

        They come from ``prepare``; without it they are the problem's module and SGD.
        """
        module = problem.module()
        self._problem = problem
        self._reported: dict[str, Any] = {}
        self._model: Any = module
        self._optimizer: Any
        if self._prepare is None:
            self._optimizer = problem.optimizer(module)
        else:
            self._model, self._optimizer = self._prepare(module, problem)

    def update(self, microbatches: Sequence[Batch]) -> None:
        """Calls the function ``update`` on this rank's microbatches, and keeps what it reports."""
        reported = self._update(
            self._model,
            self._optimizer,
            microbatches,
            self._problem,
        )
        self._reported = dict(reported or {})

    def observe(self) -> Observation:
        """Returns copies of the full parameters by name, and what the last update reported.

        A first "module." of a name, which DistributedDataParallel adds, is left out. A DTensor is
        gathered, which all ranks do together. Raises ``TypeError`` for a report that
        ``Observation`` has no field for.
        """
        params = {}
        for name, p in self._model.named_parameters():
            # DistributedDataParallel puts "module." before each name.
            name = name.removeprefix("module.")
            full = _full_tensor(p.detach())
            params[name] = full.clone()
        return Observation(params, **self._reported)


def _full_tensor(x: Any) -> Any:
    """Gathers a DTensor, as a collective of its ranks; returns any other tensor as it is."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


class OneRank:
    """Runs a rank program in this process as the only rank.

    Raises ``ValueError`` unless ``capabilities.ranks`` is 1.
    """

    def __init__(self, program: RankProgram, capabilities: Capabilities) -> None:
        if capabilities.ranks != 1:
            raise ValueError(
                f"OneRank runs a single rank, but {capabilities.ranks=}: take Processes"
            )
        self.program = program
        self.capabilities = capabilities

    def start(self, problem: Problem, ranks: int) -> None:
        """Starts the rank program on a problem. ``ranks`` is not read."""
        self.program.start(problem)

    def update(self, group: Group) -> None:
        """Makes one update on the microbatches of the only rank, ``group[0]``."""
        self.program.update(group[0])

    def observe(self) -> Sequence[Observation]:
        """Returns a list of what the only rank sees."""
        return [self.program.observe()]


def loop(
    update: UpdateFn,
    prepare: Prepare = None,
    capabilities: Capabilities = Capabilities(),
) -> OneRank | Processes:
    """Makes a trainer of a loop: ``update(model, optimizer, microbatches, problem)`` in place.

    ``update`` may return a mapping of what it reports, such as "loss". ``prepare(module, problem)``
    makes the model and the optimizer; without it they are the problem's module and SGD.

    If ``capabilities.ranks`` is 1, the loop runs in this process. Above 1, each rank is a process
    in a gloo group, also in runs on a single rank. Both functions must then stand at the top of a
    module.

    >>> import purestep as ps
    >>> def update(model, optimizer, microbatches, problem):
    ...     optimizer.zero_grad()
    ...     for batch in microbatches:
    ...         problem.losses(model, batch).mean().div(len(microbatches)).backward()
    ...     optimizer.step()
    >>> print(*ps.testing.run_laws(loop(update, capabilities=Capabilities(weights="mask")), ["T1"]))
    T1 cut: holds for equal tokens, wrong for unequal rows, unequal tokens, ...
    """
    if capabilities.ranks == 1:
        return OneRank(Loop(update, prepare), capabilities)
    # A partial, unlike a lambda, can be pickled for the processes.
    return Processes(partial(Loop, update, prepare), capabilities)


class Processes:
    """Runs a program on each rank, in the processes of a gloo group, which stay from run to run.

    A call in which a rank raises or ends raises ``AssertionError``.

    Args:
        make: makes a ``RankProgram`` in each process, at each start. It must be picklable, such as
            a function at the top of a module.
        capabilities: of the trainer. Each number of ranks that is started has a group of processes.
        timeout: the seconds that each call may take; then it raises ``TimeoutError``.
    """

    def __init__(
        self,
        make: Callable[[], RankProgram],
        capabilities: Capabilities,
        timeout: float = 60.0,
    ) -> None:
        self.make = make
        self.capabilities = capabilities
        self._timeout = timeout
        self._worlds: dict[int, World] = {}
        weakref.finalize(self, _stop_worlds, self._worlds)

    def start(self, problem: Problem, ranks: int) -> None:
        """Makes a new program on each rank, and starts it on the problem.

        The first start on a number of ranks starts their processes, which later starts use again.
        Before a program is made, each start puts back the global state that the last run in that
        process has changed. It then seeds the generators there, from this process's
        ``torch.initial_seed()``.

        Raises ``AssertionError`` if a rank raises or ends, and ``TimeoutError`` if one is too slow.
        """
        if ranks not in self._worlds:
            world = World(ranks, self._timeout, strict=False)
            world.start()
            self._worlds[ranks] = world
        self._world = self._worlds[ranks]
        makes = [self.make] * ranks
        problems = [problem] * ranks
        # The seed of this run, which is that of this process.
        seeds = [torch.initial_seed()] * ranks
        self._run(_start_program, makes, problems, seeds)

    def update(self, group: Group) -> None:
        """Makes one update in all processes, each on its rank's share of the group.

        Raises ``AssertionError`` if a rank raises or ends, and ``TimeoutError`` if one is too slow.
        """
        shares = [list(share) for share in group]
        self._run(_update_program, shares)

    def observe(self) -> Sequence[Observation]:
        """Returns what each process sees.

        ``changed`` lists the data and global state that its program has changed since the start.
        Raises ``AssertionError`` if a rank raises or ends, and ``TimeoutError`` if one is too slow.
        """
        return self._run(_observe_program)

    def _run(self, function: Callable[..., Any], *args: Sequence[Any]) -> list[Any]:
        results = self._world.run(function, *args)
        return values(results)


def _stop_worlds(worlds: Mapping[int, World]) -> None:
    for world in worlds.values():
        world.stop()


class _Running(NamedTuple):
    """Holds the program of this process, and the watch over data and global state."""

    program: RankProgram
    watch: Watch


_running: dict[str, _Running] = {}
"""Under "now": functions that a process is sent have no other place between two calls."""


def _start_program(
    rank: int, make: Callable[[], RankProgram], problem: Problem, seed: int
) -> None:
    if "now" in _running:
        _running[
            "now"
        ].watch.end()  # Restores the global state that the last run has changed.
    watch = Watch(seed)  # First: making a program may change global state, too.
    running = _Running(make(), watch)
    _running["now"] = running
    running.program.start(problem)


def _update_program(rank: int, share: list[Batch]) -> None:
    running = _running["now"]

    def update(group: Group) -> None:
        running.program.update(group[0])

    running.watch.call(update, [share])


def _observe_program(rank: int) -> Observation:
    running = _running["now"]
    seen = running.program.observe()
    return seen._replace(changed=running.watch.changed())
