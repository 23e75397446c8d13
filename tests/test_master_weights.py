"""``master_weights``: params in half precision that have a float32 copy, and move as it does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same, labels
from proofs.test_t06_purity import storages
from proofs.test_t08_optimizers import random_grads, random_params
from purestep import tree
from tests.halves import HALVES
from tests.optimizers import WAYS, states_of, updated

SHAPES = {"matrix": (4, 8), "rest": [(16,), (48,)]}
MATRICES = {"first": (4, 8), "second": (4, 4)}
INNER: dict[str, Callable[[], ps.optim.Optimizer]] = {
    "adamw": lambda: ps.optim.adamw(0.01, weight_decay=0.1),
    "sgd": lambda: ps.optim.sgd(
        ps.optim.linear_schedule(0.1, 0.01, 10), 0.9, nesterov=True, weight_decay=0.1
    ),
    "clipped": lambda: ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.lion(0.01)),
    "torch": lambda: ps.optim.from_torch(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Muon": lambda: ps.optim.from_torch(torch.optim.Muon, lr=0.01),
    "partition": lambda: ps.optim.partition(
        labels,
        {"matrix": ps.optim.from_torch(torch.optim.Muon), "rest": ps.optim.adamw(0.01)},
    ),
}


def to(dtype: torch.dtype, value: Any) -> Any:
    """The same numbers, rounded to the dtype."""
    return tree.map(lambda leaf: leaf.to(dtype, copy=True), value)


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("name", INNER)
def test_the_master_is_the_wide_run(
    name: str, dtype: torch.dtype, grad_dtype: torch.dtype | None
) -> None:
    """Bitwise, with its whole state; and the params are the master rounded.

    Of wide params, a master is a copy that gains nothing.
    """
    generator = torch.Generator().manual_seed(0)
    # Muon is for matrices.
    params = random_params(MATRICES if name == "Muon" else SHAPES, dtype, generator)
    wide_dtype = tree.accumulation_dtype(dtype)
    inner, optimizer = INNER[name](), ps.optim.master_weights(INNER[name]())
    wide = to(wide_dtype, params)
    alone = (wide, inner.init(wide))
    grads = [to(grad_dtype or dtype, random_grads(wide, generator)) for _ in range(5)]
    assert not storages(optimizer.init(params)) & storages(params)
    for one, (ours, state) in zip(grads, states_of(optimizer, params, grads), strict=True):
        alone = inner.update(to(wide_dtype, one), alone[1], alone[0])
        assert_same(state, ps.optim.MasterState(*alone), "opt_state")
        assert_same(ours, to(dtype, state.master), "params")


@pytest.mark.parametrize("dtype", HALVES)
def test_steps_too_small_for_half_precision(dtype: torch.dtype) -> None:
    """A quarter of the last bit at a time: four of them make one."""
    bit = torch.finfo(dtype).eps
    params = {"w": torch.ones(3, dtype=dtype)}
    grads = {"w": torch.full((3,), -bit / 4)}
    optimizer = ps.optim.master_weights(ps.optim.sgd(1.0))
    kept = (params, optimizer.init(params))
    for number in range(1, 17):
        kept = optimizer.update(grads, kept[1], kept[0])
        assert (kept[1].master["w"] == 1 + number * bit / 4).all()
    assert (kept[0]["w"] == 1 + 4 * bit).all()


def test_derivatives_through_master_weights() -> None:
    """The master's derivative passes through; rounding has that of the identity."""
    params = {"w": torch.tensor([1.0, -2.0], dtype=torch.bfloat16)}
    optimizer = ps.optim.master_weights(ps.optim.sgd(0.125))
    state = optimizer.init(params)

    def moved(grads: Any) -> tuple[Tensor, Tensor]:
        new, after = optimizer.update(grads, state, params)
        return new["w"].sum(), after.master["w"].sum()

    for slopes in torch.func.jacrev(moved)({"w": torch.tensor([0.5, 0.25])}):
        assert_same(slopes, {"w": torch.full((2,), -0.125)})


@pytest.mark.parametrize("way", WAYS)
def test_master_weights_refuse(way: str) -> None:
    with pytest.raises(TypeError, match=r"wraps an Optimizer, got Transform: .*descend\(lr\)"):
        ps.optim.master_weights(ps.optim.scale_by_adam())  # type: ignore[arg-type]
    optimizer = ps.optim.master_weights(ps.optim.adamw(0.1))
    params, longer = ({"w": torch.ones(size, dtype=torch.bfloat16)} for size in (2, 3))
    inner = ps.optim.adamw(0.1).init(params)
    with pytest.raises(ValueError, match=r"it is AdamWState.*, and MasterState.* was expected"):
        updated(optimizer, way, params, inner, params)
    others = r"opt_state\.master\['w'\] is .*\(3,\), and .*\(2,\) was expected"
    with pytest.raises(ValueError, match=others):
        updated(optimizer, way, params, optimizer.init(longer), params)
