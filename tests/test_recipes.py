"""Recipes of research, each against its gradient by hand, and whatever the cut.

The README shows them on random data. The gradients by hand are those of few parameters, written down for each
example, and differ by rounding: ``gamma`` times the sum of what was added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import purestep as ps
from purestep.testing.bounds import gamma

Batch = dict[str, Tensor]
CUTS = [
    [[0, 1, 2, 3, 4]],
    [[0, 3], [4], [1, 2]],
    [[0], [1], [2], [3], [4]],
    [[], [2, 1, 0], [4, 3]],
]
ROWS = 5


def cut(batch: Batch, rows: Sequence[list[int]]) -> list[Batch]:
    return [{name: leaf[each] for name, leaf in batch.items()} for each in rows]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_within(found: Tensor, terms: list[Tensor], sizes: list[Tensor], total: float) -> None:
    """The sum of the terms over the total, but for a hundred roundings of each term's size."""
    expected, size = torch.stack(terms).sum(0) / total, torch.stack(sizes).sum(0) / total
    assert ((found - expected).abs() <= gamma(100 + len(terms), torch.float64) * size).all()


def gradient(loss_fn: Any, params: Any, group: list[Batch], weight_fn: Any) -> Any:
    total = ps.count(group, weight_fn)
    return ps.accumulate(loss_fn, params, group, weight_fn=weight_fn, total=total).grads


# ---------------------------------------------------------------------------------------------- frozen reference models


def soft_labels(student: Tensor, teacher: Tensor, x: Tensor) -> Tensor:
    """−Σ q log p of each row, q of the teacher."""
    return -((x @ teacher).softmax(-1) * (x @ student).log_softmax(-1)).sum(-1)


@pytest.mark.parametrize("given", ["closed over", "in the microbatch", "a module"])
@pytest.mark.parametrize("rows", CUTS)
def test_distillation(rows: list[list[int]], given: str) -> None:
    """Σᵢ wᵢ xᵢ ⊗ (pᵢ − qᵢ) / Σ wᵢ; the teacher stays as it is, and without a gradient."""
    student, x = normal(3, 4), normal(ROWS, 3, seed=1)
    teacher = normal(3, 4, seed=2).requires_grad_()
    weights = torch.tensor([1, 0, 2, 1, 3])
    group = cut({"x": x, "weight": weights}, rows)

    if given == "closed over":
        grads = gradient(
            lambda p, m: soft_labels(p, teacher, m["x"]), student, group, lambda m: m["weight"]
        )
    elif given == "in the microbatch":
        group = [{**m, "teacher": teacher.detach()} for m in group]
        grads = gradient(
            lambda p, m: soft_labels(p, m["teacher"], m["x"]), student, group, lambda m: m["weight"]
        )
    else:
        module = torch.nn.Linear(3, 4, bias=False, dtype=torch.float64)
        module.weight.data.copy_(student.T)
        params, apply = ps.from_module(module)
        frozen = {"weight": teacher.T}

        def loss_fn(p: Any, m: Batch) -> Tensor:
            target = apply(frozen, m["x"]).softmax(-1)
            return -(target * apply(p, m["x"]).log_softmax(-1)).sum(-1)

        grads = gradient(loss_fn, params, group, lambda m: m["weight"])["weight"].T
    assert teacher.grad is None

    p, q = (x @ student).softmax(-1), (x @ teacher).softmax(-1).detach()
    hand = [w * x[i].outer(p[i] - q[i]) for i, w in enumerate(weights.tolist())]
    # Of p − q, both are rounded on their own.
    slack = [w * x[i].abs().outer(p[i] + q[i]) for i, w in enumerate(weights.tolist())]
    assert_within(grads, hand, slack, 7)


# ------------------------------------------------------------------------------------------------------------------ DPO

BETA = 0.5


def log_probability(logits: Tensor, texts: Tensor, mask: Tensor) -> Tensor:
    """Of each text, summed over its tokens."""
    return (logits.log_softmax(-1)[texts] * mask).sum(-1)


def dpo_loss(logits: Tensor, reference: Tensor, m: Batch) -> Tensor:
    """One loss for each pair."""

    def gain(which: str) -> Tensor:
        given = m[which], m[f"{which}_mask"]
        return log_probability(logits, *given) - log_probability(reference, *given)

    return -functional.logsigmoid(BETA * (gain("chosen") - gain("rejected")))


