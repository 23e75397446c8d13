"""What is rewritten in a compiler's graphs: few numbers are computed once, summands join what comes next."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep.rewrites import MANY, few_once, rewritten, summands_apart
from tests.graphs import operators_after
from tests.torch_private import code_of_the_compiler

STEP = torch.tensor(3)
LEAF = torch.linspace(-1, 1, 4 * MANY)
KEPT = "aten.as_strided.default"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is compiled yet, and nothing stays compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def corrected(step: Tensor, leaf: Tensor) -> Tensor:
    return leaf / (1 - 0.9 ** step.to(torch.float64)).to(leaf.dtype)


def test_a_costly_number_is_kept_where_many_begin_to_use_it() -> None:
    """The power and what is made of it stay together: kept is what the many see, once."""
    operators = operators_after(few_once, corrected, STEP, LEAF)
    assert operators.count(KEPT) == 1
    assert operators.index(KEPT) == operators.index("aten.div.Tensor") - 1


def test_each_of_many_networks_has_numbers_of_its_own() -> None:
    steps, leaves = torch.arange(1, 5), LEAF.repeat(4, 1)
    operators = operators_after(few_once, torch.vmap(corrected), steps, leaves)
    assert operators.count(KEPT) == 1


@pytest.mark.parametrize(
    ("step", "leaf"),
    [
        (STEP, LEAF[: MANY - 1]),  # hardly more than one
        (LEAF.abs(), LEAF),  # as many
    ],
)
def test_nothing_is_kept_that_does_not_repay_it(step: Tensor, leaf: Tensor) -> None:
    assert KEPT not in operators_after(few_once, corrected, step, leaf)


def test_nothing_is_kept_that_costs_little_or_has_no_user_among_many() -> None:
    assert KEPT not in operators_after(few_once, lambda step, leaf: leaf * (1 - step), STEP, LEAF)
    assert KEPT not in operators_after(few_once, lambda step, leaf: (0.9**step, leaf), STEP, LEAF)


def test_parts_of_what_is_costly_are_users_like_any() -> None:
    def halves(step: Tensor, leaf: Tensor) -> list[Tensor]:
        return [leaf * half for half in (0.9**step).unbind()]

    steps = torch.ones(2)
    assert KEPT not in operators_after(few_once, halves, steps, LEAF)


def test_sizes_that_are_not_known_yet_are_large() -> None:
    operators = operators_after(few_once, corrected, STEP, LEAF[:3], mode="symbolic")
    assert operators.count(KEPT) == 1
    steps, leaves = torch.arange(1, 5), LEAF.repeat(4, 1)
    operators = operators_after(few_once, torch.vmap(corrected), steps, leaves, mode="symbolic")
    assert KEPT not in operators


def test_what_has_been_kept_is_cheap_from_there_on() -> None:

    def twice(step: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
        power = 0.9**step
        return leaf * power, leaf * (1 - power)

    assert operators_after(few_once, twice, STEP, LEAF).count(KEPT) == 1


def few_of(x: Tensor) -> Tensor:
    return (-x).exp() + 0.5


@pytest.mark.parametrize(
    "function",
    [
        lambda few, many: many * few_of(few)[1, 2],
        lambda few, many: many * few_of(few).t()[:, 1:].reshape(3, 1, 1, 1),
        lambda few, many: many + few_of(few[1:].t())[..., None, None] * few_of(few)[0, 1],
        lambda few, many: many + few_of(few.t().expand(3, 2)).sum() + few_of(few)[1:, 1:].cos()[0, 1],
        lambda few, many: (many * (power := few_of(few)[0, 0] ** 2), many / power, power),
        lambda few, many: many * few_of(many.amax((2, 3)))[..., None, None],
    ],
)  # fmt: skip
def test_compiled_of_views(function: Any) -> None:
    """Whatever view of the few the many see, and in whatever order of memory the few lie."""
    few = torch.linspace(0, 1, 6).reshape(2, 3)
    many = torch.linspace(-1, 1, 6 * 8 * 8).reshape(3, 2, 8, 8)[:, :2]
    for given in (few, torch.linspace(0, 1, 6).reshape(3, 2).t()):
        torch.testing.assert_close(ps.compile(function)(given, many), function(given, many))


def test_summands_apart() -> None:
    a, b, c = torch.eye(3), torch.arange(9.0).reshape(3, 3), torch.ones(3)
    apart = ["aten.mm.default", "aten.add.Tensor"]
    assert operators_after(summands_apart, torch.addmm, c, a, b) == apart
    assert operators_after(summands_apart, torch.addmm, *(x.double() for x in (c, a, b))) == apart
    together = ["aten.addmm.default"]
    integers = (x.long() for x in (c, a, b))
    assert operators_after(summands_apart, torch.addmm, *integers) == together
    assert operators_after(summands_apart, partial(torch.addmm, beta=2), c, a, b) == together


def test_all_of_it() -> None:
    a, b = torch.eye(3), torch.arange(9.0).reshape(3, 3)
    operators = operators_after(rewritten, lambda a, b: torch.addmm(a[0], a, b), a, b)
    assert operators[-2:] == ["aten.mm.default", "aten.add.Tensor"]
    assert KEPT in operators_after(rewritten, corrected, STEP, LEAF)


def test_a_compiled_step_takes_powers_once() -> None:
    """As many as there are in the formula, in none of the loops over elements."""

    def loss_fn(params: list[Tensor], x: Tensor) -> Tensor:
        return sum((leaf @ x for leaf in params), torch.zeros(()))

    optimizer = ps.optim.adamw(0.1)
    update_step = ps.make_update_step(loss_fn, optimizer, weight_fn=lambda x: x.new_ones(()))
    params = [torch.ones(size) for size in (64, 64, 64)]
    step = ps.compile(update_step, fullgraph=True)
    given = params, optimizer.init(params), [torch.ones(64)]
    (new, *_), code = code_of_the_compiler(step, *given)
    assert code.count("std::pow(") == 2
    torch.testing.assert_close(new, update_step(*given)[0])
