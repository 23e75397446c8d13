"""Modules that compute activations again: with the params of their own call."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import purestep as ps
from tests.modules import Checkpointed, assert_equal, data, grads, losses, made


def test_checkpoints_compute_again_with_the_params_of_their_call() -> None:
    """Also when ``apply`` is called with others before the backward pass."""
    module, x = made("checkpointed"), data()
    kept = Checkpointed(kept=True).double()
    kept.load_state_dict(module.state_dict())
    for reentrant in (False, True):
        module.run = functools.partial(checkpoint, use_reentrant=reentrant)
        results: list[Any] = []
        for each in (module, kept):
            params, apply = ps.from_module(each)
            one = {name: p.clone().requires_grad_() for name, p in params.items()}
            two = {name: (2 * p).requires_grad_() for name, p in params.items()}
            first, second = losses(apply(one, x)).sum(), losses(apply(two, x)).sum()
            apply({name: 3 * p for name, p in one.items()}, x)
            (first * second).backward()
            results.append({f"{n} {i}": ps[n].grad for i, ps in enumerate((one, two)) for n in ps})
        assert_equal(*results)


def test_a_step_refuses_reentrant_checkpoints() -> None:
    params, apply = ps.from_module(Checkpointed(reentrant=True).double())
    with pytest.raises(RuntimeError, match="use_reentrant=False"):  # torch's own words
        grads(apply, params, data())


def test_inputs_that_are_let_require_grad() -> None:
    """As libraries do by a hook, so that checkpoints of frozen modules work."""
    module = made("checkpointed")
    wanted = grads(ps.from_module(module)[1], ps.from_module(module)[0], data())
    module.a.register_forward_hook(lambda m, inputs, output: output.requires_grad_(True))
    params, apply = ps.from_module(module)
    assert_equal(grads(apply, params, data()), wanted)
    with pytest.raises(RuntimeError, match=r"requires_grad_\(\)"):  # torch's own words
        torch.func.grad(lambda p: apply(p, data()).sum())(params)
