"""T16, resume. Save, load and go on equals never having stopped: params, state and metrics, bitwise.

    train(m + n steps) = load(save(train(m steps))) + n steps

On ranks, too, whose state is cut over them, and of which there may be more or fewer after each stop. ``tests/killed_training.py`` kills them.
"""

import io
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from purestep import tree
from purestep.testing.processes import World, values
from support import models
from support.optimizers import OPTIMIZERS
from support.strategies import (
    LAYOUTS,
    Batch,
    Chooser,
    assert_same,
    builds,
    change_layout,
    choose_settings,
    copy_state,
    cut_batch,
    get_weights,
    make_case,
    make_cut,
)
from support.theorem import PURESTEP, System, as_tests, theorem

ADAPTED = {
    name: ps.optim.from_torch(getattr(torch.optim, name), lr=0.01)
    for name in ("AdamW", "RMSprop", "Adagrad", "NAdam", "Rprop")
}


def through_a_file(state: Any, like: Any) -> Any:
    """Saves as one process does, and loads as the next."""
    with TemporaryDirectory() as folder:
        ps.checkpoint.save(Path(folder, "state"), state)
        return ps.checkpoint.load(Path(folder, "state"), like)


def through_torch_save(state: Any, like: Any) -> Any:
    """Saves a flat dict in torch's format, and loads it."""
    file = io.BytesIO()
    torch.save(ps.state_dict(state), file)
    file.seek(0)
    return ps.load_state_dict(like, torch.load(file, weights_only=True))


class Schedule(NamedTuple):
    """How a run reads its data, in groups of ``k``; after how many steps each time it is stopped, and how it is saved."""

    settings: dict[str, Any]
    k: int
    depth: int
    stops: list[int]
    save_and_load: Callable[[Any, Any], Any]


def choose_schedule(choose: Chooser) -> Schedule:
    """Chooses stops anywhere: before the first step, too, and after the last one."""
    stops = [choose.randrange(4) for _ in range(choose.randint(1, 3))]
    save_and_load = choose.choice([through_a_file, through_torch_save])
    return Schedule(
        settings=choose_settings(choose),
        k=choose.randint(1, 3),
        depth=choose.randint(1, 3),
        stops=stops,
        save_and_load=save_and_load,
    )


class Training(NamedTuple):
    """A run: what it starts from, and its data."""

    loss_fn: Callable[..., Tensor]
    optimizer: ps.optim.Optimizer
    params: Any
    opt_state: Any
    parts: list[Batch]
    schedule: Schedule

    @property
    def start(self) -> Any:
        """Returns params, opt_state, and the position in the data; copies where steps donate them."""
        state = self.params, self.opt_state, torch.tensor(0)
        if self.schedule.settings["donate"]:
            return copy_state(state)
        return state


def make_training(choose: Chooser) -> Training:
    """Makes integers, in any memory order, with any optimizer; the second epoch may begin within a group."""
    case = make_case(choose)
    epoch = cut_batch(case.batch, make_cut(choose, range(case.rows), range(2, 10)))
    return Training(
        loss_fn=models.integer_loss,
        optimizer=case.optimizer,
        params=case.params,
        opt_state=case.opt_state,
        parts=epoch * choose.randint(1, 2),
        schedule=choose_schedule(choose),
    )


def make_real_training(choose: Chooser) -> Training:
    """Makes a transformer, whose products round; with the optimizers of torch, too.

    Without gaps, which no copy keeps: products in half precision round in another way where there are some.
    """
    generator = choose.generator()
    dtype = choose.choice([torch.float32, torch.bfloat16])
    params = models.transformer_params(generator, dtype)
    params = change_layout(params, choose.choice(LAYOUTS[:2]))
    optimizer = choose.choice([*OPTIMIZERS.values(), *ADAPTED.values()])
    parts = []
    for _ in range(choose.randint(2, 6)):
        shape = (2, models.CONTEXT)
        tokens = torch.randint(0, models.VOCABULARY, shape, generator=generator)
        labels = torch.randint(0, models.VOCABULARY, shape, generator=generator)
        parts.append({"tokens": tokens, "labels": labels, "w": torch.ones(shape)})
    return Training(
        loss_fn=models.transformer_loss,
        optimizer=optimizer,
        params=params,
        opt_state=optimizer.init(params),
        parts=parts,
        schedule=choose_schedule(choose),
    )


def train(
    system: System, run: Training, state: Any, steps: int, axis: Any = None
) -> tuple[Any, list[Any]]:
    """Takes steps from a state on, at its position in the data; returns the new state and the metrics.

    Ranks take microbatches in turn.
    """
    schedule = run.schedule
    step = system.make_update_step(
        run.loss_fn,
        run.optimizer,
        weight_fn=get_weights,
        axis=axis or ps.LocalAxis(),
        **schedule.settings,
    )
    params, opt_state, position = state
    source = ps.group(iter(run.parts), schedule.k, start=int(position))
    groups = ps.prefetch(source, "cpu", schedule.depth, weight_fn=get_weights)
    all_metrics = []
    for group in islice(groups, steps):
        microbatches: Any = group
        if axis is not None:
            microbatches = [*group][axis.rank :: axis.size]
        params, opt_state, metrics = step(params, opt_state, microbatches)
        all_metrics.append(metrics)
    groups.close()
    return (params, opt_state, torch.tensor(groups.position)), all_metrics


