"""Draws texts for the transformer, with the exact gradient of each, and bounds rounding by them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from purestep import tree
from purestep.testing.bounds import rounding_bound
from support import models
from support.strategies import (
    AXES,
    DTYPES,
    RANKS,
    Axis,
    Batch,
    Chooser,
    Groups,
    Setup,
    builds,
    choose_setup,
    cut_batch,
    make_keys,
    make_shares,
    select_rows,
)


@dataclass(frozen=True, repr=False)
class RealCase:
    """Sequences for the transformer, and the exact gradient and loss of each, scaled as in the equation."""

    params: Any
    batch: Batch
    dtype: torch.dtype
    exact: Callable[[], tuple[list[Any], Tensor]]
    seed: int

    def __repr__(self) -> str:
        lengths = self.batch["w"].sum(1).tolist()
        return f"RealCase(seed={self.seed}, {self.dtype}, w={lengths})"

    @property
    def rows(self) -> int:
        """Counts the sequences."""
        return len(self.batch["w"])

    def assert_within_bound(self, grads: Any, extra_roundings: int = 0) -> None:
        """Asserts |grads − Σ gₘ| ≤ γₙ Σ ‖gₘ‖ in every leaf."""
        n = models.transformer_roundings(self.dtype) + self.rows + extra_roundings
        exact_grads, _ = self.exact()
        for path, leaf, *terms in zip(
            tree.paths(grads, "grads"),
            tree.leaves(grads),
            *[tree.leaves(of_sequence) for of_sequence in exact_grads],
            strict=True,
        ):
            exact = torch.stack(terms)
            bound = rounding_bound(n, self.dtype) * exact.flatten(1).norm(dim=1).sum()
            error = (leaf.to("cpu", torch.float64) - exact.sum(0)).norm()
            assert error <= bound, (
                f"{path}: off by {error:.3g}, and rounding explains {bound:.3g}"
            )

    def assert_loss_within_bound(self, loss: Tensor) -> None:
        """Asserts the same for the loss."""
        n = models.transformer_roundings(self.dtype) + self.batch["w"].numel()
        _, losses = self.exact()
        error = (loss.to("cpu", torch.float64) - losses.sum()).abs()
        assert error <= rounding_bound(n, self.dtype) * losses.abs().sum()


def make_real_case(
    choose: Chooser,
    dtypes: Sequence[torch.dtype] = DTYPES[:3],
    loss_fn: Callable[[Any, Batch], Tensor] = models.transformer_loss,
    make_params: Callable[
        [torch.Generator, torch.dtype], Any
    ] = models.transformer_params,
    *,
    keyed: bool = False,
) -> RealCase:
    """Makes random text of uneven length, padded, in one of the dtypes; ``keyed``: each sequence with a key."""
    dtype = choose.choice(dtypes)
    seed = choose.randrange(2**20)
    generator = torch.Generator().manual_seed(seed)
    rows = choose.randint(1, min(5, choose.max_size))
    batch = make_text(choose, rows, generator)
    if keyed:
        batch["key"] = make_keys(seed, rows)
    params = make_params(generator, dtype)
    num_tokens = batch["w"].sum()

    def row_loss(params: Any, row: int) -> Tensor:
        return loss_fn(params, select_rows(batch, [row])).sum() / num_tokens

    @cache
    def exact() -> tuple[list[Any], Tensor]:
        wide = tree.map(lambda leaf: leaf.to(torch.float64), params)
        grads, losses = [], []
        for row in range(rows):
            grad, loss = torch.func.grad_and_value(row_loss)(wide, row)
            grads.append(grad)
            losses.append(loss)
        return grads, torch.stack(losses)

    return RealCase(params, batch, dtype, exact, seed)


def make_text(choose: Chooser, rows: int, generator: torch.Generator) -> Batch:
    """Makes rows of random text; the first has a token at least, the others may be empty."""
    lengths = [choose.randint(1, models.CONTEXT)]
    lengths += [choose.randint(0, models.CONTEXT) for _ in range(rows - 1)]
    shape = (rows, models.CONTEXT)
    present = torch.arange(models.CONTEXT) < torch.tensor(lengths)[:, None]
    labels = torch.randint(0, models.VOCABULARY, shape, generator=generator)
    return {
        "tokens": torch.randint(0, models.VOCABULARY, shape, generator=generator),
        "labels": torch.where(present, labels, -100),
        "w": present,
    }


RealStepCase = tuple[RealCase, Setup, Groups]


def make_real_step_case(
    choose: Chooser,
    *,
    ranks: Sequence[int] = RANKS,
    axes: Sequence[Axis] = AXES,
    **of_case: Any,
) -> RealStepCase:
    """Makes real text in any order, cut and share, each microbatch perhaps no longer than it has to be."""
    case = make_real_case(choose, **of_case)
    groups: Groups = []
    for share in make_shares(choose, case.rows, ranks=ranks):
        group = [part for part in cut_batch(case.batch, share) if part["w"].numel()]
        if choose.maybe():
            group = [trim_padding(part) for part in group]
        groups.append(group)
    # Sums in float32 would round more than the dtype does.
    accum_dtype = choose.choice([None, torch.float64])
    setup = choose_setup(choose, axes=axes, accum_dtype=accum_dtype)
    return case, setup, groups


def trim_padding(part: Batch) -> Batch:
    """Cuts a microbatch to the longest of its sequences, or to one token."""
    length = max(1, int(part["w"].sum(1).max()))
    trimmed = {}
    for key, leaf in part.items():
        trimmed[key] = leaf if leaf.ndim == 1 else leaf[:, :length]
    return trimmed


def real_steps(**narrowed: Any) -> st.SearchStrategy[RealStepCase]:
    """Draws cases of steps of the transformer; keywords of ``make_real_step_case`` narrow them."""
    return builds(make_real_step_case, **narrowed)
