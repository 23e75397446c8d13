"""What is remembered of a tree never takes the place of the tree itself."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep.form import flat, once


def rows(batch: Any) -> Tensor:
    return torch.ones(batch["x"].shape[:-1])


def test_keys_stay_in_their_own_order() -> None:
    """Dicts are equal in whatever order their keys are, and a network of layers in a dict is not."""

    def layers(params: dict[str, Tensor], batch: Any) -> Tensor:
        x = batch["x"]
        for weight in params.values():
            x = torch.tanh(x @ weight)
        return x.sum(-1)

    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(3, 3, generator=generator) for name in ("stem", "body", "head")}
    in_order = {name: params[name] for name in sorted(params)}
    group = [{"x": torch.ones(4, 3)}]
    for donate in (False, True):
        optimizer = ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(0.1))
        step = ps.make_update_step(layers, optimizer, weight_fn=rows, donate=donate)
        for given in (in_order, params):
            own = ps.tree.map(torch.clone, given)
            expected = layers(own, group[0]).mean()
            new, opt_state, metrics = step(own, optimizer.init(own), group)
            assert torch.allclose(metrics.loss, expected)
            assert [*new] == [*opt_state[1].mu] == [*given]


register: Any = optree.register_pytree_node_class


@register(namespace=ps.tree.NAMESPACE)
class Net:
    """A weight, and what is equal to other things."""

    def __init__(self, w: Any, static: Any) -> None:
        self.w, self.static = w, static

    def tree_flatten(self) -> Any:
        return (self.w,), self.static, ("w",)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Net:
        return cls(children[0], static)


def test_static_data_stays_its_own() -> None:
    """What is equal to it, as 2.0 to 2, is not put in its place."""
    optimizer = ps.optim.sgd(0.1)
    step = ps.make_update_step(
        lambda net, batch: (net.w * batch["x"]).sum(-1), optimizer, weight_fn=rows
    )
    for static in (2.0, 2, True, 1):
        net = Net(torch.ones(2), static)
        new, _, _ = step(net, optimizer.init(net), [{"x": torch.ones(3, 2)}])
        assert type(new.static) is type(static)


@register(namespace=ps.tree.NAMESPACE)
class Rows:
    """Two rows, whose leaf is made of both."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def tree_flatten(self) -> Any:
        return (torch.stack(self.rows),), None, ("stacked",)

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Rows:
        (leaf,) = children
        return cls([*leaf.unbind()] if isinstance(leaf, Tensor) else [leaf])


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("make", [ps.optim.sgd, ps.optim.adamw, ps.optim.lion])
def test_containers_are_made_anew(make: Any, donate: bool) -> None:
    """The caller's stay as they are, even where they are given away: they need not hold the leaves that they consist of."""

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return (torch.stack(params["both"].rows).sum(0) * batch["x"]).sum(-1)

    params = {"both": Rows([torch.ones(2), torch.ones(2)])}
    opt_state = make(0.1).init(params)
    step = ps.make_update_step(loss_fn, make(0.1), weight_fn=rows, donate=donate)
    new, after, _ = step(params, opt_state, [{"x": torch.ones(3, 2)}])
    assert new is not params
    assert after is not opt_state
    assert all((row < 1).all() for row in new["both"].rows)


def test_what_follows_from_a_form_is_worked_out_once() -> None:
    asked: list[int] = []

    @once
    def leaves(form: Any) -> int:
        asked.append(len(form.kinds))
        return len(form.kinds)

    for _ in range(2):
        assert leaves(flat({"w": torch.ones(2), "b": torch.zeros(2)}).form) == 2
    assert leaves(flat({"w": torch.ones(2, dtype=torch.float64)}).form) == 1
    assert asked == [2, 1]
