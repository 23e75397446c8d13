"""What do logits cost that are never whole, against those that are, and against torch's own chunks?

    python -m benchmarks.speed.losses        writes benchmarks/results/losses.json

Losses of 4,096 tokens over a vocabulary of 131,072 and their gradients to 512 features and to the weight, each token with a cotangent
of its own. For each way, in a fresh process: the peak of memory above what it is given and what it returns, measured as in
`benchmarks/speed/memory.py`. The time is measured in other processes, in which all ways take turns. How far each is from float64 is
measured in a third, as a part of what the rounding of its sums may come to: below 1, it is as exact as its dtype allows.
"""

import argparse
import gc
import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions, functional

import purestep as ps
from benchmarks.speed import timing
from benchmarks.speed.memory import THRESHOLD, peak_on_gpu, peak_on_host
from support.logits import LogitsCase, compute_reference, error_bounds


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Whole logits."""
    return ps.losses.cross_entropy(hidden @ weight.T, labels)


def of_torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """In chunks of tokens, as torch chooses them."""
    return functional.linear_cross_entropy(
        hidden, weight, labels, reduction="none", options=LinearCrossEntropyOptions()
    )


PLAIN = "whole logits"
WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    PLAIN: plain,
    "F.linear_cross_entropy, chunked": of_torch,
    "ps.losses.linear_cross_entropy": ps.losses.linear_cross_entropy,
}


def case_of(options: argparse.Namespace, tokens: int) -> LogitsCase:
    """Hidden states, a weight, labels and cotangents."""
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, options.dtype)
    hidden = torch.randn(tokens, options.features, generator=generator)
    weight = torch.randn(options.vocabulary, options.features, generator=generator)
    return LogitsCase(
        hidden.to(timing.device(), dtype),
        (weight / options.features**0.5).to(timing.device(), dtype),
        torch.randint(options.vocabulary, (tokens,), generator=generator).to(
            timing.device()
        ),
        torch.rand(tokens, generator=generator).to(timing.device()) / tokens,
    )


class Made(NamedTuple):
    """What a way returns."""

    losses: Tensor
    hidden: Tensor
    weight: Tensor


def made_by(way: str, case: LogitsCase) -> Made:
    """Forward and backward."""
    hidden, weight = (
        case.hidden.detach().requires_grad_(),
        case.weight.detach().requires_grad_(),
    )
    losses = WAYS[way](hidden, weight, case.labels)
    grads = torch.autograd.grad(
        losses, (hidden, weight), case.cotangents.to(losses.dtype)
    )
    return Made(losses.detach(), *grads)


def peak_of(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Bytes above what it is given and returns."""
    case, made = case_of(options, options.tokens), []
    made_by(way, case_of(options, 8))
    gc.collect()
    measure = peak_on_gpu if torch.cuda.is_available() else peak_on_host
    peak = measure(lambda: made.append(made_by(way, case)))
    return {"bytes": peak - sum(each.nbytes for each in made[0])}


def ways_of(options: argparse.Namespace) -> list[str]:
    """All, but for those to leave out."""
    return [way for way in WAYS if way not in options.leave_out]


def errors_of(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The greatest error of each way's losses and of each gradient, in parts of its bound."""
    case = case_of(options, options.tokens)
    exact, allowed = compute_reference(case), error_bounds(case)
    return {
        way: {
            name: ((found.double() - exact[name]).abs() / allowed[name]).max().item()
            for name, found in made_by(way, case)._asdict().items()
        }
        for way in ways_of(options)
    }


def seconds_of(options: argparse.Namespace) -> timing.Seconds:
    """Of all ways, in one process."""
    timing.same_cores()
    ways = ways_of(options)
    for way in ways:
        made_by(way, case_of(options, 8))
    case = case_of(options, options.tokens)
    return timing.in_turn(
        {way: partial(made_by, way, case) for way in ways}, options.repeats, warmup=0
    )


def main() -> None:
    """Measures in fresh processes and prints."""
    parser = timing.arguments(__doc__, repeats=2, launches=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=2**17)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--errors", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if PLAIN in options.leave_out:
        parser.error(f"--leave-out {PLAIN!r}: all ways are compared with it")
    if options.report:
        if options.peak:
            measured: Any = peak_of(options.peak, options)
        else:
            measured = errors_of(options) if options.errors else seconds_of(options)
        options.report.write_text(json.dumps(measured))
        return
    report: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        launch = partial(timing.launch, "benchmarks.speed.losses", "--dtype", dtype)
        peaks = {
            way: launch("--peak", way, **THRESHOLD)["bytes"] for way in ways_of(options)
        }
        errors = launch("--errors")
        table = timing.joined([launch() for _ in range(options.launches)], [PLAIN])
        timing.show(dtype, table)
        for way in ways_of(options):
            parts = ", ".join(
                f"{name} {part:.2g}" for name, part in errors[way].items()
            )
            print(
                f"  {way}: {peaks[way] / 2**20:.0f} MiB ({peaks[way] / peaks[PLAIN]:.4f}); of the bound: {parts}"
            )
        report[dtype] = {"bytes": peaks, "of the bound": errors, "times": table}
    timing.write(options.results, "losses", report)


if __name__ == "__main__":
    main()
