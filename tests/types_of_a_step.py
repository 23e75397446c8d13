"""Swaps the arguments of a step, for ``mypy`` alone: each line that it must refuse is ignored here.

Where a line is accepted, ``mypy --strict`` complains of an unused comment instead.
"""

import torch

import purestep as ps


def loss_fn(
    params: dict[str, torch.Tensor], row: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Returns a loss by named leaves."""
    return params["w"] * row["x"]


def swap_arguments() -> None:
    """Calls a step as it should be, and in four ways in which it should not."""
    params, row = {"w": torch.zeros(2)}, {"x": torch.ones(2)}
    optimizer = ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(0.1))
    step, opt_state = ps.make_update_step(loss_fn, optimizer), optimizer.init(params)
    params, opt_state, metrics = step(params, opt_state, [row])
    print(opt_state[1].mu, metrics)
    print(ps.make_update_step(lambda w, x: w * x, ps.optim.sgd(0.1)))

    step(opt_state, params, [row])  # type: ignore[arg-type]
    step(params, [row], opt_state)  # type: ignore[arg-type]
    step(params, opt_state, row)  # type: ignore[arg-type]
    step(torch.nn.Linear(1, 1), opt_state, [row])  # type: ignore[arg-type]
