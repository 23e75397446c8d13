"""Blocks of a loss, all that transforms it, and that it gives the same with each block under ``remat``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree

Function = Callable[..., Any]


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Small ones, so that sums are exact in whatever order they are added up."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).double()


PARAMS = [
    {"w": integers(3, 3, seed=seed), "b": torch.tensor([1, -seed, 2]).double()} for seed in (1, 2)
]
X, W = integers(4, 3), integers(4)
MANY = tree.map(lambda leaf: torch.stack([leaf, leaf + 1, -leaf]), PARAMS)
ONE = torch.tensor(1.0, dtype=torch.float64)


def block(p: Any, x: Tensor, *, power: int = 2, mask: Tensor | None = None) -> dict[str, Any]:
    """A polynomial, and beside it what is no tensor, or no floating point."""
    y = (x @ p["w"] + p["b"]) ** power - x
    return {"y": y, "positive": (y > 0).sum(-1), "mask": mask, "name": "block", "scale": p["b"]}


def chain(block: Function) -> Function:
    """A loss of two blocks, which takes all that they return."""

    def loss(params: Any, x: Tensor) -> Tensor:
        scale = ONE
        for p in params:
            out = block(p, x, power=2, mask=None)
            assert (out["mask"], out["name"]) == (None, "block")
            x, scale = out["y"] + out["positive"][:, None], scale * out["scale"].sum()
        return (x.sum(-1) * scale).sum()

    return loss


def both(transform: Callable[[Function], Any], function: Function = block) -> None:
    """What is made of a function is the same with it under ``remat``."""
    assert_same(transform(ps.remat(function)), transform(function))


def pulled(function: Function, *args: Any) -> Any:
    """``vjp``, pulled when its level is gone."""
    return vjp(function, *args)[1](2 * ONE)


def over_params(loss: Function) -> Function:
    """The sum of an ensemble's losses."""
    return lambda params, x: vmap(loss, (0, None))(params, x).sum()


def recorded(loss: Function, params: Any, x: Tensor, again: bool) -> Any:
    """Gradients by autograd, or those of their squares' sum."""
    leaves, structure = tree.flatten((params, x))
    own = [leaf.clone().requires_grad_() for leaf in leaves]
    grads = torch.autograd.grad(loss(*tree.unflatten(structure, own)), own, create_graph=again)
    total = torch.stack([g.square().sum() for g in grads]).sum()
    return torch.autograd.grad(total, own) if again else grads


def squared(loss: Function) -> Function:
    """The square of a gradient."""
    return lambda params, x: grad(loss, argnums=1)(params, x).square().sum()


TRANSFORMS: dict[str, Callable[[Function], Any]] = {
    "value": lambda f: f(PARAMS, X),
    "without gradients": lambda f: torch.no_grad()(f)(PARAMS, X),
    "autograd": lambda f: recorded(f, PARAMS, X, again=False),
    "autograd twice": lambda f: recorded(f, PARAMS, X, again=True),
    "ps.grad_and_value": lambda f: ps.grad_and_value(f, argnums=(0, 1))(PARAMS, X),
    "grad": lambda f: grad(f, argnums=(0, 1))(PARAMS, X),
    "vjp": lambda f: pulled(f, PARAMS, X),
    "vmap": lambda f: vmap(f, (0, None))(MANY, X),
    "vmap of grad": lambda f: vmap(grad(f, argnums=(0, 1)), (0, None))(MANY, X),
    "grad of vmap": lambda f: grad(over_params(f), argnums=(0, 1))(MANY, X),
    "vmap of vjp": lambda f: vmap(lambda p: pulled(f, p, X))(MANY),
    "vjp of vmap": lambda f: pulled(over_params(f), MANY, X),
    "autograd of vmap": lambda f: recorded(over_params(f), MANY, X, again=False),
    "vmap in vmap": lambda f: vmap(lambda x: vmap(f, (0, None))(MANY, x))(torch.stack([X, -X])),
    "grad of grad": lambda f: grad(squared(f), argnums=(0, 1))(PARAMS, X),
    "jvp": lambda f: jvp(f, (PARAMS, X), (PARAMS, X)),
    "jvp of grad": lambda f: jvp(grad(f), (PARAMS, X), (PARAMS, X)),
    "grad of jvp": lambda f: grad(lambda p: jvp(lambda x: f(p, x), (X,), (X,))[1])(PARAMS),
    "hessian": lambda f: hessian(f)(PARAMS, X),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f))(PARAMS, X),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f))(PARAMS, X),
    "vmap of hessian": lambda f: vmap(hessian(f), (0, None))(MANY, X),
}
