"""Buffers of a module are carried through a step, as aux of the loss."""

from __future__ import annotations

from typing import Any

import torch

import purestep as ps
from tests.modules import Params, assert_equal, data, losses, made, normed, ones


def test_buffers_are_carried() -> None:
    """As ``LossTerms.aux``: their mean over microbatches is that of what the module itself makes of each."""
    module = normed()
    params, apply = ps.from_module(module)
    start = dict(module.named_buffers())
    kept = {name: buffer.clone() for name, buffer in start.items()}

    def loss_fn(p: Params, m: Any) -> ps.LossTerms:
        output, buffers = apply(p, m["x"], buffers=m["buffers"])
        return ps.LossTerms(losses(output), aux=(buffers, torch.tensor(1)))

    # The last one holds padding alone.
    group = [
        {"x": data(4, seed), "w": torch.tensor(seed < 3), "buffers": start} for seed in (1, 2, 3)
    ]
    sgd = ps.optim.sgd(0.1)
    step = ps.make_update_step(loss_fn, sgd, weight_fn=lambda m: ones(m["x"]) * m["w"])
    _, _, metrics = step(params, sgd.init(params), group)
    assert_equal(dict(module.named_buffers()), kept)
    torch.compiler.reset()
    compiled = torch.compile(apply, backend="eager", fullgraph=True)(params, data(), buffers=start)
    assert_equal(compiled[1], apply(params, data(), buffers=start)[1])
    assert_equal(dict(module.named_buffers()), kept)

    after = []
    for m in group:
        module.load_state_dict(kept, strict=False)
        module(m["x"])
        after.append({name: buffer.clone() for name, buffer in module.named_buffers()})
    totals, microbatches = metrics.aux
    for name, total in totals.items():
        assert torch.equal(total, torch.stack([each[name] for each in after]).sum(0))
    assert totals["1.num_batches_tracked"] / microbatches == 1
    assert metrics.num_microbatches == 2


def test_buffers_that_are_replaced_are_carried_too() -> None:
    params, apply = ps.from_module(made("keeping"))
    start = {"count": torch.tensor(4.0)}
    assert apply(params, data(), buffers=start)[1] == {"count": torch.tensor(5.0)}
    assert start == {"count": torch.tensor(4.0)}
