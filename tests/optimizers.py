"""Optimizers of every kind, small params and gradients for them, and what holds of each in place."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

import purestep as ps
from proofs.strategies import RECIPES as RECIPES, assert_same
from proofs.test_t06_purity import storages
from proofs.test_t08_optimizers import buffers, kinds
from purestep import tree

PARAMS = {"w": torch.ones(2, 2), "b": torch.ones(2)}
GRADS = {"w": torch.full((2, 2), 3.0), "b": torch.full((2,), -2.0)}
TRANSFORMS = {
    "clip": ps.optim.clip_by_global_norm(1.0),
    "momentum": ps.optim.momentum(0.5, nesterov=True),
    "decay": ps.optim.add_decayed_weights(0.5),
}
WAYS = ["update", "update_"]


def updated(part: Any, way: str, grads: Any, state: Any, params: Any) -> Any:
    """By ``update``, or in place where the step is taken."""
    if way == "update":
        return part.update(grads, state, params)
    return part.update_(grads, state, params, None)


def states_of(optimizer: ps.optim.Optimizer, params: Any, grads: Iterable[Any]) -> Iterator[Any]:
    """``(params, opt_state)`` after each update, which is the same to the bit in place.

    ``update`` leaves its arguments alone. ``update_`` keeps to the buffers, and is the identity
    where it does not apply. Structure, dtypes and shapes are those of ``init``.
    """
    state = (params, optimizer.init(params))
    full = kinds(state)
    assert optimizer.update_ is not None
    for one in grads:
        given = (one, state[1], state[0])
        before = tree.map(torch.clone, given)
        moved = optimizer.update(*given)
        assert_same(given, before, "(grads, opt_state, params)")
        assert not storages(moved) & storages(given)
        assert kinds(moved) == full
        for applied in (None, torch.tensor(True), torch.tensor(False)):
            own, ours, opt_state = tree.map(torch.clone, (one, *state))
            places = buffers((ours, opt_state))
            result = optimizer.update_(own, opt_state, ours, applied)
            left_out = applied is not None and not applied
            assert_same(result, state if left_out else moved, f"state where {applied=}")
            assert buffers(result) == places
        state = moved
        yield state
