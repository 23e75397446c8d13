"""T16, resume. Save, load and go on equals never having stopped: params, state and metrics, bitwise.

On ranks, too, whose state is spread over them, and of which there may be more or fewer after each stop.
"""

import io
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from proofs import models
from proofs.strategies import OPTIMIZERS, Batch, assert_same, cases, cut, laid_out, weights_of
from proofs.theorem import System, theorem
from proofs.writings import cuts
from purestep import tree
from purestep.testing.processes import World, values

SETTINGS: list[dict[str, Any]] = [
    {},
    {"donate": True},
    {"normalize": "grads"},
    {"on_nonfinite": "skip"},
]
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


LEGS: st.SearchStrategy[Any] = st.tuples(
    st.sampled_from(SETTINGS),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([through_a_file, through_torch_save]),
)
"""All that a run may choose, and where it is stopped: before the first step, too, and after the last one."""


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    """Integers, in any memory order, with any optimizer; the second epoch may begin within a group."""
    case = draw(cases())
    parts = cut(case.batch, draw(cuts(case.rows))) * draw(st.integers(1, 2))
    start = case.optimizer, case.params, case.opt_state
    return Training(models.integer_loss, *start, parts, *draw(LEGS))


@st.composite
def real_trainings(draw: st.DrawFn) -> Training:
    """A transformer, whose products round; with the optimizers of torch, too."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    params = models.transformer_params(generator, dtype)
    params = laid_out(params, draw(st.sampled_from(["rows", "columns"])))
    optimizer = draw(st.sampled_from([*OPTIMIZERS.values(), *ADAPTED.values()]))
    shape = (draw(st.integers(2, 6)), 2, models.CONTEXT)
    tokens, labels = torch.randint(0, models.VOCABULARY, (2, *shape), generator=generator)
    parts = [
        {"tokens": t, "labels": y, "w": torch.ones(y.shape)}
        for t, y in zip(tokens, labels, strict=True)
    ]
    start = optimizer, params, optimizer.init(params)
    return Training(models.transformer_loss, *start, parts, *draw(LEGS))


def go_on(system: System, run: Training, state: Any, steps: int) -> tuple[Any, list[Any]]:
    """So many steps from a state on, which says where in the data that is; and what they report."""
    step = system.make_update_step(run.loss_fn, run.optimizer, weight_fn=weights_of, **run.settings)
    params, opt_state, position = state
    groups = system.group(iter(run.parts), run.k, start=int(position))
    groups = system.prefetch(groups, "cpu", run.depth, weight_fn=weights_of)
    reported = []
    for group in islice(groups, steps):
        params, opt_state, metrics = step(params, opt_state, group)
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
        return tree.map(torch.clone, state) if "donate" in run.settings else state

    expected, metrics = go_on(system, run, begin(), len(run.parts))
    state, reported = begin(), []
    for steps in [*run.stops, len(run.parts)]:
        like = tree.map(lambda leaf: torch.full_like(leaf, 1), state)
        state = run.way(state, like)
        state, more = go_on(system, run, state, steps)
        reported += more
    assert_same(tree.map(bits, (state, reported)), tree.map(bits, (expected, metrics)))


resume = theorem("T16", trainings())(resumes)
resume_real = theorem("T16", real_trainings())(resumes)

test_resume = resume.test()
test_resume_real = resume_real.test()


# On ranks. A loss that is linear in the params has gradients that do not depend on them: integers over a power of two, whose sums
# and squares are exact, in any order and after any number of steps.


class RankedTraining(NamedTuple):
    """A run on ranks: how many there are at a time, and for how many steps."""

    recipe: str
    seed: int
    sizes: list[int]
    settings: dict[str, Any]
    legs: list[tuple[int, int]]
    in_background: bool


SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=5)
RANKED = st.builds(
    RankedTraining,
    st.sampled_from([*OPTIMIZERS]),
    st.integers(0, 2**20),
    SIZES.map(lambda sizes: [size for first in sizes for size in (first, 4 - first)]),
    st.sampled_from([{}, {"donate": True}, {"on_nonfinite": "skip"}]),
    st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.integers(0, 2)), min_size=1, max_size=4),
    st.booleans(),
)
"""Microbatches of all sizes, empty ones included; two are a group of four rows."""


def integers(generator: torch.Generator, *shape: int) -> Tensor:
    """Small ones."""
    return torch.randint(-3, 4, shape, generator=generator).double()


def begin_ranked(run: RankedTraining) -> Any:
    """Whole params, of which a first dimension is shorter than the ranks are many, and what goes with them."""
    generator = torch.Generator().manual_seed(run.seed)
    shapes: dict[str, tuple[int, ...]] = {"w": (5, 3), "b": (), "short": (1, 2), "v": (4,)}
    params = {name: integers(generator, *shape) for name, shape in shapes.items()}
    return params, OPTIMIZERS[run.recipe].init(params), torch.tensor(0)


def linear_loss(params: Any, batch: Batch) -> Tensor:
    """For each row x the inner product of x and all params."""
    flat = torch.cat([leaf.reshape(-1) for leaf in tree.leaves_of(params)])
    return batch["x"] @ flat


def go_on_ranked(run: RankedTraining, axis: Any, state: Any, steps: int) -> Any:
    """So many steps, in each of which ranks take microbatches in turn."""
    generator = torch.Generator().manual_seed(run.seed + 1)
    width = sum(leaf.numel() for leaf in tree.leaves_of(begin_ranked(run)[0]))
    stream = [{"x": integers(generator, n, width), "w": torch.ones(n)} for n in run.sizes]
    update_step = ps.make_update_step(
        linear_loss, OPTIMIZERS[run.recipe], weight_fn=weights_of, axis=axis, **run.settings
    )
    params, opt_state, position = state
    rank, size = (axis.rank, axis.size) if isinstance(axis, ps.MeshAxis) else (0, 1)
    groups = ps.prefetch(ps.group(stream, 2, start=int(position)), "cpu", weight_fn=weights_of)
    for group in islice(groups, steps):
        params, opt_state, _ = update_step(params, opt_state, list(group)[rank::size])
    groups.close()
    return params, opt_state, torch.tensor(groups.position)


def leg(rank: int, run: RankedTraining, folder: str, number: int, steps: int) -> None:
    """One process of those that take part until the next stop."""
    size = torch.distributed.get_world_size()
    axis = ps.MeshAxis(DeviceMesh("cpu", list(range(size)), mesh_dim_names=("dp",)), "dp")
    whole = begin_ranked(run)
    state = *ps.shard(whole[:2], axis), whole[2]
    last = ps.checkpoint.latest(folder)
    if last is not None:
        like = tree.map(lambda leaf: torch.full_like(leaf, 1), state)
        state = ps.checkpoint.load(last, like)
    state = go_on_ranked(run, axis, state, steps)
    if run.in_background:
        with ps.checkpoint.Background() as background:
            background.save_step(folder, number, state)
            go_on_ranked(run, axis, state, 1)  # which may be donated the state
    else:
        ps.checkpoint.save_step(folder, number, state)


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    """Processes that stay up, by how many there are."""
    with World(1) as one, World(2) as two, World(3) as three:
        yield {1: one, 2: two, 3: three}


@given(run=RANKED)
def test_resume_on_ranks(worlds: dict[int, World], run: RankedTraining) -> None:
    """Stopped anywhere, on any number of ranks in turn, pieces and all: the state of one process that never stopped."""
    with TemporaryDirectory() as folder:
        for number, (size, steps) in enumerate(run.legs):
            values(worlds[size].run(leg, *[[each] * size for each in (run, folder, number, steps)]))
        last = ps.checkpoint.latest(folder)
        assert last is not None
        like = tree.map(lambda leaf: torch.full_like(leaf, 1), begin_ranked(run))
        found = ps.checkpoint.load(last, like)
    steps = sum(steps for _, steps in run.legs)
    assert_same(found, go_on_ranked(run, ps.LocalAxis(), begin_ranked(run), steps))
