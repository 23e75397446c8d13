"""Donation: each buffer is given away once, and none that the data or autograd still need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from tests.line import MICROBATCH, PARAMS, SGD, loss_fn, weight_fn


def test_donation_is_ignored_where_autograd_records() -> None:
    """A tape still needs the old values."""
    rate = torch.tensor(0.1, requires_grad=True)
    step = ps.make_update_step(loss_fn, ps.optim.sgd(rate), weight_fn=weight_fn, donate=True)
    params = {"w": torch.tensor(1.0, requires_grad=True)}
    new, _, _ = step(params, SGD.init(params), [MICROBATCH])
    new["w"].backward()
    assert params["w"] == 1
    assert rate.grad == 8


def sparse(leaf: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.arange(4)[None], leaf, (4,), check_invariants=True)


def jagged(leaf: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(leaf, torch.tensor([0, 2, 4]))


class OnItsWay(Sequence[Any]):
    """A group whose microbatches are there when somebody asks for them."""

    def __init__(self, *microbatches: Any) -> None:
        self.microbatches = microbatches

    def __len__(self) -> int:
        return len(self.microbatches)

    def __getitem__(self, place: Any) -> Any:
        return self.microbatches[place]


GROUPS: dict[str, Any] = {
    "list": lambda w: [{"x": w[:2]}],
    "sparse": lambda w: [{"x": sparse(w)}],
    "jagged": lambda w: [{"x": jagged(w)}],
    "on its way": lambda w: OnItsWay({"y": torch.ones(1)}, {"x": w[1:]}),
    "prefetched": lambda w: ps.prefetch([[{"x": w}]], "cpu", weight_fn=lambda _: torch.ones(4)),
}


@pytest.mark.parametrize("counted_first", [True, False])
@pytest.mark.parametrize("name", GROUPS)
def test_donation_sees_data_in_the_same_memory(name: str, counted_first: bool) -> None:
    """Whatever kind of tensor shares it, and however the group comes."""

    def loss(w: Tensor, _: Any) -> Any:
        return w if counted_first else ps.LossTerms(w, weights=torch.ones(4))

    step = ps.make_update_step(
        loss,
        SGD,
        weight_fn=(lambda _: torch.ones(4)) if counted_first else None,
        normalize="loss" if counted_first else "grads",
        donate=True,
    )
    w = torch.arange(4.0)
    group = GROUPS[name](w)
    with pytest.raises(ValueError, match="lets the update write over"):
        step(w, SGD.init(w), next(group) if name == "prefetched" else group)
    assert torch.equal(w, torch.arange(4.0))


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (lambda x: x.expand(4, 20), True),
        (lambda x: x[:1].expand(3), True),
        (lambda x: x.unfold(0, 3, 1), True),
        (lambda x: x.unfold(0, 3, 2)[:, ::2], True),
        (lambda x: x.unfold(0, 3, 3), False),
        (lambda x: x[::2], False),
        (lambda x: x.view(4, 5).t()[1:, ::2], False),
    ],
)
def test_donation_sees_a_leaf_that_overlaps_itself(make: Any, refused: bool) -> None:
    """By any strides; a leaf with gaps, or in another order, is given away like any other."""
    params = {"w": (w := make(torch.arange(20.0)))}
    step = ps.make_update_step(
        lambda p, _: p["w"], SGD, weight_fn=lambda _: torch.ones(w.shape), donate=True
    )
    if refused:
        with pytest.raises(ValueError, match=r"\[0\]\['w'\] overlaps itself"):
            step(params, SGD.init(params), [()])
    else:
        expected = w - 0.1 / w.numel()
        assert step(params, SGD.init(params), [()])[0]["w"] is w
        torch.testing.assert_close(w, expected)


def test_outputs_are_no_views_of_inputs() -> None:
    """What a loss hands out as aux may be a parameter; the metrics hold a copy, donated or not."""
    step = ps.make_update_step(
        lambda p, m: ps.LossTerms(loss_fn(p, m), aux=p["w"]), SGD, weight_fn=weight_fn, donate=True
    )
    params = tree.map(torch.clone, PARAMS)
    new, _, metrics = step(params, SGD.init(params), [MICROBATCH])
    assert new["w"].data_ptr() == params["w"].data_ptr()
    assert metrics.aux == 1 != new["w"]


def test_a_buffer_is_given_away_once() -> None:
    w = torch.ones(2)
    params = {"a": w, "b": w}
    step = ps.make_update_step(
        lambda p, m: p["a"] * p["b"] * m, SGD, weight_fn=torch.ones_like, donate=True
    )
    with pytest.raises(
        ValueError, match=r"\[0\]\['a'\] and \(.*\)\[0\]\['b'\] share memory: clone one of them"
    ):
        step(params, SGD.init(params), [torch.ones(2)])


def test_memory_that_is_given_away_is_not_the_datas() -> None:
    """Whichever leaf and microbatch it is; neighbours in one buffer are fine."""
    buffer = torch.arange(12.0)
    params = {"a": buffer[:2], "b": buffer[4:6], "c": buffer[8:10]}
    step = ps.make_update_step(
        lambda p, m: (p["a"] + p["b"] + p["c"]) * m["x"],
        SGD,
        weight_fn=lambda m: torch.ones(2),
        donate=True,
    )
    apart = [{"x": buffer[2:4]}, {"x": buffer[6:8]}, {"x": buffer[10:]}]
    for start, name in ((0, "a"), (1, "a"), (3, "b"), (5, "b"), (7, "c"), (9, "c")):
        before = buffer.clone()
        with pytest.raises(
            ValueError, match=rf"\[0\]\['{name}'\], but microbatches\[3\]\['x'\] shares its memory"
        ):
            step(params, SGD.init(params), [*apart, {"x": buffer[start : start + 2]}])
        assert torch.equal(buffer, before)
    data = [buffer[2:4].clone(), buffer[6:8].clone(), buffer[10:].clone()]
    step(params, SGD.init(params), apart)
    assert all(torch.equal(part["x"], old) for part, old in zip(apart, data, strict=True))
