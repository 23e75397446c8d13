"""T16, resume. Save, load and go on equals never having stopped: params, state and metrics, bitwise."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import purestep as ps
from proofs import models
from proofs.strategies import (
    OPTIMIZERS,
    Batch,
    assert_same,
    cases,
    cut,
    cuts,
    laid_out,
    weights_of,
)
from proofs.theorem import System, theorem
from purestep import tree

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


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    """Integers, in any memory order, with any optimizer; the second epoch may begin within a group."""
    case = draw(cases())
    parts = cut(case.batch, draw(cuts(case.rows)))
    return Training(
        models.integer_loss,
        case.optimizer,
        case.params,
        case.opt_state,
        parts * draw(st.integers(1, 2)),
        *draw(legs()),
    )


@st.composite
def legs(draw: st.DrawFn) -> tuple[Any, ...]:
    """All that a run may choose, and where it is stopped: before the first step, too, and after the last one."""
    return (
        draw(st.sampled_from(SETTINGS)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.lists(st.integers(0, 3), max_size=3)),
        draw(st.sampled_from([through_a_file, through_torch_save])),
    )


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
    return Training(
        models.transformer_loss, optimizer, params, optimizer.init(params), parts, *draw(legs())
    )


def go_on(system: System, run: Training, state: Any, steps: int) -> tuple[Any, list[Any]]:
    """So many steps from a state on, which says where in the data that is; and what they report."""
    step = system.make_update_step(run.loss_fn, run.optimizer, weight_fn=weights_of, **run.settings)
    params, opt_state, position = state
    groups = system.prefetch(
        system.group(iter(run.parts), run.k, start=int(position)),
        "cpu",
        run.depth,
        weight_fn=weights_of,
    )
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
