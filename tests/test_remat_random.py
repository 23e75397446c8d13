"""A function under ``remat`` draws the same random numbers again, and leaves the generators as one call of it does."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import purestep as ps
from purestep.torch_private import may_draw
from tests.blocks import MANY, PARAMS, TRANSFORMS, Function, W, X, block, both, chain
from tests.torch_private import attention


def dropping(p: Any, x: Tensor, **how: Any) -> dict[str, Any]:
    """A block with dropout, whose derivative needs the same numbers twice."""
    out = block(p, x, **how)
    return {**out, "y": torch.nn.functional.dropout(out["y"]) ** 2}


@pytest.mark.parametrize(
    "name", [name for name in TRANSFORMS if not re.search("vmap|hess|jac", name)]
)
def test_random_numbers_are_drawn_again(name: str) -> None:
    """And the generator stands where one call of the function leaves it."""

    def seeded(block: Function) -> Any:
        torch.manual_seed(0)
        return TRANSFORMS[name](chain(block)), torch.get_rng_state()

    if name in ("value", "without gradients", "autograd", "ps.grad_and_value", "grad", "vjp"):
        both(seeded, dropping)
    else:  # Forward mode runs the function twice, and a second derivative more often.
        state = seeded(ps.remat(dropping))[1]
        assert torch.equal(state, seeded(ps.remat(dropping))[1])


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_random_numbers_under_vmap(randomness: Any) -> None:
    def seeded(transform: Callable[[Function], Any]) -> Callable[[Function], Any]:
        def run(block: Function) -> Any:
            torch.manual_seed(0)
            return transform(chain(block)), torch.get_rng_state()

        return run

    both(seeded(lambda f: vmap(grad(f), (0, None), randomness=randomness)(MANY, X)), dropping)
    both(
        seeded(
            lambda f: grad(lambda p: vmap(f, (0, None), randomness=randomness)(p, X).sum())(MANY)
        ),
        dropping,
    )


def test_a_generator_that_is_given() -> None:
    def noisy(p: Any, x: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randint(0, 3, x.shape, generator=generator)
        return (x @ p["w"]) ** 2 * noise

    def seeded(block: Function) -> Any:
        generator = torch.Generator().manual_seed(0)

        def loss(params: Any) -> Tensor:
            return block(params[1], block(params[0], X, generator), generator=generator).sum()

        return ps.grad_and_value(loss)(PARAMS), generator.get_state()

    both(seeded, noisy)


def test_who_draws_nothing_leaves_the_generator_alone() -> None:
    """Another thread may draw from it while blocks are computed again."""
    calls: list[Tensor] = []

    def meanwhile(x: Tensor) -> Tensor:
        if calls:
            thread = threading.Thread(target=torch.rand, args=(1,))
            thread.start()
            thread.join()
        calls.append(x)
        return x * x

    torch.manual_seed(0)
    torch.rand(1)
    wanted = torch.get_rng_state()
    torch.manual_seed(0)
    ps.grad_and_value(lambda w: ps.remat(meanwhile)(w).sum())(W)
    assert len(calls) == 2
    assert torch.equal(torch.get_rng_state(), wanted)


def test_attention_draws_where_it_drops() -> None:
    """All of it has the mark of what draws random numbers, and would be kept."""
    aten = torch.ops.aten
    given = [torch.ones(1, 1, 2, 4)] * 3
    assert torch.Tag.nondeterministic_seeded in attention.tags
    assert not may_draw(attention, given, {})
    assert not may_draw(attention, [*given, 0.0, True], {"scale": None})
    assert may_draw(attention, [*given, 0.1], {})
    assert may_draw(attention, given, {"dropout_p": 0.1})
    assert may_draw(aten.native_dropout.default, [given[0], 0.0, True], {})
    assert not may_draw(aten.mm.default, given[:2], {})
