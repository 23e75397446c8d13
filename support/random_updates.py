"""Random params and gradients for optimizers, and the states that follow."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from support.purity import storages_in
from support.ranks import addresses
from support.strategies import assert_same


def random_params(shapes: Any, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """Draws normal numbers, in a tree like that of the shapes."""
    if isinstance(shapes, dict):
        params = {}
        for key, below in shapes.items():
            params[key] = random_params(below, dtype, generator)
        return params
    if isinstance(shapes, list):
        return [random_params(below, dtype, generator) for below in shapes]
    return torch.randn(shapes, generator=generator, dtype=dtype)


def random_grads(params: Any, generator: torch.Generator) -> Any:
    """Draws normal numbers, and now and then an exact zero."""

    def draw(leaf: Tensor) -> Tensor:
        present = torch.rand(leaf.shape, generator=generator) > 0.2
        normal = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        return normal * present

    return tree.map(draw, params)


def signature_of(value: Any) -> list[Any]:
    """Returns the structure, dtypes and shapes, which stay what ``init`` makes them."""
    leaves, structure = tree.flatten(value)
    return [structure, *((leaf.dtype, leaf.shape) for leaf in leaves)]


def iterate_states(
    optimizer: ps.optim.Optimizer,
    params: Any,
    grads: Iterable[Any],
    *,
    formula: bool = True,
) -> Iterator[Any]:
    """Yields ``(params, opt_state)`` after each update, and asserts the same bits in place.

    It also asserts that ``update`` leaves its arguments alone. ``update_`` has to write to the same
    memory, and be the identity where it does not apply. Structure, dtypes and shapes have to be
    those of ``init``. Without ``formula``, a kernel rounds otherwise than ``update``, which is not
    called.
    """
    state = (params, optimizer.init(params))
    expected_kinds = signature_of(state)
    for grad in grads:
        if formula:
            new_state = check_update(optimizer, grad, state)
        else:
            new_state = update_in_place(optimizer, grad, state, None)
        assert signature_of(new_state) == expected_kinds
        for applied in (None, torch.tensor(True), torch.tensor(False)):
            expected = state if applied is not None and not applied else new_state
            actual = update_in_place(optimizer, grad, state, applied)
            assert_same(actual, expected, f"state where {applied=}")
        state = new_state
        yield state


def check_update(optimizer: ps.optim.Optimizer, grad: Any, state: Any) -> Any:
    """Updates out of place, and checks that inputs stay as they are and share no memory with outputs."""
    params, opt_state = state
    inputs = (grad, opt_state, params)
    before = tree.map(torch.clone, inputs)
    new_state = optimizer.update(*inputs)
    assert_same(inputs, before, "(grads, opt_state, params)")
    shared = storages_in(new_state) & storages_in(inputs)
    assert not shared, "an output lives in an input's storage"
    return new_state


def update_in_place(
    optimizer: ps.optim.Optimizer, grad: Any, state: Any, applied: Tensor | None
) -> Any:
    """Updates copies in place, and checks that they stay where they are in memory."""
    assert optimizer.update_ is not None
    grad, params, opt_state = tree.map(torch.clone, (grad, *state))
    before = addresses((params, opt_state))
    new_state = optimizer.update_(grad, opt_state, params, applied)
    assert addresses(new_state) == before
    return new_state
