"""Steps that are taken by ``make_backward``, as a training loop takes them."""

from typing import Any

import torch

import purestep as ps
from purestep import tree
from purestep.step import apply_update


class Leaves(torch.nn.Module):
    """Holds the leaves of a tree as parameters, in their own memory.

    Their ``.grad`` has the dtype in which a step sums.
    """

    def __init__(self, params: Any, accum_dtype: torch.dtype | None) -> None:
        super().__init__()
        leaves, self.spec = tree.flatten(params)
        self.positions = tree.unflatten(self.spec, range(len(leaves)))
        self.leaves = torch.nn.ParameterList(leaves)
        for leaf in self.leaves:
            leaf.grad_dtype = accum_dtype or tree.accumulation_dtype(leaf.dtype)

    def forward(self) -> Any:
        """Returns the tree, rebuilt without its ``TreeSpec``, which a compiler cannot use."""
        return self.rebuild(self.positions)

    def rebuild(self, positions: Any) -> Any:
        """Replaces the positions in a tree by the parameters there."""
        if isinstance(positions, int):
            return self.leaves[positions]
        if isinstance(positions, dict):
            items = {key: self.rebuild(value) for key, value in positions.items()}
            return items if type(positions) is dict else type(positions)(items)
        if isinstance(positions, list):
            return [self.rebuild(value) for value in positions]
        if isinstance(positions, tuple):
            values = tuple(self.rebuild(value) for value in positions)
            is_named = hasattr(positions, "_fields")
            return type(positions)(*values) if is_named else values
        return positions


def make_bridged_step(
    loss_fn: Any,
    optimizer: ps.optim.Optimizer,
    *,
    on_nonfinite: str = "propagate",
    donate: bool = False,
    grad_and_value: Any = None,
    **settings: Any,
) -> Any:
    """Makes an update step of ``make_backward`` and what a loop does after it."""

    def step(params: Any, opt_state: Any, microbatches: Any) -> Any:
        model = Leaves(params, settings.get("accum_dtype"))

        def loss_of_model(model: Leaves, microbatch: Any) -> Any:
            return loss_fn(model(), microbatch)

        backward = ps.make_backward(model, loss_of_model, **settings)
        metrics = backward(microbatches)
        grads = tree.unflatten(model.spec, [leaf.grad for leaf in model.leaves])
        applied = metrics.applied
        if on_nonfinite == "skip":
            applied = applied & tree.all_finite(grads)
        new_params, new_state = apply_update(
            optimizer, grads, opt_state, params, applied, donate=donate
        )
        return new_params, new_state, metrics._replace(applied=applied)

    return step
