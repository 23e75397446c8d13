"""Rematerialisation: the values and gradients of the plain function, under everything that transforms it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from tests.blocks import PARAMS, TRANSFORMS, Function, X, block, both, chain


def test_no_gradient_is_zero() -> None:
    """Which would say nothing."""
    for name in ("autograd", "autograd twice"):
        assert all(leaf.any() for leaf in TRANSFORMS[name](chain(block)))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform(name: str) -> None:
    both(lambda block: TRANSFORMS[name](chain(block)))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nested(name: str) -> None:
    """A function under remat, made of such functions, and called twice with the same params."""

    def nested(remat: Any) -> Function:
        def twice(p: Any, x: Tensor, **how: Any) -> Any:
            return remat(block)(p, remat(block)(p, x, power=1)["y"], **how)

        return TRANSFORMS[name](chain(remat(twice)))

    assert_same(nested(ps.remat), nested(lambda fn: fn))


RESULTS: dict[str, Function] = {
    "one tensor": lambda w, x: x @ w,
    "an argument": lambda w, x: (x, x @ w),
    "pieces of what is made": lambda w, x: (x @ w).unbind(),
    "of an empty argument": lambda w, x: (x[:0] * 2, x @ w),
    "twice the same": lambda w, x: ((y := x @ w), y),
    "a constant": lambda w, x: (torch.ones(3), x @ w),
    "not of all arguments": lambda w, x: (w.sum(), x * x),
    "detached": lambda w, x: ((x @ w).detach(), x @ w),
    "nothing else": lambda w, x: (x @ w, None, (), {"none": None}),
    "indices": lambda w, x: (x @ w).max(-1),
    "no tensor": lambda w, x: (3, "three"),
}


@pytest.mark.parametrize(
    "name", ["ps.grad_and_value", "grad", "grad of vmap", "vmap of grad", "jvp", "grad of grad"]
)
@pytest.mark.parametrize("result", RESULTS)
def test_whatever_is_returned(result: str, name: str) -> None:
    """Under vmap too, where some of it is not batched."""

    def loss(function: Function) -> Function:
        def over_leaves(params: Any, x: Tensor) -> Tensor:
            loss = (params[0]["w"] * x[0]).sum()
            for leaf in tree.leaves_of(function(params[0]["w"], x)):
                if isinstance(leaf, Tensor):
                    loss = loss + (leaf * leaf).sum() * leaf.sum() * loss
            return loss + 0 * params[0]["b"].sum() + 0 * params[1]["b"].sum() * params[1]["w"].sum()

        return over_leaves

    both(lambda function: TRANSFORMS[name](loss(function)), RESULTS[result])


@pytest.mark.parametrize("name", ["ps.grad_and_value", "grad", "vmap of grad", "grad of vmap"])
def test_what_nobody_uses_has_no_gradient(name: str) -> None:
    """Not even one of zero, of which the square root's derivative at zero would make a NaN."""

    def rooted(p: Any, x: Tensor, **how: Any) -> Any:
        return {**block(p, x, **how), "root": (0 * x).sqrt()}

    both(lambda function: TRANSFORMS[name](chain(function)), rooted)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("transform", [ps.grad_and_value, torch.func.grad_and_value])
def test_autocast(around: bool, transform: Any) -> None:
    """What was cast in the forward pass is cast in the backward pass, be autocast still on or not; nothing stays in its cache."""
    params, x = tree.map(Tensor.float, (PARAMS, X))
    held, dtypes = [], set()

    def cast(p: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x @ p["w"] / 8) @ p["w"]
        held.append(weakref.ref(p["w"]))
        dtypes.add(y.dtype)
        return y

    def run(block: Function) -> Any:
        def loss(params: Any) -> Tensor:
            y = x
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for p in params:
                    y = block(p, y)
            return y.float().square().sum()

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
            result = transform(loss)(params)
            if block is not cast and transform is ps.grad_and_value:
                assert not any(each() is not None for each in held)
            return result

    both(run, cast)
    assert dtypes == {torch.bfloat16}


def test_modules_and_checkpoints() -> None:
    """A module's pure function under remat, a checkpoint inside, and remat inside of a checkpoint."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    params, apply = ps.from_module(module.double())

    def run(apply: Function) -> Any:
        return ps.grad_and_value(lambda params: apply(params, X).square().sum())(params)

    both(run, apply)
    plain = run(apply)

    def again(apply: Function) -> Function:
        return lambda params, x: checkpoint(apply, params, x, use_reentrant=False)

    assert_same(run(again(ps.remat(apply))), plain)
    assert_same(run(ps.remat(again(apply))), plain)
