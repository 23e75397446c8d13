"""Donation: each buffer is given away once, and none that the data or autograd still need."""

from typing import Any

import pytest
import torch

import purestep as ps
from purestep import tree
from tests.line import MICROBATCH, PARAMS, SGD, loss_fn, weight_fn


def test_outputs_are_no_views_of_inputs() -> None:
    """What a loss hands out as aux may be a parameter; the metrics hold a copy."""
    step = ps.make_update_step(
        lambda p, m: ps.LossOutput(loss_fn(p, m), aux=p["w"]),
        SGD,
        weight_fn=weight_fn,
        donate=True,
    )
    params = tree.map(torch.clone, PARAMS)
    new, _, metrics = step(params, SGD.init(params), [MICROBATCH])
    assert new["w"].data_ptr() == params["w"].data_ptr()
    assert metrics.aux == 1 != new["w"]


SHARED = r"\[0\]\['a'\], but \(.*\)\[0\]\['b'\] shares its memory: clone one of them"
DATA = r"\[0\]\['a'\], but microbatches\[1\]\['x'\] shares its memory"
ITSELF, ONE = r"\[0\]\['a'\] overlaps itself", torch.ones(1)
CASES: list[tuple[Any, str]] = [
    (lambda x: {"a": x[:2], "b": x[:2], "x": ONE}, SHARED),
    (lambda x: {"a": x[:2], "b": x[4:6], "x": ONE}, SHARED),
    (lambda x: {"a": x[:2], "b": ONE.clone(), "x": x[2:4]}, DATA),
    (lambda x: {"a": x.expand(2, 8), "b": ONE.clone(), "x": ONE}, ITSELF),
    (lambda x: {"a": x.unfold(0, 3, 1), "b": ONE.clone(), "x": ONE}, ITSELF),
    # A leaf with gaps, or in another order, is given away like any other.
    (lambda x: {"a": x.unfold(0, 3, 3), "b": ONE.clone(), "x": ONE}, ""),
    (lambda x: {"a": x[::2], "b": ONE.clone(), "x": ONE}, ""),
    (lambda x: {"a": x.view(2, 4).t()[1:], "b": ONE.clone(), "x": ONE}, ""),
]


@pytest.mark.parametrize(("make", "refused"), CASES)
def test_leaves_and_data_that_share_memory_are_refused(make: Any, refused: str) -> None:
    """Before anything is written, by any strides."""
    params = make(torch.arange(8.0))
    beside = ["a word", torch.eye(2).to_sparse()]
    group = [{"x": torch.ones(1), "beside": beside}, {"x": params.pop("x")}]
    shape, apart = params["a"].shape, tree.map(torch.clone, params)
    how: Any = {"weight_fn": lambda m: torch.ones(shape)}
    loss_fn: Any = lambda p, m: p["a"] * p["b"] * m["x"]  # noqa: E731
    plain, step = (
        ps.make_update_step(loss_fn, SGD, donate=d, **how) for d in (False, True)
    )
    expected = plain(apart, SGD.init(apart), group)[0]
    if refused:
        with pytest.raises(ValueError, match=refused):
            step(params, SGD.init(params), group)
        assert all(map(torch.equal, params.values(), apart.values()))
        params = apart
    new, _, _ = step(params, SGD.init(params), group)
    assert all(new[name].data_ptr() == params[name].data_ptr() for name in params)
    assert all(map(torch.equal, new.values(), expected.values()))


def test_a_call_under_a_transform_does_not_make_the_checks_of_later_ones() -> None:
    params, x = dict.fromkeys("ab", torch.ones(2)), torch.ones(2)
    state, loss_fn = SGD.init(params), lambda p, m: p["a"] * p["b"] * m
    step = ps.make_update_step(loss_fn, SGD, weight_fn=torch.ones_like, donate=True)
    torch.func.grad(lambda p: step(p, state, [x])[0]["a"].sum())(params)
    with pytest.raises(ValueError, match="memory"):
        step(params, state, [x])
