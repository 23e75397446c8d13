"""``measured_update_step``: by hand, over ranks, and against the gradients of all examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.examples.differential_privacy import init, loss_fn, people
from purestep.examples.noise_scale import NoiseScale, direct, measured_update_step

SGD = ps.optim.sgd(0.5)
GROUP = [torch.tensor([2.0, 4.0]), torch.tensor([6.0])]


def linear(w: Tensor, x: Tensor) -> Tensor:
    """A token's gradient is its number."""
    return w * x


def measured(group: list[Tensor], axis: Any = ps.LocalAxis()) -> tuple[Tensor, NoiseScale]:
    w = torch.tensor(1.0)
    w, _, found = measured_update_step(
        w, SGD.init(w), group,
        loss_fn=linear, optimizer=SGD, weight_fn=lambda x: x != 0, axis=axis,
    )  # fmt: skip
    return w, found


def assert_by_hand(w: Tensor, found: NoiseScale) -> None:
    """Σ n g² = 2 · 3² + 1 · 6² = 54, N g² = 3 · 4² = 48, and K = 2; the update is by g = 4."""
    assert w == 1 - 0.5 * 4
    assert (float(found.trace), float(found.squared_norm)) == (6.0, 14.0)
    assert found.scale == torch.tensor(6.0, dtype=torch.float64) / 14


@pytest.mark.parametrize(
    "group",
    [GROUP, GROUP[::-1], [torch.zeros(3), GROUP[0], torch.zeros(0), GROUP[1]]],
    ids=["as it is", "reversed", "with empty ones"],
)
def test_by_hand(group: list[Tensor]) -> None:
    assert_by_hand(*measured(group))


def test_over_ranks() -> None:
    threads = ps.testing.ThreadAxis(3)
    for found in threads.map(lambda group: measured(group, threads))([GROUP[:1], [], GROUP[1:]]):
        assert_by_hand(*found)
    vmap = ps.VmapAxis(2)

    def run(x: Tensor) -> Any:
        w, found = measured([x], vmap)
        return w, found.trace, found.squared_norm

    on_ranks = vmap.map(run, in_dims=0, out_dims=None)
    w, *parts = on_ranks(torch.tensor([[2.0, 4.0], [6.0, 0.0]]))
    assert_by_hand(w, NoiseScale(*parts))


def test_the_update_is_that_of_a_step() -> None:
    """To the bit, in exact arithmetic: eight tokens whose gradients are whole numbers."""
    group = [torch.arange(1.0, 4.0), torch.arange(5.0, 10.0)]
    w = torch.tensor(1.0)
    step = ps.make_update_step(linear, SGD, weight_fn=lambda x: x != 0)
    assert torch.equal(step(w, SGD.init(w), group)[0], measured(group)[0])


@pytest.mark.parametrize("sizes", [(4, 4), (2, 5, 1), (3, 1, 2, 2)])
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
