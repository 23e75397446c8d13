"""What the theorems are drawn from: cases, cuts, ranks, and the two strengths of equality.

**Exact**: integers in float64 and N a power of two make every operation exact, so the claim is bitwise.
**Bounded**: for real models, the a-priori bound γₙ Σ‖gₘ‖ of floating point summation, with
γₙ = n u / (1 − n u), u the unit roundoff of the dtype, n the roundings in a row, gₘ the exact
gradient of sequence m. Nothing is tuned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import settings, strategies as st
from torch import Tensor

import purestep as ps
from proofs import models
from purestep import testing, tree
from purestep.testing.bounds import gamma
from purestep.testing.strategies import Cut, cuts, taken

settings.register_profile(
    "default", derandomize=True, deadline=None, max_examples=60, database=None
)
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

Batch = dict[str, Tensor]


def matrices(params: Any) -> Any:
    """A mask: matrices decay."""
    return tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(params: Any) -> Any:
    """Matrices, and the rest."""
    return tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "rest", params)


RECIPES: dict[str, Callable[[Any], ps.optim.Optimizer]] = {
    "sgd": lambda optim: optim.sgd(0.5),
    "momentum": lambda optim: optim.sgd(0.25, momentum=0.5, nesterov=True, weight_decay=0.5),
    "decayed": lambda optim: optim.sgd(0.5, weight_decay=0.5, mask=matrices),
    "scheduled": lambda optim: optim.sgd(optim.linear_schedule(0.5, 0.25, 4)),
    "clipped": lambda optim: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.125)),
    "adamw": lambda optim: optim.adamw(0.125, weight_decay=0.5),
    "adam": lambda optim: optim.chain(optim.scale_by_adam(), optim.descend(0.125)),
    "lion": lambda optim: optim.lion(0.125, weight_decay=0.5, mask=matrices),
    "partition": lambda optim: optim.partition(
        labels, {"matrix": optim.sgd(0.5, momentum=0.5), "rest": optim.adamw(0.125)}
    ),
    "master": lambda optim: optim.master_weights(optim.sgd(0.5)),
    "ema": lambda optim: optim.ema(optim.sgd(0.5, momentum=0.5), 0.75),
}
"""Optimizers, of whatever ``purestep.optim`` a system has."""
OPTIMIZERS = {name: make(ps.optim) for name, make in RECIPES.items()}


def weights_of(batch: Batch) -> Tensor:
    """The weights stand in the batch."""
    return batch["w"]


@dataclass(frozen=True, repr=False)
class Case:
    """A group of sequences as one big batch, a model, an optimizer and a state to start from."""

    params: Any
    batch: Batch
    recipe: str
    opt_state: Any
    seed: int

    @property
    def optimizer(self) -> ps.optim.Optimizer:
        """The optimizer of that name."""
        return OPTIMIZERS[self.recipe]

    def __repr__(self) -> str:
        return f"Case(seed={self.seed}, w={self.batch['w'].tolist()}, opt_state={self.opt_state})"

    @property
    def rows(self) -> int:
        """How many sequences there are."""
        return len(self.batch["w"])

    @property
    def generator(self) -> torch.Generator:
        """Fresh noise, the same every time."""
        return torch.Generator().manual_seed(self.seed + 1)


@st.composite
def cases(
    draw: st.DrawFn, *, fractional: bool = True, optimizers: Sequence[str] = tuple(OPTIMIZERS)
) -> Case:
    """Integer data and parameters; weights of which many are 0, and whose sum is a power of two."""
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    rows, length = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    weights = torch.tensor(draw(testing.weights(rows, length)))
    if fractional and draw(st.booleans()):
        weights = weights.to(torch.float64) / draw(st.sampled_from([1, 16, 256]))
    params = laid_out(models.integer_params(generator), draw(st.sampled_from(LAYOUTS)))
    recipe = draw(st.sampled_from(optimizers))
    opt_state = some_opt_state(recipe, params, generator)
    # Trees are the same whatever the order of their keys, and need not have it in common.
    params, opt_state = (
        turned_around(each) if draw(st.booleans()) else each for each in (params, opt_state)
    )
    return Case(params, integer_batch(weights, generator), recipe, opt_state, seed)


def turned_around(given: Any) -> Any:
    """The same tree, the keys of its dicts in the opposite order."""
    if isinstance(given, Tensor):
        return given
    if isinstance(given, dict):
        return {key: turned_around(given[key]) for key in reversed(given)}
    inside = [turned_around(each) for each in given]
    return type(given)(*inside) if hasattr(given, "_fields") else type(given)(inside)


LAYOUTS = ["rows", "columns", "gaps", "one buffer", "one tensor"]
"""How leaves may lie in memory."""


def laid_out(params: Any, layout: str) -> Any:
    """Columns one after the other, gaps between all elements, parts of one buffer, or one tensor for two leaves."""
    if layout == "columns":
        return tree.map(lambda leaf: leaf.T.contiguous().T if leaf.ndim == 2 else leaf, params)
    if layout == "gaps":
        return tree.map(lambda leaf: torch.stack([leaf, leaf], -1)[..., 0], params)
    if layout == "one buffer":
        leaves, structure = tree.flatten(params)
        buffer = torch.cat([leaf.reshape(-1) for leaf in leaves])
        parts = buffer.split([leaf.numel() for leaf in leaves])
        return tree.unflatten(
            structure, [part.view_as(leaf) for part, leaf in zip(parts, leaves, strict=True)]
        )
    if layout == "one tensor":
        bias = params["hidden"]["biases"][0]
        return {**params, "hidden": {**params["hidden"], "biases": [bias, bias]}}
    return params


def some_opt_state(recipe: str, params: Any, generator: torch.Generator) -> Any:
    """A state of small integers, as if training had gone on for a while."""
    return tree.map(
        lambda leaf: torch.randint(0, 4, leaf.shape, generator=generator).to(leaf.dtype),
        OPTIMIZERS[recipe].init(params),
    )


def integer_batch(weights: Tensor, generator: torch.Generator) -> Batch:
    """Integer inputs and targets for these weights."""
    rows, length = weights.shape
    return {
        "x": models.integers((rows, length, models.FEATURES), generator),
        "y": models.integers((rows, length), generator),
        "w": weights,
    }


def cut(batch: Batch, microbatches: Cut) -> list[Batch]:
    """The microbatches of a cut."""
    return [taken(batch, rows) for rows in microbatches]


@st.composite
def assignments(draw: st.DrawFn, rows: int) -> list[Cut]:
    """Any assignment of rows to ranks, and any cut on each: uneven ranks and ranks without data included."""
    shares = draw(testing.ranks(range(rows)))
    return [[[own[i] for i in part] for part in draw(cuts(len(own), 3))] for own in shares]


@st.composite
def shares(draw: st.DrawFn, rows: int) -> list[Cut]:
    """The same for ranks that need not hold as many microbatches as the others, or any at all."""
    kept = draw(st.booleans())
    return [[part for part in rank if part or kept] for rank in draw(assignments(rows))]


def simulate(case: Case, assignment: list[Cut]) -> list[Batch]:
    """Microbatches with a leading dimension of ranks: shorter ones padded with sequences of weight 0."""
    count = max(len(microbatches) for microbatches in assignment)
    parts = [[*microbatches, *([[]] * (count - len(microbatches)))] for microbatches in assignment]
    return [
        stack([padded(case, rank[k], max(len(other[k]) for other in parts)) for rank in parts])
        for k in range(count)
    ]


def padded(case: Case, rows: list[int], size: int) -> Batch:
    """These rows of the batch, and as many other rows at weight 0 as fill it up to ``size``."""
    filled = rows + [0] * (size - len(rows))
    batch = {key: value[filled].clone() for key, value in case.batch.items()}
    batch["w"][len(rows) :] = 0
    return batch


def stack(batches: Sequence[Batch]) -> Batch:
    """One batch with a new leading dimension."""
    return {key: torch.stack([batch[key] for batch in batches]) for key in batches[0]}


def assert_same(actual: Any, expected: Any, what: str = "state") -> None:
    """Trees of one structure, with leaves of one dtype, equal to the bit."""
    actual_leaves, actual_structure = tree.flatten(actual)
    expected_leaves, expected_structure = tree.flatten(expected)
    assert actual_structure == expected_structure, f"{what}: another structure"
    for place, (a, b) in enumerate(zip(actual_leaves, expected_leaves, strict=True)):
        if a.dtype != b.dtype or not torch.equal(a, b):
            path = tree.paths(expected, what)[place]
            raise AssertionError(f"{path}: {a} ({a.dtype}) is not {b} ({b.dtype})")


def outcome(call: Callable[[], Any]) -> tuple[Any, str]:
    """What comes of a call: its result, or None and the message with which it refuses."""
    try:
        return call(), ""
    except ValueError as error:
        return None, str(error)


def capture() -> ps.optim.Optimizer:
    """An optimizer that moves nothing and keeps the gradients that it was given as its state."""
    return ps.optim.Optimizer(
        init=tree.zeros_like,
        update=lambda grads, opt_state, params: (
            params,
            tree.map(lambda grad, kept: grad.to(kept.dtype), grads, opt_state),
        ),
    )


@dataclass(frozen=True, repr=False)
class RealCase:
    """Sequences for the transformer, with the exact gradient of each, scaled as in the equation."""

    params: Any
    batch: Batch
    dtype: torch.dtype
    terms: list[Any]
    losses: Tensor
    seed: int

    def __repr__(self) -> str:
        return f"RealCase(seed={self.seed}, {self.dtype}, w={self.batch['w'].sum(1).tolist()})"

    @property
    def rows(self) -> int:
        """How many sequences there are."""
        return len(self.batch["w"])

    def assert_within_bound(self, grads: Any, extra_roundings: int = 0) -> None:
        """|grads − Σ gₘ| ≤ γₙ Σ ‖gₘ‖ in every leaf."""
        n = models.transformer_roundings(self.dtype) + self.rows + extra_roundings
        for path, leaf, *terms in zip(
            tree.paths(grads, "grads"),
            tree.leaves_of(grads),
            *map(tree.leaves_of, self.terms),
            strict=True,
        ):
            exact = torch.stack(terms)
            bound = gamma(n, self.dtype) * exact.flatten(1).norm(dim=1).sum()
            error = (leaf.to(torch.float64) - exact.sum(0)).norm()
            assert error <= bound, f"{path}: off by {error:.3g}, and rounding explains {bound:.3g}"

    def assert_loss_within_bound(self, loss: Tensor) -> None:
        """The same for the loss."""
        n = models.transformer_roundings(self.dtype) + self.batch["w"].numel()
        error = (loss.to(torch.float64) - self.losses.sum()).abs()
        assert error <= gamma(n, self.dtype) * self.losses.abs().sum()


@st.composite
def real_cases(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype],
    loss_fn: Callable[[Any, Batch], Tensor] = models.transformer_loss,
    make_params: Callable[[torch.Generator, torch.dtype], Any] = models.transformer_params,
    keyed: bool = False,
) -> RealCase:
    """Random text of uneven length, padded, for the transformer in one of the dtypes; ``keyed``: each with a key."""
    dtype = draw(st.sampled_from(dtypes))
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    rows = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, models.CONTEXT), min_size=rows, max_size=rows))
    lengths[0] = max(1, lengths[0])
    shape = (rows, models.CONTEXT)
    present = torch.arange(models.CONTEXT) < torch.tensor(lengths)[:, None]
    labels = torch.randint(0, models.VOCABULARY, shape, generator=generator)
    batch = {
        "tokens": torch.randint(0, models.VOCABULARY, shape, generator=generator),
        "labels": torch.where(present, labels, -100),
        "w": present,
    }
    if keyed:
        batch["key"] = ps.random.fold_in(ps.random.key(seed), torch.arange(rows))
    params = make_params(generator, dtype)
    exact = tree.map(lambda leaf: leaf.to(torch.float64), params)

    def loss_of(params: Any, row: int) -> Tensor:
        one = {key: value[row : row + 1] for key, value in batch.items()}
        return loss_fn(params, one).sum() / present.sum()

    terms = [torch.func.grad(loss_of)(exact, row) for row in range(rows)]
    losses = torch.stack([loss_of(exact, row) for row in range(rows)])
    return RealCase(params, batch, dtype, terms, losses, seed)
