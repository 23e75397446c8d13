"""Tests buffers of a module, which pass through a step as aux of the loss."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from tests.module_kinds import (
    D,
    FunctionModule,
    assert_equal,
    draw_inputs,
    linear,
    make_batch_normed,
    make_module,
    squared_losses,
    trace,
)


def test_buffers_are_carried(fresh_compiler: None) -> None:
    """Returns them as aux: the mean of what the module itself makes of each microbatch."""
    module = make_batch_normed()
    params, apply = ps.from_module(module)
    start = dict(module.named_buffers())
    start_values = {name: buffer.clone() for name, buffer in start.items()}

    def loss_fn(p: Any, m: Any) -> ps.LossOutput:
        output, buffers = apply(p, m["x"], buffers=m["buffers"])
        one = torch.tensor(1)
        return ps.LossOutput(squared_losses(output), aux=(buffers, one))

    def weight_fn(m: Any) -> Tensor:
        return m["w"].expand(4)

    def microbatch(seed: int, weight: bool) -> Any:
        return {
            "x": draw_inputs(4, seed),
            "w": torch.tensor(weight),
            "buffers": start,
        }

    # The last one holds padding alone.
    group = [
        microbatch(1, True),
        microbatch(2, True),
        microbatch(3, False),
    ]
    sgd = ps.optim.sgd(0.1)
    step = ps.make_update_step(loss_fn, sgd, weight_fn=weight_fn)
    _, _, metrics = step(params, sgd.init(params), group)

    _, eager = apply(params, draw_inputs(), buffers=start)
    _, compiled = trace(apply)(params, draw_inputs(), buffers=start)
    assert_equal(compiled, eager)
    assert_equal(dict(module.named_buffers()), start_values)

    totals, num_summed = metrics.aux
    sums = {name: torch.zeros_like(buffer) for name, buffer in start.items()}
    for m in group:
        module.load_state_dict(start_values, strict=False)
        module(m["x"])
        sums = {name: sums[name] + buffer for name, buffer in module.named_buffers()}
    assert_equal(totals, sums)
    assert totals["1.num_batches_tracked"] / num_summed == 1
    assert metrics.num_microbatches == 2


def test_evaluation_takes_the_buffers_of_training() -> None:
    """Requires them, as ``to_module`` does, where a module's training writes them."""
    module = make_batch_normed().bfloat16()
    x = draw_inputs().bfloat16()
    params, apply = ps.from_module(module)
    start = dict(module.named_buffers())
    _, after = apply(params, x, buffers=start)
    incomplete = {"1.running_mean": after["1.running_mean"]}
    for call in (
        lambda: apply.eval(params, x),
        lambda: ps.to_module(params, module),
        lambda: ps.to_module(params, module, buffers=incomplete),
    ):
        with pytest.raises(
            ValueError, match=r"buffers lacks 1\.running_.*named_buffers"
        ):
            call()
    wrong_shape = {**after, "1.running_var": torch.ones(1)}
    with pytest.raises(ValueError, match=r"1\.running_var is .* of shape \(1,\)"):
        ps.to_module(params, module, buffers=wrong_shape)

    # A quotient of wide sums, as a step's aux gives it.
    mean = {name: (buffer + buffer).double() / 2 for name, buffer in after.items()}
    output, buffers = apply.eval(params, x, buffers=mean)
    assert_equal(buffers, after)
    assert buffers["1.num_batches_tracked"].dtype == torch.int64
    ps.to_module(params, module, buffers=mean)
    assert_equal(dict(module.named_buffers()), after)
    assert torch.equal(module.eval()(x), output)
    ps.to_module(params, module)  # which does not train any more


def test_buffers_that_are_replaced_or_written_through_data() -> None:
    params, apply = ps.from_module(make_module("keeping"))
    start = {"count": torch.tensor(4.0)}
    for call in (apply, trace(apply)):
        _, after = call(params, draw_inputs(), buffers=start)
        assert after == {"count": torch.tensor(5.0)}
    assert start == {"count": torch.tensor(4.0)}

    def run(m: Any, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        m.mean.data.lerp_(mean, 0.5)
        return m.a(x) - m.mean

    module: Any = FunctionModule(run, a=linear()).double()
    module.register_buffer("mean", torch.zeros(D).double())
    params, apply = ps.from_module(module)
    _, after = apply(params, draw_inputs(), buffers={"mean": module.mean})
    assert not module.mean.any()
    assert torch.equal(after["mean"], draw_inputs().mean(0) / 2)


def test_a_batch_norm_without_statistics_is_refused() -> None:
    """Refuses the call: an update would depend on the cut, and no buffer says so."""
    norm = nn.BatchNorm1d(D, track_running_stats=False)
    module = nn.Sequential(linear(), norm).double()
    params, apply = ps.from_module(module)
    for call in (apply, apply.eval):
        with pytest.raises(
            ValueError, match=r"lacks statistics of 1 .*depend on the cut"
        ):
            call(params, draw_inputs())

    of_instances = nn.Sequential(linear(), nn.InstanceNorm1d(D)).double()
    params, apply = ps.from_module(of_instances)
    images = draw_inputs()[:, None].expand(-1, D, -1)
    apply(params, images)
