"""Each microbatch has leaves of its own: what a loss does to them ends with it, and params are never written to."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from tests.squares import WAYS, squares, x_ones
from tests.torch_private import TorchDispatchMode


def test_a_loss_that_freezes_a_leaf() -> None:
    """For its own microbatch alone."""

    def loss_fn(p: Any, m: dict[str, Tensor]) -> Tensor:
        if m["x"] == 1:
            p[0].requires_grad_(False)
        return (p[0] + p[1]) * m["x"]

    group = [{"x": torch.tensor([x])} for x in (1.0, 2.0, 1.0)]
    params = [torch.ones(1), torch.ones(1)]
    grads, *_ = ps.accumulate(loss_fn, params, group, weight_fn=x_ones)
    assert [grad.item() for grad in grads] == [2, 4]


def test_a_loss_that_gives_a_leaf_other_values() -> None:
    """For its own microbatch alone: each begins with the params as they were given."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        w.data = 2 * w.data
        return w.square() * m["x"]

    group = [{"x": torch.tensor([2.0**m])} for m in range(3)]
    params = torch.ones(1)
    grads, loss, *_ = ps.accumulate(loss_fn, params, group, weight_fn=x_ones)
    assert [grads.item(), loss.item(), params.item()] == [2 * 2 * 7, 4 * 7, 1]


def test_a_hook_acts_on_its_own_microbatch() -> None:
    """Not on those that come later, whose losses put hooks there themselves."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        w.register_hook(lambda grad: 2 * grad)
        return w * m["x"]

    group = [{"x": torch.tensor([2.0**m])} for m in range(3)]
    assert ps.accumulate(loss_fn, torch.ones(1), group, weight_fn=x_ones).grads == 14


def test_what_a_loss_keeps_of_its_leaves_is_a_constant_later() -> None:
    """The leaves of one microbatch are not those of the next."""
    kept: list[Tensor] = []

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        kept.append(w)
        return m["x"] * w * kept[0]

    group = [{"x": torch.ones(1)}] * 3
    assert ps.accumulate(loss_fn, torch.ones(1), group, weight_fn=x_ones).grads == 2 + 1 + 1


def test_autocast_keeps_nothing_of_ours() -> None:
    """Its casts of a microbatch's leaves go with the microbatch, in a long-lived autocast too."""
    casts: list[weakref.ref[Tensor]] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.name() == "aten::_to_copy" and result.dtype == torch.bfloat16:
                casts.append(weakref.ref(result))
            return result

    def loss_fn(w: Tensor, m: Tensor) -> Tensor:
        return (m @ w).float().sum(1)

    x = [torch.ones(2, 3, dtype=torch.bfloat16)] * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            with Seen():
                ps.accumulate(loss_fn, torch.ones(3, 3), x, weight_fn=lambda m: torch.ones(2))
            assert casts
            assert all(cast() is None for cast in casts)
            casts.clear()


@pytest.mark.parametrize("how", WAYS, ids=["own", "torch.func"])
@pytest.mark.parametrize("recorded", [True, False])
def test_params_are_not_written_to_in_any_way(how: dict[str, Any], recorded: bool) -> None:
    """Neither to one that the loss needs nor to one beside it."""

    def loss_fn(name: str, p: Any, m: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            p[name].lerp_(m["x"], 0.5)
        return squares(p["w"], m)

    for name in ("running", "w"):
        params = {key: torch.zeros(1, requires_grad=recorded) for key in ("running", "w")}
        with pytest.raises(ValueError, match=rf"loss_fn wrote to params\['{name}'\] in place"):
            ps.accumulate(
                partial(loss_fn, name), params, [{"x": torch.ones(1)}], weight_fn=x_ones, **how
            )


def test_a_loss_that_marks_its_microbatch() -> None:
    """``requires_grad_`` on what it is given, to differentiate by it: the data stay as they were, step after step."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        m["x"].requires_grad_()
        (force,) = torch.autograd.grad((m["x"] * w).square().sum(), m["x"], create_graph=True)
        return force

    microbatch = {"x": torch.tensor([3.0])}
    for _ in range(2):
        grads, *_ = ps.accumulate(loss_fn, torch.ones(1), [microbatch], weight_fn=x_ones)
        assert grads == 2 * 2 * 3
        assert not microbatch["x"].requires_grad
