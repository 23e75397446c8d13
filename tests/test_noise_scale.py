"""``measured_update_step``: by hand, over ranks, and against the gradients of all examples."""

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.examples.differential_privacy import init, loss_fn, people
from purestep.examples.noise_scale import direct, measured_update_step

SGD = ps.optim.sgd(0.5)
FEW, ONE = torch.tensor([2.0, 4.0]), torch.tensor([6.0])
EMPTY: list[Tensor] = []


def measured(group: list[Tensor], axis: Any = ps.LocalAxis()) -> tuple[Tensor, Tensor, Tensor]:
    """Of tokens whose gradient is their number."""
    w = torch.tensor(1.0)
    w, _, found = measured_update_step(
        w, SGD.init(w), group, loss_fn=lambda w, x: w * x, optimizer=SGD,
        weight_fn=lambda x: x != 0, axis=axis,
    )  # fmt: skip
    assert axis.size > 1 or found.scale == found.trace / found.squared_norm
    return w, found.trace, found.squared_norm


def on_threads() -> Any:
    axis = ps.testing.ThreadAxis(3)
    first, *others = axis.map(lambda group: measured(group, axis))([[FEW], EMPTY, [ONE]])
    assert all(other == first for other in others)
    return first


def on_simulated_ranks() -> Any:
    axis = ps.VmapAxis(2)
    run: Any = axis.map(lambda x: measured([x], axis), in_dims=0, out_dims=None)
    return run(torch.stack([FEW, torch.tensor([6.0, 0.0])]))


HOW: dict[str, Any] = {
    "one by one": lambda: measured([FEW, ONE]),
    "reversed": lambda: measured([ONE, FEW]),
    "with empty ones": lambda: measured([torch.zeros(3), FEW, torch.zeros(0), ONE]),
    "threads": on_threads,
    "simulated ranks": on_simulated_ranks,
}


@pytest.mark.parametrize("how", HOW)
def test_the_scale_by_hand(how: str) -> None:
    """Σ n g² = 2 · 3² + 1 · 6² = 54, N g² = 3 · 4² = 48, and K = 2; the update is by g = 4."""
    assert [*map(float, HOW[how]())] == [1 - 0.5 * 4, 6.0, 14.0]


@pytest.mark.parametrize("sizes", [(4, 4), (2, 5, 1)])
def test_the_estimates_are_those_of_all_examples(sizes: tuple[int, ...]) -> None:
    """Of a network, the mean of many estimates is the direct one, to five standard errors."""
    generator = torch.Generator().manual_seed(0)
    params, data, steps = tree.map(Tensor.double, init(generator)), people(200, seed=0), 400
    data["x"] = data["x"].double()
    found = []
    for _ in range(steps):
        rows = torch.randint(200, (sum(sizes),), generator=generator).split(sizes)
        group = [{name: leaf[each] for name, leaf in data.items()} for each in rows]
        *_, estimate = measured_update_step(
            params, SGD.init(params), group, loss_fn=loss_fn, optimizer=SGD
        )
        found.append(torch.stack(estimate))
    estimates, expected = torch.stack(found), torch.stack(direct(params, data))
    error = (estimates.mean(0) - expected).abs()
    assert (error < 5 * estimates.std(0) / steps**0.5).all()
    # A bias of the size that is taken away, tr Σ / N, would be seen.
    assert expected[0] / sum(sizes) > 10 * estimates[:, 1].std() / steps**0.5
