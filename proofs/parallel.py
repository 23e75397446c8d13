"""Two programs whose mesh has a second dimension: one where it splits tokens, and one where it does not.

Both are polynomials in integers, so that every operation is exact.
"""

from typing import Any

import torch
from torch import Tensor

import purestep as ps
from proofs.models import FEATURES, HIDDEN, integers
from proofs.strategies import OPTIMIZERS, Batch, How, weights_of
from proofs.worlds import Grid
from purestep import tree


def attention_params(generator: torch.Generator) -> dict[str, Tensor]:
    """Query, key and value matrices, and an output vector."""
    return {
        name: integers((FEATURES, FEATURES), generator, 1)
        for name in ("query", "key", "value")
    } | {"out": integers((FEATURES,), generator, 1)}


def attention_loss(params: Any, batch: Batch) -> Tensor:
    """(out · Σ_{j ≤ i} (qᵢ · kⱼ) vⱼ − yᵢ)²: causal attention without the softmax, on all of the sequence."""
    query, key, value = (
        batch["x"] @ params[name] for name in ("query", "key", "value")
    )
    return _attend(query, key, value, 0, params["out"], batch["y"])


def _attend(
    query: Tensor, key: Tensor, value: Tensor, start: Any, out: Tensor, y: Tensor
) -> Tensor:
    earlier = (
        torch.arange(key.shape[1]) <= start + torch.arange(query.shape[1])[:, None]
    )
    scores = (query @ key.mT).masked_fill(~earlier, 0)
    return ((scores @ value) @ out - y).square()


def context_parallel_step(recipe: str, settings: Any, grid: Grid, *rank: Any) -> Any:
    """Each rank holds a piece of every sequence of its row of the grid: tokens are spread over both."""
    context = grid.second

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        query, key, value = (
            batch["x"] @ params[name] for name in ("query", "key", "value")
        )
        key, value = ps.all_gather((key, value), context, dim=1, tiled=True)
        start = context.index * query.shape[1]
        return _attend(query, key, value, start, params["out"], batch["y"])

    how = {**settings, "weight_fn": weights_of, "axis": grid.both}
    step: Any = ps.make_update_step(loss_fn, OPTIMIZERS[recipe], **how)
    return step(*rank)


def tensor_parallel_step(
    recipe: str,
    how: How,
    grid: Grid,
    params: Any,
    opt_state: Any,
    microbatches: list[Batch],
) -> Any:
    """Each rank holds a piece of the hidden layer, and its row's tokens: the rows alone spread them.

    With ``gather`` the rest lies in pieces over the rows.
    """

    def piece(leaf: Tensor) -> Any:
        if leaf.ndim and leaf.shape[-1] == HIDDEN:
            return ps.shard(leaf, grid.second, -1)
        return ps.shard(leaf, grid.first) if how.gather else leaf.clone()

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        bias = torch.stack(params["hidden"]["biases"]).sum(0)
        hidden = torch.relu(batch["x"] @ params["hidden"]["weight"] + bias)
        output: Tensor = ps.psum(hidden @ params["out"][0], grid.second)
        shift = params["shifts"].sum() + params["shift"]
        return (output + shift - batch["y"]).square()

    gather: Any = how.gather or "step"
    settings = {
        **how.settings,
        "weight_fn": weights_of,
        "axis": grid.first,
        "gather": gather,
    }
    step = ps.make_update_step(loss_fn, OPTIMIZERS[recipe], **settings)
    params, opt_state = tree.map(piece, (params, opt_state))
    *new, metrics = step(params, opt_state, microbatches)
    return *ps.unshard(tuple(new)), metrics


def context_piece(batch: Batch, place: int, places: int) -> Batch:
    """A rank's piece of every sequence."""
    return {key: value.chunk(places, 1)[place] for key, value in batch.items()}
