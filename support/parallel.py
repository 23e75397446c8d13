"""Defines two programs whose mesh has a second dimension: one where it splits tokens, and one where it does not.

Both are polynomials in integers, so that every operation is exact.
"""

from typing import Any

import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from support.models import FEATURES, HIDDEN, integers
from support.optimizers import OPTIMIZERS
from support.strategies import Batch, Setup, get_weights
from support.worlds import Grid


def attention_params(generator: torch.Generator) -> dict[str, Tensor]:
    """Makes query, key and value matrices, and an output vector."""
    params = {}
    for name in ("query", "key", "value"):
        params[name] = integers((FEATURES, FEATURES), generator, 1)
    params["out"] = integers((FEATURES,), generator, 1)
    return params


def attention_loss(params: Any, batch: Batch) -> Tensor:
    """Computes (out · Σ_{j ≤ i} (qᵢ · kⱼ) vⱼ − yᵢ)²: causal attention without the softmax, on full sequences."""
    query, key, value = _project(params, batch["x"])
    output = _attend_causally(query, key, value, start=0)
    return (output @ params["out"] - batch["y"]).square()


def _project(params: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x @ params["query"], x @ params["key"], x @ params["value"]


def _attend_causally(query: Tensor, key: Tensor, value: Tensor, start: Any) -> Tensor:
    """Attends from queries at positions from ``start`` on."""
    query_positions = start + torch.arange(query.shape[1])
    causal = torch.arange(key.shape[1]) <= query_positions[:, None]
    scores = (query @ key.mT).masked_fill(~causal, 0)
    return scores @ value


def context_parallel_step(recipe: str, settings: Any, grid: Grid, *inputs: Any) -> Any:
    """Takes a step on a shard of every sequence of the rank's row of the grid: tokens are spread over both dimensions."""
    context = grid.second

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        query, key, value = _project(params, batch["x"])
        key, value = ps.all_gather((key, value), context, dim=1, tiled=True)
        start = context.index * query.shape[1]
        output = _attend_causally(query, key, value, start)
        return (output @ params["out"] - batch["y"]).square()

    options = {**settings, "weight_fn": get_weights, "axis": grid.both}
    step: Any = ps.make_update_step(loss_fn, OPTIMIZERS[recipe], **options)
    return step(*inputs)


def tensor_parallel_step(
    recipe: str,
    setup: Setup,
    grid: Grid,
    params: Any,
    opt_state: Any,
    microbatches: list[Batch],
) -> Any:
    """Takes a step on a shard of the hidden layer and the tokens of the rank's row: columns share tokens.

    With ``gather`` the other leaves are cut over the rows. It takes and returns the full state.
    """

    def shard(leaf: Tensor) -> Any:
        if leaf.ndim and leaf.shape[-1] == HIDDEN:
            return ps.shard(leaf, grid.second, -1)
        if setup.gather:
            return ps.shard(leaf, grid.first)
        return leaf.clone()

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        bias = torch.stack(params["hidden"]["biases"]).sum(0)
        hidden = torch.relu(batch["x"] @ params["hidden"]["weight"] + bias)
        output: Tensor = ps.psum(hidden @ params["out"][0], grid.second)
        shift = params["shifts"].sum() + params["shift"]
        return (output + shift - batch["y"]).square()

    gather: Any = setup.gather or "step"
    step = ps.make_update_step(
        loss_fn,
        OPTIMIZERS[recipe],
        weight_fn=get_weights,
        axis=grid.first,
        gather=gather,
        **setup.settings,
    )
    params, opt_state = tree.map(shard, (params, opt_state))
    *state, metrics = step(params, opt_state, microbatches)
    return *ps.unshard(tuple(state)), metrics


def context_shard(batch: Batch, rank: int, size: int) -> Batch:
    """Returns a rank's part of every sequence."""
    return {key: value.chunk(size, 1)[rank] for key, value in batch.items()}
