"""What does keyed dropout cost, against ``F.dropout``?

    python -m benchmarks.speed.dropout        writes benchmarks/results/dropout.json

In the demo's network (``purestep.examples.gpt``) with dropout of the embedding and of both residuals of each layer, and alone, forward and
backward, compiled and eager; and the first call of the compiled network, in which it is compiled, without what earlier processes have compiled. The
ways take turns, and ratios are of the same turn. ``ps.random.dropout`` is given one key for each row, and each place folds its number in.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

import purestep as ps
from benchmarks.speed import timing
from purestep import tree
from purestep.examples import gpt

CONFIG, P = gpt.Config(), 0.1

Dropout = Callable[[Tensor, Tensor, int], Tensor]
DROPOUTS: dict[str, Dropout] = {
    "none": lambda x, keys, place: x,
    "F.dropout": lambda x, keys, place: functional.dropout(x, P),
    "ps.random.dropout": lambda x, keys, place: ps.random.dropout(
        x, P, ps.random.fold_in(keys, place)
    ),
}


def network(dropout: Dropout, params: Any, tokens: Tensor, keys: Tensor) -> Tensor:
    """The demo's loss, summed."""
    x = (
        functional.embedding(tokens, params["embedding"])
        + params["position"][: tokens.shape[1]]
    )
    x = dropout(x, keys, 0)
    for place, layer in enumerate(params["layers"]):
        qkv = functional.layer_norm(x, x.shape[-1:]) * layer["norms"][0] @ layer["qkv"]
        query, key, value = rearrange(
            qkv,
            "batch time (three head d) -> three batch head time d",
            three=3,
            head=CONFIG.heads,
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        mixed = (
            rearrange(mixed, "batch head time d -> batch time (head d)") @ layer["out"]
        )
        x = x + dropout(mixed, keys, 2 * place + 1)
        hidden = (
            functional.layer_norm(x, x.shape[-1:]) * layer["norms"][1] @ layer["up"]
        )
        x = x + dropout(functional.gelu(hidden) @ layer["down"], keys, 2 * place + 2)
    logits = (
        functional.layer_norm(x, x.shape[-1:]) * params["norm"] @ params["embedding"].T
    )
    return ps.losses.cross_entropy(logits, tokens).sum()


def alone(dropout: Dropout, params: Any, tokens: Tensor, keys: Tensor) -> Tensor:
    """Of dropout alone."""
    x = params["position"].expand(len(tokens), -1, -1)
    return dropout(x, keys, 0).square().sum()


def calls_of(options: argparse.Namespace, compiled: bool) -> dict[str, dict[str, Any]]:
    """Forward and backward of each program with each dropout."""
    generator, device = torch.Generator().manual_seed(0), timing.device()
    params = tree.map(lambda leaf: leaf.to(device), gpt.init(CONFIG, generator))
    leaves = [leaf.requires_grad_() for leaf in tree.leaves(params)]
    tokens = torch.randint(256, (options.rows, CONFIG.context), generator=generator).to(
        device
    )
    keys = ps.random.split(ps.random.key(0, device), options.rows)

    def run(fn: Callable[..., Tensor]) -> None:
        torch.autograd.grad(fn(params, tokens, keys), leaves, allow_unused=True)

    calls: dict[str, dict[str, Any]] = {}
    for program in (network, alone):
        for name, dropout in DROPOUTS.items():
            fn: Callable[..., Tensor] = partial(program, dropout)
            fn = ps.compile(fn) if compiled else fn
            calls.setdefault(program.__name__, {})[name] = partial(run, fn)
    return calls


def first_calls(ways: dict[str, Callable[[], object]]) -> timing.Seconds:
    """What each takes to compile."""
    seconds: timing.Seconds = {}
    for name, call in ways.items():
        start = time.perf_counter()
        call()
        seconds[name] = [time.perf_counter() - start]
    return seconds


def report(options: argparse.Namespace) -> dict[str, timing.Seconds]:
    """All tables of one launch."""
    timing.same_cores()
    ps.compile(torch.neg)(torch.ones(2))  # what a process does once
    compiled, eager = calls_of(options, True), calls_of(options, False)
    tables = {"network, first call": first_calls(compiled["network"])}
    for how, programs in (("compiled", compiled), ("eager", eager)):
        for program, ways in programs.items():
            tables[f"{program}, {how}"] = timing.in_turn(
                ways, options.repeats, warmup=3
            )
    return tables


def main() -> None:
    """Measures in fresh processes and prints."""
    parser = timing.arguments(__doc__, repeats=20, launches=3)
    parser.add_argument("--rows", type=int, default=16)
    options = parser.parse_args()
    if options.report:
        options.report.write_text(json.dumps(report(options)))
        return
    anew = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    launches = [
        timing.launch("benchmarks.speed.dropout", **anew)
        for _ in range(options.launches)
    ]
    tables = {
        name: timing.joined([each[name] for each in launches], ["F.dropout"])
        for name in launches[0]
    }
    for name, table in tables.items():
        timing.show(name, table)
    timing.write(options.results, "dropout", {"tables": tables})


if __name__ == "__main__":
    main()
