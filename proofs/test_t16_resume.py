"""T16, resume. Save, load and go on equals never having stopped: params, state and metrics, bitwise.

On ranks, of which there may be more or fewer after each stop, ``tests/mortal.py`` says so of processes that are killed.
"""

import io
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
from proofs.theorem import System, as_tests, theorem
from purestep import tree

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
    parts = cut(case.batch, cut_of(choose, range(case.rows), range(2, 10))) * choose.randint(1, 2)
    start = case.optimizer, case.params, case.opt_state
    return Training(models.integer_loss, *start, parts, *legs(choose))


def real_training(choose: Chooser) -> Training:
    """A transformer, whose products round; with the optimizers of torch, too."""
    generator = choose.generator()
    params = models.transformer_params(generator, choose.choice([torch.float32, torch.bfloat16]))
    params = laid_out(params, choose.choice(LAYOUTS[:3]))
    optimizer = choose.choice([*OPTIMIZERS.values(), *ADAPTED.values()])
    shape = (choose.randint(2, 6), 2, models.CONTEXT)
    tokens, labels = torch.randint(0, models.VOCABULARY, (2, *shape), generator=generator)
    parts = [
        {"tokens": t, "labels": y, "w": torch.ones(y.shape)}
        for t, y in zip(tokens, labels, strict=True)
    ]
    start = optimizer, params, optimizer.init(params)
    return Training(models.transformer_loss, *start, parts, *legs(choose))


def go_on(system: System, run: Training, state: Any, steps: int) -> tuple[Any, list[Any]]:
    """So many steps from a state on, which says where in the data that is; and what they report."""
    step = system.make_update_step(run.loss_fn, run.optimizer, weight_fn=weights_of, **run.settings)
    params, opt_state, position = state
    source = ps.group(iter(run.parts), run.k, start=int(position))
    groups = ps.prefetch(source, "cpu", run.depth, weight_fn=weights_of)
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