@pytest.mark.parametrize("rows", CUTS)
def test_dpo(rows: list[list[int]]) -> None:
    """Σ −w σ(−β Δ) β (∇ log π(chosen) − ∇ log π(rejected)) / Σ w, where ∇ log π(text) = counts − length · π."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, length = 4, 6
    logits, reference = normal(vocabulary), normal(vocabulary, seed=1)
    lengths = torch.tensor([[6, 2], [1, 4], [3, 3], [5, 0], [2, 6]])
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 0.25])
    batch: Batch = {"weight": weights}
    for column, which in enumerate(("chosen", "rejected")):
        batch[which] = torch.randint(vocabulary, (ROWS, length), generator=generator)
        batch[f"{which}_mask"] = torch.arange(length) < lengths[:, column, None]
    grads = gradient(
        lambda p, m: dpo_loss(p, reference, m), logits, cut(batch, rows), lambda m: m["weight"]
    )

    policy = logits.softmax(-1)
    hand, sizes = [], []
    for i in range(ROWS):
        gains, slopes = [], []
        for column, which in enumerate(("chosen", "rejected")):
            text = batch[which][i, : lengths[i, column]]
            counts = torch.bincount(text, minlength=vocabulary)
            gains.append((logits.log_softmax(-1) - reference.log_softmax(-1))[text].sum())
            slopes.append(counts - len(text) * policy)
        share = weights[i] * BETA * torch.sigmoid(-BETA * (gains[0] - gains[1]))
        hand.append(-share * (slopes[0] - slopes[1]))
        # Each token's term is rounded on its own.
        sizes.append(share * 2 * length * torch.ones(vocabulary))
    assert_within(grads, hand, sizes, float(weights.sum()))


# ------------------------------------------------------------------------------------------------------ policy gradient


def policy_loss(theta: Tensor, m: Batch) -> Tensor:
    """One loss for each action; the advantage is data, and may be negative. A weight could not."""
    taken = (m["state"] @ theta).log_softmax(-1).gather(-1, m["action"].unsqueeze(-1)).squeeze(-1)
    return -m["advantage"] * taken


@pytest.mark.parametrize("rows", CUTS)
def test_policy_gradient(rows: list[list[int]]) -> None:
    """Σ −A s ⊗ (onehot(a) − π(s)) over the actions that were taken; what comes behind the end of an episode is not."""
    generator = torch.Generator().manual_seed(0)
    theta, steps = normal(3, 4), 6
    ends = torch.tensor([6, 2, 1, 0, 4])
    batch = {
        "state": normal(ROWS, steps, 3, seed=1),
        "action": torch.randint(4, (ROWS, steps), generator=generator),
        "advantage": normal(ROWS, steps, seed=2),
        "mask": torch.arange(steps) < ends[:, None],
    }
    batch["state"][~batch["mask"]] = 1e6
    grads = gradient(policy_loss, theta, cut(batch, rows), lambda m: m["mask"])

    hand, sizes = [], []
    for row, step in batch["mask"].nonzero().tolist():
        state, advantage = batch["state"][row, step], batch["advantage"][row, step]
        chosen = functional.one_hot(batch["action"][row, step], 4)
        policy = (state @ theta).softmax(-1)
        hand.append(-advantage * state.outer(chosen - policy))
        sizes.append((advantage * state).abs().outer(chosen + policy))
    assert (batch["advantage"][batch["mask"]] < 0).any()
    assert_within(grads, hand, sizes, int(ends.sum()))


# ------------------------------------------------------------------------------------------------------------------ GAN


def generated(generator: Tensor, noise: Tensor) -> Tensor:
    return noise @ generator


def discriminator_loss(d: Tensor, g: Tensor, m: Batch) -> Tensor:
    """Two tokens for each row: a real one, and a generated one."""
    real, fake = m["x"] @ d, generated(g, m["z"]) @ d
    return torch.stack([functional.softplus(-real), functional.softplus(fake)], -1)


def generator_loss(g: Tensor, d: Tensor, m: Batch) -> Tensor:
    return functional.softplus(-(generated(g, m["z"]) @ d))


@pytest.mark.parametrize("rows", CUTS)
def test_gan(rows: list[list[int]]) -> None:
    """Each player's own gradient, the generator's through the discriminator; the other player is a constant.

    Discriminator: Σ −σ(−d·x) x + σ(d·y) y over 2 N, with y = z G. Generator: Σ −σ(−d·y) z ⊗ d over N.
    """
    g, d = normal(3, 2).requires_grad_(), normal(2, seed=1).requires_grad_()
    batch = {"x": normal(ROWS, 2, seed=2), "z": normal(ROWS, 3, seed=3)}
    group = cut(batch, rows)
    of_d = gradient(
        lambda d, m: discriminator_loss(d, g, m),
        d.detach(),
        group,
        lambda m: torch.ones(len(m["x"]), 2),
    )
    of_g = gradient(
        lambda g, m: generator_loss(g, d, m), g.detach(), group, lambda m: torch.ones(len(m["z"]))
    )
    assert g.grad is None
    assert d.grad is None
    assert not of_d.requires_grad
    assert not of_g.requires_grad

    with torch.no_grad():
        hand_d, sizes_d, hand_g, sizes_g = [], [], [], []
        for x, z in zip(batch["x"], batch["z"], strict=True):
            y = z @ g
            size = z.abs() @ g.abs()
            hand_d += [-torch.sigmoid(-(d @ x)) * x, torch.sigmoid(d @ y) * y]
            # A generated row is a sum of products itself, and so is what the sigmoid is of.
            sizes_d += [(1 + d.abs() @ x.abs()) * x.abs(), (1 + d.abs() @ size) * size]
            hand_g.append(-torch.sigmoid(-(d @ y)) * z.outer(d))
            sizes_g.append((1 + d.abs() @ size) * z.abs().outer(d.abs()))
        assert_within(of_d, hand_d, sizes_d, 2 * ROWS)
        assert_within(of_g, hand_g, sizes_g, ROWS)
