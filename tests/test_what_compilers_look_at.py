"""What a loss reads may change between calls of a compiled step; what libraries hold may not."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep.compiling.graph import without_libraries, without_surroundings
from tests.counted_graphs import GROUPS, PLAIN, loss_fn, start, weight_fn

pytestmark = pytest.mark.usefixtures("fresh_compiler")


SCALE = [1.0]


def test_what_the_loss_reads_is_looked_at() -> None:
    """Globals and what a loss closes over may change between calls."""
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


def test_globals_of_libraries_have_no_guards() -> None:
    """What a loss reads by a like name keeps its guard, and so does what is no global."""

    class Guard(NamedTuple):
        name: str
        is_global: bool = True
        guard_type: str = "ID_MATCH"

    guards = {
        Guard("G['__import_purestep_dot_step'].weigh"): False,
        Guard("dict(G['__import_purestep_dot_types'].Count.__dict__)['__new__'].__func__"): False,
        Guard("G['__builtins_dict__7']['len']"): False,
        Guard("G['___unnamed_scope_1_c0']['_tuple_new'].__self__"): False,
        Guard("G['__import_torchtrain_dot_loss'].RATE"): True,
        Guard("G['__import___main__'].factors['_tuple_new']"): True,
        Guard("G['___unnamed_scope_1_c0']['factor']"): True,
        Guard("L['loss_fn'].__closure__[0].cell_contents", is_global=False): True,
    }
    assert without_libraries([*guards]) == [*guards.values()]
    stack = Guard("", is_global=False, guard_type="FUNCTORCH_STACK_MATCH")
    assert (without_libraries([stack]), without_surroundings([stack])) == ([True], [False])


def guards_of(step: Any) -> list[Any]:
    """Those that stay when a step is compiled whole by ``ps.compile``."""
    found: list[Any] = []

    def kept(guards: list[Any]) -> list[bool]:
        keep = without_libraries(guards)
        found.extend(guard for guard, stays in zip(guards, keep, strict=True) if stays)
        return keep

    whole = ps.compile(step, backend="eager", options={"guard_filter_fn": kept})
    whole(start(), PLAIN.init(start()), GROUPS[0])
    return found


def test_few_guards_on_globals_stay() -> None:
    """Those on what the loss reads. Should the compiler rename its globals, calls are slower."""
    found = guards_of(ps.make_update_step(loss_fn, PLAIN, weight_fn=weight_fn))
    names = [guard.name for guard in found if guard.is_global]
    assert len(names) < 40
    assert not [name for name in names if "purestep" in name or "optree" in name]
