"""What does keyed dropout cost, against ``F.dropout``?

    python -m benchmarks.dropout        writes benchmarks/results/dropout.json

In a network of two layers (256, 1024, 256) of ReLU with dropout after each, forward and backward, compiled and eager; and alone. The ways
take turns, and ratios are of the same turn. ``ps.random.dropout`` is given one key for each row, and each place folds its number in.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import purestep as ps
from benchmarks import timing

WIDTH, P = 256, 0.1

Dropout = Callable[[Tensor, Tensor, int], Tensor]
DROPOUTS: dict[str, Dropout] = {
    "none": lambda x, keys, place: x,
    "F.dropout": lambda x, keys, place: functional.dropout(x, P),
    "ps.random.dropout": lambda x, keys, place: ps.random.dropout(
        x, P, ps.random.fold_in(keys, place)
    ),
}


def network(dropout: Dropout, params: list[Tensor], x: Tensor, keys: Tensor) -> Tensor:
    """The sum of squares of what comes out."""
    for place, weight in enumerate(params):
        x = dropout(functional.relu(x @ weight), keys, place)
    return x.square().sum()


def alone(dropout: Dropout, params: list[Tensor], x: Tensor, keys: Tensor) -> Tensor:
    """Of dropout alone."""
    return dropout(x * params[0][:, 0], keys, 0).square().sum()


def calls_of(options: argparse.Namespace, compiled: bool) -> dict[str, dict[str, Any]]:
    """Forward and backward of each program with each dropout."""
    generator = torch.Generator().manual_seed(0)
    device = timing.device()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    shapes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    params = [(normal(*shape) / shape[0] ** 0.5).requires_grad_() for shape in shapes]
    x = normal(options.rows, options.length, WIDTH)
    keys = ps.random.split(ps.random.key(0, device), options.rows)

    def run(fn: Callable[..., Tensor]) -> None:
        torch.autograd.grad(fn(params, x, keys), params, allow_unused=True)

    calls: dict[str, dict[str, Any]] = {}
    for program in (network, alone):
        for name, dropout in DROPOUTS.items():
            fn: Callable[..., Tensor] = partial(program, dropout)
            fn = ps.compile(fn) if compiled else fn
            calls.setdefault(program.__name__, {})[name] = partial(run, fn)
    return calls


def main() -> None:
    """Measures in fresh processes and prints."""
    parser = timing.arguments(__doc__, repeats=20, launches=3)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    if options.report:
        timing.same_cores()
        seconds = {
            f"{program}, {'compiled' if compiled else 'eager'}": timing.in_turn(
                ways, options.repeats, warmup=3
            )
            for compiled in (True, False)
            for program, ways in calls_of(options, compiled).items()
        }
        options.report.write_text(json.dumps(seconds))
        return
    launches = [timing.launch("benchmarks.dropout") for _ in range(options.launches)]
    tables = {
        name: timing.joined([each[name] for each in launches], ["F.dropout"])
        for name in launches[0]
    }
    for name, table in tables.items():
        timing.show(name, table)
    timing.write(options.results, "dropout", {"tables": tables})


if __name__ == "__main__":
    main()