def ones_like(state: Any) -> Any:
    """Makes a state to load into, of other values."""
    return tree.map(lambda leaf: torch.full_like(leaf, 1), state)


def to_bytes(leaf: Tensor) -> Tensor:
    """Views a leaf as bytes, so that NaNs equal themselves, and a zero has its sign."""
    return leaf.contiguous().view(-1).view(torch.uint8)


def check_resume(system: System, run: Training) -> None:
    """Stopped after each of these numbers of steps, the state saved and loaded: the same bits at the end."""
    total_steps = len(run.parts)
    expected, expected_metrics = train(system, run, run.start, total_steps)

    state = run.start
    all_metrics = []
    for steps in [*run.schedule.stops, total_steps]:
        state = run.schedule.save_and_load(state, ones_like(state))
        state, metrics = train(system, run, state, steps)
        all_metrics += metrics

    actual_bytes = tree.map(to_bytes, (state, all_metrics))
    assert_same(actual_bytes, tree.map(to_bytes, (expected, expected_metrics)))


resume = theorem("T16", builds(make_training))(check_resume)
resume_real = theorem("T16", builds(make_real_training))(check_resume)
globals().update(as_tests(globals()))


class Leg(NamedTuple):
    """A part of a run between two stops: its number of ranks, and of steps."""

    size: int
    steps: int


class RankedRun(NamedTuple):
    """A run on ranks, of values that a process can be sent."""

    recipe: str
    seed: int
    settings: dict[str, Any]
    legs: list[Leg]
    in_background: bool


def make_ranked_run(choose: Chooser) -> RankedRun:
    """Makes a run of one to four legs, each on one to three ranks."""
    num_legs = choose.randint(1, 4)
    legs = [Leg(choose.randint(1, 3), choose.randrange(3)) for _ in range(num_legs)]
    recipe = choose.choice([*OPTIMIZERS])
    seed = choose.randrange(2**20)
    return RankedRun(recipe, seed, choose_settings(choose), legs, choose.maybe())


def inner_product_loss(params: Any, batch: Batch) -> Tensor:
    """Computes for each row x the inner product of x and all params.

    Its gradients are integers over a power of two, at any params: their sums and squares are exact in any order, after any step.
    """
    flat = torch.cat([leaf.reshape(-1) for leaf in tree.leaves(params)])
    return batch["x"] @ flat


def make_linear_training(run: RankedRun) -> Training:
    """Makes params of which some are shorter than the ranks are many; groups of two microbatches with four rows, empty ones included."""
    generator = torch.Generator().manual_seed(run.seed)
    optimizer = OPTIMIZERS[run.recipe]
    params = {
        "w": models.integers((5, 3), generator),
        "b": models.integers((), generator),
        "short": models.integers((1, 2), generator),
        "v": models.integers((4,), generator),
    }
    parts = []
    for num_rows in (1, 3, 4, 0, 0, 4, 2, 2):
        x = models.integers((num_rows, 22), generator)
        parts.append({"x": x, "w": torch.ones(num_rows)})
    schedule = Schedule(
        run.settings, k=2, depth=1, stops=[], save_and_load=through_a_file
    )
    return Training(
        loss_fn=inner_product_loss,
        optimizer=optimizer,
        params=params,
        opt_state=optimizer.init(params),
        parts=parts,
        schedule=schedule,
    )


def run_leg(rank: int, run: RankedRun, folder: str, number: int) -> None:
    """Runs one process of a leg: loads the last checkpoint, trains, and saves the next one."""
    leg = run.legs[number]
    mesh = DeviceMesh("cpu", [*range(leg.size)], mesh_dim_names=("dp",))
    axis = ps.MeshAxis(mesh, "dp")
    training = make_linear_training(run)
    params, opt_state = ps.shard((training.params, training.opt_state), axis)
    state: Any = params, opt_state, torch.tensor(0)
    if last := ps.checkpoint.latest_checkpoint(folder):
        state = ps.checkpoint.load(last, ones_like(state))
    state, _ = train(PURESTEP, training, state, leg.steps, axis)
    with ps.checkpoint.AsyncCheckpointer() as background:
        save = background.save_step if run.in_background else ps.checkpoint.save_step
        save(folder, number, state)
        # The state may be donated to this step while it is being saved.
        train(PURESTEP, training, state, 1, axis)


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    """Starts processes that stay up, by how many there are."""
    with World(1) as one, World(2) as two, World(3) as three:
        yield {1: one, 2: two, 3: three}


@given(run=builds(make_ranked_run))
def test_resume_on_ranks(worlds: dict[int, World], run: RankedRun) -> None:
    """Stopped anywhere, on any number of ranks in turn, shards and all: the state of one process that never stopped."""
    training = make_linear_training(run)
    total_steps = sum(leg.steps for leg in run.legs)
    expected, _ = train(PURESTEP, training, training.start, total_steps)

    with TemporaryDirectory() as folder:
        for number, leg in enumerate(run.legs):
            args = [run] * leg.size, [folder] * leg.size, [number] * leg.size
            values(worlds[leg.size].run(run_leg, *args))
        last = ps.checkpoint.latest_checkpoint(folder)
        assert last is not None
        actual = ps.checkpoint.load(last, ones_like(training.start))

    assert_same(actual, expected)
