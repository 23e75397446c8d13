"""What a loss reads may change between calls of a compiled step, and is looked at each time; what the libraries hold is not."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep.torch_private import unwatched
from tests.counted_graphs import GROUPS, PLAIN, loss_fn, start, weight_fn

pytestmark = pytest.mark.usefixtures("fresh_compiler")


SCALE = [1.0]


def test_what_the_loss_reads_is_looked_at() -> None:
    """Globals and what a loss closes over may change; that of the libraries is not looked at any more."""
    factor = 1.0

    def scaled(params: Any, m: Any) -> Tensor:
        return loss_fn(params, m) * factor * SCALE[0]

    whole = ps.compile(
        ps.make_update_step(scaled, PLAIN, weight_fn=weight_fn), backend="eager", fullgraph=True
    )
    losses = []
    for factor, scale in ((1.0, 1.0), (2.0, 1.0), (2.0, 4.0)):  # noqa: B007
        SCALE[0] = scale
        losses.append(float(whole(start(), PLAIN.init(start()), GROUPS[0])[2].loss))
    assert losses == [losses[0], 2 * losses[0], 8 * losses[0]]


def test_keys_that_are_named_like_the_libraries_own_are_looked_at() -> None:
    factors = {"_tuple_new": 2.0, "__builtins_dict__": 3.0}

    def scaled(x: Tensor) -> Tensor:
        return x * factors["_tuple_new"] * factors["__builtins_dict__"]

    whole = ps.compile(scaled, backend="eager")
    assert whole(torch.ones(())) == 6
    factors.update(_tuple_new=5.0, __builtins_dict__=7.0)
    assert whole(torch.ones(())) == 35


@pytest.mark.parametrize("whole", [False, True])
def test_names_of_a_loss_without_a_module_are_looked_at(whole: bool) -> None:
    """As ``exec`` makes one, of a file of settings, say."""
    names: dict[str, Any] = {"factor": 1.0, "loss_fn": loss_fn}
    exec("def scaled(params, m):\n    return loss_fn(params, m) * factor", names)
    compiler = partial(ps.compile, backend="eager")
    step = ps.make_update_step(
        names["scaled"], PLAIN, weight_fn=weight_fn, compile=False if whole else compiler
    )
    step = compiler(step) if whole else step
    losses = []
    for names["factor"] in (1.0, 2.0):
        losses.append(float(step(start(), PLAIN.init(start()), GROUPS[1])[2].loss))
    assert losses == [losses[0], 2 * losses[0]]


def test_what_a_step_closes_over_is_not_looked_at() -> None:
    """Functions and constants in cells of purestep's own functions stay; tensors and what is the caller's may change."""

    class Guard(NamedTuple):
        name: str
        value: Any

    step: Any = ps.make_update_step(loss_fn, PLAIN, weight_fn=weight_fn)
    looked_at = {
        Guard("loss_fn", step): False,
        Guard("donate", False): False,
        Guard("params", (1,)): True,
        Guard("loss_fn.__closure__[0].cell_contents", loss_fn): False,
        Guard("loss_fn.__closure__[0].cell_contents.rate", 0.5): True,
        Guard("loss_fn.__closure__[0].cell_contents.__closure__[0].cell_contents", 0.5): True,
        Guard("loss_fn.__closure__[1].cell_contents", 0.5): False,
        Guard("loss_fn.__closure__[2].cell_contents", torch.ones(())): True,
    }
    look = unwatched(step, ["purestep"])["guard_filter_fn"]
    assert look([*looked_at]) == [*looked_at.values()]
