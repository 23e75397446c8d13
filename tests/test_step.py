"""What a step gives: metrics by hand, dtypes as they were, and the flow that anyone can copy."""

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from tests.line import MICROBATCH, PARAMS, SGD, loss_fn, step_with, weight_fn


def test_none_in_params_comes_back() -> None:
    params = {**PARAMS, "bias": None}
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
    new, _, _ = step(params, SGD.init(params), [MICROBATCH])
    assert new["bias"] is None
    assert new["w"] != 1


def test_metrics() -> None:
    """Σ w ℓ / N, N, ‖∇L‖ and the rest, by hand."""
    _, _, metrics = step_with()
    assert metrics.loss == (4 + 9) / 2
    assert metrics.num_tokens == 2
    assert metrics.num_microbatches == 1
    assert metrics.grad_norm == abs((2 * -2 * 1 + 2 * -3 * 2) / 2)
    assert metrics.applied
    assert metrics.aux == ()
    assert all(isinstance(leaf, Tensor) for leaf in tree.leaves_of(metrics))


def test_flow_can_be_copied() -> None:
    """The public parts, called in order, are the step."""
    optimizer = ps.optim.adamw(0.1)
    state, axis = optimizer.init(PARAMS), ps.LocalAxis()
    group = [MICROBATCH, MICROBATCH]
    total = ps.psum(ps.count(group, weight_fn), axis)
    sums = ps.accumulate(loss_fn, PARAMS, group, weight_fn=weight_fn, total=total)
    grads, loss, *_ = ps.psum(sums, axis)
    params, _ = optimizer.update(grads, state, PARAMS)
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=weight_fn)
    expected, _, metrics = step(PARAMS, state, group)
    assert params["w"] == expected["w"]
    assert loss == metrics.loss


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_weights_beyond_the_losses_dtype(scale: float) -> None:
    """Only their ratio to N matters, so it is what is rounded."""
    scaled = step_with(weight_fn=lambda m: torch.full_like(m["x"], scale, dtype=torch.float64))
    assert torch.equal(scaled[0]["w"], step_with()[0]["w"])


def test_an_overflowing_count_is_not_applied_where_it_cannot_be_read() -> None:
    """Under a transform it is the identity, for the member that it concerns."""
    step = ps.make_update_step(loss_fn, SGD, weight_fn=lambda m: m["w"].expand(2))

    def stepped(weight: Tensor) -> tuple[Tensor, Tensor]:
        new, _, metrics = step(PARAMS, SGD.init(PARAMS), [{**MICROBATCH, "w": weight}])
        return new["w"], metrics.applied

    w, applied = torch.vmap(stepped)(torch.tensor([1.0, 1e308], dtype=torch.float64))
    assert applied.tolist() == [True, False]
    assert w[1] == PARAMS["w"] != w[0]
