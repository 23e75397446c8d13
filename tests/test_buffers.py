"""Buffers of a module are carried through a step, as aux of the loss."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from tests.modules import (
    D,
    Of,
    assert_equal,
    data,
    linear,
    losses,
    made,
    normed,
    traced,
)


def test_buffers_are_carried(fresh_compiler: None) -> None:
    """As ``LossOutput.aux``: their mean over microbatches is that of what the module itself makes of each."""
    module = normed()
    params, apply = ps.from_module(module)
    start = dict(module.named_buffers())
    kept = {name: buffer.clone() for name, buffer in start.items()}

    def loss_fn(p: Any, m: Any) -> ps.LossOutput:
        output, buffers = apply(p, m["x"], buffers=m["buffers"])
        return ps.LossOutput(losses(output), aux=(buffers, torch.tensor(1)))

    # The last one holds padding alone.
    every, held = (
        (data(4, 1), data(4, 2), data(4, 3)),
        torch.tensor([True, True, False]),
    )
    group = [
        {"x": x, "w": w, "buffers": start} for x, w in zip(every, held, strict=True)
    ]
    sgd = ps.optim.sgd(0.1)
    step = ps.make_update_step(loss_fn, sgd, weight_fn=lambda m: m["w"].expand(4))
    _, _, metrics = step(params, sgd.init(params), group)
    compiled, eager = (
        f(params, data(), buffers=start)[1] for f in (traced(apply), apply)
    )
    assert_equal(compiled, eager)
    assert_equal(dict(module.named_buffers()), kept)
    totals, microbatches = metrics.aux
    sums = {name: torch.zeros_like(buffer) for name, buffer in kept.items()}
    for m in group:
        module.load_state_dict(kept, strict=False)
        module(m["x"])
        sums = {name: sums[name] + buffer for name, buffer in module.named_buffers()}
    assert_equal(totals, sums)
    assert totals["1.num_batches_tracked"] / microbatches == 1
    assert metrics.num_microbatches == 2


def test_evaluation_takes_the_buffers_of_training() -> None:
    """As ``to_module`` does: both say so, where a module's training writes them."""
    module, x = normed().bfloat16(), data().bfloat16()
    params, apply = ps.from_module(module)
    _, after = apply(params, x, buffers=dict(module.named_buffers()))
    some, back = (
        {"1.running_mean": after["1.running_mean"]},
        partial(ps.to_module, params, module),
    )
    for call in (partial(apply.eval, params, x), back, partial(back, buffers=some)):
        with pytest.raises(
            ValueError, match=r"buffers lacks 1\.running_.*named_buffers"
        ):
            call()
    with pytest.raises(ValueError, match=r"1\.running_var is .* of shape \(1,\)"):
        ps.to_module(params, module, buffers={**after, "1.running_var": torch.ones(1)})
    # A quotient of wide sums, as a step's aux gives it.
    mean = {name: (buffer + buffer).double() / 2 for name, buffer in after.items()}
    output, same = apply.eval(params, x, buffers=mean)
    assert_equal(same, after)
    assert same["1.num_batches_tracked"].dtype == torch.int64
    ps.to_module(params, module, buffers=mean)
    assert_equal(dict(module.named_buffers()), after)
    assert torch.equal(module.eval()(x), output)
    ps.to_module(params, module)  # which does not train any more


def test_buffers_that_are_replaced_or_written_through_data() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        m.mean.data.lerp_(x.detach().mean(0), 0.5)
        return m.a(x) - m.mean

    params, apply = ps.from_module(made("keeping"))
    start = {"count": torch.tensor(4.0)}
    for f in (apply, traced(apply)):
        assert f(params, data(), buffers=start)[1] == {"count": torch.tensor(5.0)}
    assert start == {"count": torch.tensor(4.0)}
    module: Any = Of(run, a=linear()).double()
    module.register_buffer("mean", torch.zeros(D).double())
    params, apply = ps.from_module(module)
    _, after = apply(params, data(), buffers={"mean": module.mean})
    assert not module.mean.any()
    assert torch.equal(after["mean"], data().mean(0) / 2)


def test_a_batch_norm_without_statistics_is_refused() -> None:
    """Where it is called: an update would depend on the cut, and no buffer says so."""
    module = nn.Sequential(
        linear(), nn.BatchNorm1d(D, track_running_stats=False)
    ).double()
    params, apply = ps.from_module(module)
    for call in (apply, apply.eval):
        with pytest.raises(
            ValueError, match=r"lacks statistics of 1 .*depend on the cut"
        ):
            call(params, data())
    params, apply = ps.from_module(
        nn.Sequential(linear(), nn.InstanceNorm1d(D)).double()
    )
    apply(params, data()[:, None].expand(-1, D, -1))
