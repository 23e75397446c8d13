"""``master_weights``: params in half precision that have a float32 copy, and move as it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same, labels
from proofs.test_t06_purity import storages
from proofs.test_t08_optimizers import buffers, kinds, random_grads, random_params
from purestep import tree
from tests.halves import HALVES
from tests.optimizers import WAYS, assert_in_place_where_it_applies, updated

SHAPES = {"matrix": (4, 8), "rest": [(16,), (48,)]}
MATRICES = {"first": (4, 8), "second": (4, 4)}
INNER: dict[str, Callable[[], ps.optim.Optimizer]] = {
    "adamw": lambda: ps.optim.adamw(0.01, weight_decay=0.1),
    "sgd": lambda: ps.optim.sgd(
        ps.optim.linear_schedule(0.1, 0.01, 10), 0.9, nesterov=True, weight_decay=0.1
    ),
    "lion": lambda: ps.optim.lion(0.01),
    "clipped": lambda: ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(0.01)),
    "torch": lambda: ps.optim.from_torch(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Muon": lambda: ps.optim.from_torch(torch.optim.Muon, lr=0.01),
    "no kernels": lambda: ps.optim.chain(ps.optim.scale_by_adam(), ps.optim.descend(0.01)),
    "partition": lambda: ps.optim.partition(
        labels,
        {"matrix": ps.optim.from_torch(torch.optim.Muon), "rest": ps.optim.adamw(0.01)},
    ),
}


def shapes_for(name: str) -> Any:
    """Muon is for matrices."""
    return MATRICES if name == "Muon" else SHAPES


def to(dtype: torch.dtype, value: Any) -> Any:
    """The same numbers, rounded to the dtype."""
    return tree.map(lambda leaf: leaf.to(dtype, copy=True), value)


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", INNER)
def test_the_master_is_the_float32_run(
    name: str, dtype: torch.dtype, grad_dtype: torch.dtype | None
) -> None:
    """Bitwise, with its whole state; and the params are the master rounded. In place too, in the same buffers."""
    generator = torch.Generator().manual_seed(0)
    params = random_params(shapes_for(name), dtype, generator)
    inner, optimizer = INNER[name](), ps.optim.master_weights(INNER[name]())
    wide = to(torch.float32, params)
    alone = (wide, inner.init(wide))
    pure = (params, optimizer.init(params))
    donated = tree.map(torch.clone, pure)
    full, places = kinds(pure), buffers(donated)
    assert optimizer.update_ is not None
    for _ in range(20):
        grads = to(grad_dtype or dtype, random_grads(wide, generator))
        given = (grads, pure[1], pure[0])
        before = tree.map(torch.clone, given)
        pure = optimizer.update(*given)
        assert_same(given, before, "(grads, opt_state, params)")
        assert not storages(pure) & storages(given)
        own = (tree.map(torch.clone, grads), donated[1], donated[0])
        donated = optimizer.update_(*own, None)
        assert buffers(donated) == places
        alone = inner.update(to(torch.float32, grads), alone[1], alone[0])
        for ours, state in (pure, donated):
            assert kinds((ours, state)) == full
            assert_same(state, ps.optim.MasterState(*alone), "opt_state")
            assert_same(ours, to(dtype, state.master), "params")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", INNER)
def test_in_place_where_it_applies(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    params = random_params(shapes_for(name), dtype, generator)
    grads = [to(torch.float32, random_grads(params, generator)) for _ in range(3)]
    assert_in_place_where_it_applies(ps.optim.master_weights(INNER[name]()), params, grads)


@pytest.mark.parametrize("dtype", HALVES)
def test_steps_too_small_for_half_precision(dtype: torch.dtype) -> None:
    """A quarter of the last bit at a time: without a master lost for ever, with it four of them make one."""
    bit = torch.finfo(dtype).eps
    params = {"w": torch.ones(3, dtype=dtype)}
    grads = {"w": torch.full((3,), -bit / 4)}
    plain, wrapped = ps.optim.sgd(1.0), ps.optim.master_weights(ps.optim.sgd(1.0))
    lost = (params, plain.init(params))
    kept = (params, wrapped.init(params))
    for number in range(1, 17):
        lost = plain.update(grads, lost[1], lost[0])
        kept = wrapped.update(grads, kept[1], kept[0])
        assert (kept[1].master["w"] == 1 + number * bit / 4).all()
    assert_same(lost[0], params)
    assert (kept[0]["w"] == 1 + 4 * bit).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_master_of_wide_params_is_a_copy_of_its_own(dtype: torch.dtype) -> None:
    """Nothing is gained, nothing breaks: the same bits, and no buffer in two places."""
    generator = torch.Generator().manual_seed(0)
    params = random_params(SHAPES, dtype, generator)
    optimizer, inner = ps.optim.master_weights(ps.optim.adamw(0.1)), ps.optim.adamw(0.1)
    state, alone = (params, optimizer.init(params)), (params, inner.init(params))
    assert not storages(state[1]) & storages(params)
    for _ in range(3):
        grads = random_grads(params, generator)
        state = optimizer.update(grads, state[1], state[0])
        alone = inner.update(grads, alone[1], alone[0])
        assert_same(state, (alone[0], ps.optim.MasterState(*alone)))
        assert len(set(buffers(state)) - {0}) == len([p for p in buffers(state) if p])


def test_params_of_several_dtypes() -> None:
    """Each leaf by its own dtype."""
    params = {
        "half": torch.ones(3, dtype=torch.bfloat16),
        "single": torch.ones(3),
        "double": torch.ones(3, dtype=torch.float64),
    }
    optimizer = ps.optim.master_weights(ps.optim.adamw(0.1))
    state = optimizer.init(params)
    dtypes = {"half": torch.float32, "single": torch.float32, "double": torch.float64}
    assert {key: leaf.dtype for key, leaf in state.master.items()} == dtypes
    moved, after = optimizer.update(params, state, params)
    assert kinds((moved, after)) == kinds((params, state))


def test_derivatives_through_master_weights() -> None:
    """The master's derivative passes through; the rounding has the derivative of the identity."""
    params = {"w": torch.tensor([1.0, -2.0], dtype=torch.bfloat16)}
    grads = {"w": torch.tensor([0.5, 0.25])}
    optimizer = ps.optim.master_weights(ps.optim.sgd(0.125))
    state = optimizer.init(params)

    def moved(grads: Any) -> tuple[Tensor, Tensor]:
        new, after = optimizer.update(grads, state, params)
        return new["w"].sum(), after.master["w"].sum()

    for index in (0, 1):
        slope = torch.func.grad(lambda g, index=index: moved(g)[index])(grads)
        assert_same(slope, {"w": torch.full((2,), -0.125)})


def test_master_weights_refuse() -> None:
    with pytest.raises(TypeError, match=r"wraps an Optimizer, got Transform: .*descend\(lr\)"):
        ps.optim.master_weights(ps.optim.scale_by_adam())  # type: ignore[arg-type]
    optimizer = ps.optim.master_weights(ps.optim.adamw(0.1))
    params = {"w": torch.ones(2, dtype=torch.bfloat16)}
    inner = ps.optim.adamw(0.1).init(params)
    assert optimizer.update_ is not None
    for way in WAYS:
        with pytest.raises(ValueError, match=r"it is AdamWState.*, and MasterState.* was expected"):
            updated(optimizer, way, params, inner, params)
    others = optimizer.init({"w": torch.ones(3, dtype=torch.bfloat16)})
    for way in WAYS:
        with pytest.raises(
            ValueError, match=r"opt_state\.master\['w'\] is .*\(3,\), and .*\(2,\) was expected"
        ):
            updated(optimizer, way, params, others, params)
