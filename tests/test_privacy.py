"""``private_update_step``: clipping against arithmetic by hand, and noise that is drawn once."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import cut
from purestep.examples.differential_privacy import private_update_step

Batch = dict[str, Tensor]
NAN = float("nan")
SGD = ps.optim.sgd(1.0)


def linear(params: Batch, m: Batch) -> Tensor:
    """The gradient of a token is (x, c)."""
    return m["x"] @ params["w"] + m["c"] * params["b"]


def zeros(elements: int = 2) -> Batch:
    return {"w": torch.zeros(elements).double(), "b": torch.zeros(()).double()}


DATA = {
    "x": torch.tensor(
        [[[1, 2], [2, 2]], [[0, 1], [9, 9]], [[NAN, 7], [7, 7]], [[48, 64], [5, 5]]]
    ).double(),
    "c": torch.tensor([[8, 4], [0, 9], [NAN, 7], [192, 5]]).double(),
    "weight": torch.tensor([[1, 1], [3, 0], [0, 0], [1, 0]]),
}
"""Rows of two tokens, with gradients (3, 4, 12), (0, 3, 0), padding, and (48, 64, 192)."""


def stepped(group: list[Batch], params: Batch | None = None, **how: Any) -> Batch:
    settings: dict[str, Any] = {"clip": 6.5, "noise": 0.0, "batch_size": 4, **how}
    params = params or zeros()
    new, _ = private_update_step(
        params, SGD.init(params), group, ps.random.key(0),
        loss_fn=linear, optimizer=SGD, weight_fn=lambda m: m["weight"], **settings,
    )  # fmt: skip
    return new


def on_threads(**how: Any) -> Batch:
    axis = ps.testing.ThreadAxis(3)
    groups = [cut(DATA, [[0, 3]]), [], cut(DATA, [[1], [2]])]
    first, *others = axis.map(lambda group: stepped(group, axis=axis, **how))(groups)
    assert all(torch.equal(other["w"], first["w"]) for other in others)
    return first


CUTS: dict[str, Callable[..., Batch]] = {
    "one": lambda **how: stepped([DATA], **how),
    "three": lambda **how: stepped(cut(DATA, [[2, 3], [0], [1]]), **how),
    "one by one": lambda **how: stepped([DATA], chunk_size=1, **how),
    "threads": on_threads,
}


@pytest.mark.parametrize("how", CUTS)
def test_clips_by_hand(how: str) -> None:
    """Each row's gradient over the whole tree, to the bit: all numbers are small and dyadic."""
    new = CUTS[how]()
    assert (-4 * new["w"]).tolist() == [1.5 + 0 + 1.5, 2 + 3 + 2]
    assert -4 * new["b"] == 6 + 0 + 6
    noisy = CUTS[how](noise=0.25)["w"]
    assert torch.equal(noisy, CUTS["one"](noise=0.25)["w"]), "noise depends on the key alone"
    assert not torch.equal(noisy, new["w"])


def test_the_noise_comes_once() -> None:
    """With the deviation noise · clip, to five standard errors."""
    n, deviation = 200_000, 0.25 * 6.5
    noise = 4 * stepped([], zeros(n), noise=0.25)["w"]
    assert abs(noise.mean()) < 5 * deviation / math.sqrt(n)
    # The variance of n squares of deviation σ is 2 σ⁴ / n.
    assert abs(noise.square().mean() - deviation**2) < 5 * deviation**2 * math.sqrt(2 / n)
