"""Donation: each buffer is given away once, and none that the data or autograd still need."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (lambda x: x.expand(4, 20), True),
        (lambda x: x.unfold(0, 3, 1), True),
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


def refused(params: Any, group: Any, match: str) -> None:
    """Before anything is written."""
    before = tree.map(torch.clone, params)
    step = ps.make_update_step(
        lambda p, m: p["a"] * p["b"] * m["x"], SGD, weight_fn=lambda m: torch.ones(2), donate=True
    )
    with pytest.raises(ValueError, match=match):
        step(params, SGD.init(params), group)
    assert all(map(torch.equal, params.values(), before.values()))
    apart = tree.map(torch.clone, params)
    assert step(apart, SGD.init(apart), group)[0]["a"] is apart["a"]


def test_leaves_that_share_memory_are_refused() -> None:
    """One tensor twice, and parts of one buffer, too."""
    group, w, buffer = [{"x": torch.ones(2)}], torch.ones(2), torch.ones(8)
    match = r"\[0\]\['a'\] and \(.*\)\[0\]\['b'\] share memory: clone one of them"
    refused({"a": w, "b": w}, group, match)
    refused({"a": buffer[:2], "b": buffer[4:6]}, group, match)


def test_data_that_shares_memory_is_refused() -> None:
    buffer = torch.ones(8)
    group = [{"x": torch.ones(2)}, {"x": buffer[2:4]}]
    match = r"\[0\]\['a'\], but microbatches\[1\]\['x'\] shares its memory"
    refused({"a": buffer[:2], "b": torch.ones(2)}, group, match)
