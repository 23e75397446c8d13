"""T16, resume. Save, load and go on equals never having stopped: params, state and metrics, bitwise.

On ranks, too, whose state is spread over them, and of which there may be more or fewer after each stop. ``tests/mortal.py`` kills them.
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
from proofs import models
from proofs.strategies import (
    LAYOUTS,
    OPTIMIZERS,
    Batch,
    Chooser,
    assert_same,
    case_of,
    copied,
    cut,
    cut_of,
    drawn,
    laid_out,
    settings_of,
    weights_of,
)
from proofs.theorem import PURESTEP, System, as_tests, theorem
from purestep import tree
from purestep.testing.processes import World, values

ADAPTED = {
    name: ps.optim.from_torch(getattr(torch.optim, name), lr=0.01)
    for name in ("AdamW", "RMSprop", "Adagrad", "NAdam", "Rprop")
}


def through_a_file(state: Any, like: Any) -> Any:
    """Saved by one process and loaded by the next."""
    with TemporaryDirectory() as folder:
        ps.checkpoint.save(Path(folder, "state"), state)
        return ps.checkpoint.load(Path(folder, "state"), like)


def through_torch_save(state: Any, like: Any) -> Any:
    """As a flat dict, in a format of others."""
    file = io.BytesIO()
    torch.save(ps.state_dict(state), file)
    file.seek(0)
    return ps.load_state_dict(like, torch.load(file, weights_only=True))


class Training(NamedTuple):
    """A run: what it begins with, what it is given, and after how many steps each time it is stopped."""

    loss_fn: Callable[..., Tensor]
    optimizer: ps.optim.Optimizer
    params: Any
    opt_state: Any
    parts: list[Batch]
    settings: dict[str, Any]
    k: int
    depth: int
    stops: list[int]
    way: Callable[[Any, Any], Any]


def legs(choose: Chooser) -> tuple[Any, ...]:
    """All that a run may choose, and where it is stopped: before the first step, too, and after the last one."""
    stops = [choose.randrange(4) for _ in range(choose.randint(1, 3))]
    way = choose.choice([through_a_file, through_torch_save])
    return settings_of(choose), choose.randint(1, 3), choose.randint(1, 3), stops, way


def training(choose: Chooser) -> Training:
    """Integers, in any memory order, with any optimizer; the second epoch may begin within a group."""
    case = case_of(choose)
    parts = cut(
        case.batch, cut_of(choose, range(case.rows), range(2, 10))
    ) * choose.randint(1, 2)
    start = case.optimizer, case.params, case.opt_state
    return Training(models.integer_loss, *start, parts, *legs(choose))


def real_training(choose: Chooser) -> Training:
    """A transformer, whose products round; with the optimizers of torch, too.

    Without gaps, which no copy keeps: products in half precision round in another way where there are some.
    """
    generator = choose.generator()
    params = models.transformer_params(
        generator, choose.choice([torch.float32, torch.bfloat16])
    )
    params = laid_out(params, choose.choice(LAYOUTS[:2]))
    optimizer = choose.choice([*OPTIMIZERS.values(), *ADAPTED.values()])
    shape = (choose.randint(2, 6), 2, models.CONTEXT)
    tokens, labels = torch.randint(
        0, models.VOCABULARY, (2, *shape), generator=generator
    )
    parts = [
        {"tokens": t, "labels": y, "w": torch.ones(y.shape)}
        for t, y in zip(tokens, labels, strict=True)
    ]
    start = optimizer, params, optimizer.init(params)
    return Training(models.transformer_loss, *start, parts, *legs(choose))


def go_on(
    system: System, run: Training, state: Any, steps: int, axis: Any = None
) -> tuple[Any, list[Any]]:
    """So many steps from a state on, which says where in the data that is; and what they report.

    Ranks take microbatches in turn.
    """
    how = {**run.settings, "axis": axis or ps.LocalAxis()}
    step = system.make_update_step(
        run.loss_fn, run.optimizer, weight_fn=weights_of, **how
    )
    params, opt_state, position = state
    source = ps.group(iter(run.parts), run.k, start=int(position))
    groups = ps.prefetch(source, "cpu", run.depth, weight_fn=weights_of)
    reported = []
    for group in islice(groups, steps):
        mine = [*group][axis.rank :: axis.size] if axis else group
        params, opt_state, metrics = step(params, opt_state, mine)
        reported.append(metrics)
    groups.close()
    return (params, opt_state, torch.tensor(groups.position)), reported


def bits(leaf: Tensor) -> Tensor:
    """A leaf as bytes, among which NaNs are what they are, and a zero has its sign."""
    return leaf.contiguous().view(-1).view(torch.uint8)


def resumes(system: System, run: Training) -> None:
    """Stopped after each of these numbers of steps, the state taken elsewhere and back: the same bits at the end."""

    def begin() -> Any:
        state = run.params, run.opt_state, torch.tensor(0)
        return copied(state) if run.settings["donate"] else state

    expected, metrics = go_on(system, run, begin(), len(run.parts))
    state, reported = begin(), []
    for steps in [*run.stops, len(run.parts)]:
        like = tree.map(lambda leaf: torch.full_like(leaf, 1), state)
        state = run.way(state, like)
        state, more = go_on(system, run, state, steps)
        reported += more
    assert_same(tree.map(bits, (state, reported)), tree.map(bits, (expected, metrics)))


resume = theorem("T16", drawn(training))(resumes)
resume_real = theorem("T16", drawn(real_training))(resumes)
globals().update(as_tests(globals()))


class Legs(NamedTuple):
    """A run on ranks, in what a process can be sent: how many ranks there are at a time, and for how many steps."""

    recipe: str
    seed: int
    settings: dict[str, Any]
    legs: list[tuple[int, int]]
    in_background: bool


def ranked(choose: Chooser) -> Legs:
    """On one to three ranks at a time."""
    each = [
        (choose.randint(1, 3), choose.randrange(3)) for _ in range(choose.randint(1, 4))
    ]
    recipe, seed = choose.choice([*OPTIMIZERS]), choose.randrange(2**20)
    return Legs(recipe, seed, settings_of(choose), each, choose.maybe())


def linear_loss(params: Any, batch: Batch) -> Tensor:
    """For each row x the inner product of x and all params.

    Its gradients are integers over a power of two, at any params: their sums and squares are exact in any order, after any step.
    """
    return batch["x"] @ torch.cat([leaf.reshape(-1) for leaf in tree.leaves(params)])


def linear_training(legs: Legs) -> Training:
    """Params of which some are shorter than the ranks are many; groups of two microbatches with four rows, empty ones included."""
    generator, optimizer = (
        torch.Generator().manual_seed(legs.seed),
        OPTIMIZERS[legs.recipe],
    )
    shapes: dict[str, tuple[int, ...]] = {
        "w": (5, 3),
        "b": (),
        "short": (1, 2),
        "v": (4,),
    }
    params = {name: models.integers(shape, generator) for name, shape in shapes.items()}
    sizes = [size for first in (1, 4, 0, 2) for size in (first, 4 - first)]
    parts = [
        {"x": models.integers((n, 22), generator), "w": torch.ones(n)} for n in sizes
    ]
    start = linear_loss, optimizer, params, optimizer.init(params), parts, legs.settings
    return Training(*start, k=2, depth=1, stops=[], way=through_a_file)


def leg(rank: int, legs: Legs, folder: str, number: int) -> None:
    """One process of those that take part until the next stop."""
    size, steps = legs.legs[number]
    axis = ps.MeshAxis(DeviceMesh("cpu", [*range(size)], mesh_dim_names=("dp",)), "dp")
    run = linear_training(legs)
    state: Any = *ps.shard((run.params, run.opt_state), axis), torch.tensor(0)
    if last := ps.checkpoint.latest_checkpoint(folder):
        state = ps.checkpoint.load(
            last, tree.map(lambda leaf: torch.full_like(leaf, 1), state)
        )
    state, _ = go_on(PURESTEP, run, state, steps, axis)
    with ps.checkpoint.AsyncCheckpointer() as background:
        save = background.save_step if legs.in_background else ps.checkpoint.save_step
        save(folder, number, state)
        go_on(PURESTEP, run, state, 1, axis)  # which may be donated the state


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    """Processes that stay up, by how many there are."""
    with World(1) as one, World(2) as two, World(3) as three:
        yield {1: one, 2: two, 3: three}


@given(legs=drawn(ranked))
def test_resume_on_ranks(worlds: dict[int, World], legs: Legs) -> None:
    """Stopped anywhere, on any number of ranks in turn, pieces and all: the state of one process that never stopped."""
    run = linear_training(legs)
    state: Any = run.params, run.opt_state, torch.tensor(0)
    with TemporaryDirectory() as folder:
        for number, (size, _) in enumerate(legs.legs):
            sent = [[each] * size for each in (legs, folder, number)]
            values(worlds[size].run(leg, *sent))
        last = ps.checkpoint.latest_checkpoint(folder)
        assert last is not None
        found = ps.checkpoint.load(
            last, tree.map(lambda leaf: torch.full_like(leaf, 1), state)
        )
    assert_same(
        found,
        go_on(PURESTEP, run, copied(state), sum(steps for _, steps in legs.legs))[0],
    )
