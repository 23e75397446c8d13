"""How far is an update from what the machine can do?

The floor of an update is its products, each at the speed that it has alone, and one pass of AdamW over params, gradients and
moments. The products of one microbatch are recorded with their arguments: matrix products, and attention's kernels. Each
shape is then run alone, over and over, on the same arguments: by the library that eager torch calls, and large products by
oneDNN, too. A second floor has the faster one of each. The ways take turns, on one thread, so that seconds are seconds of the
processor.

floor           products and the optimizer's bytes, measured alone
advice          the same step with other settings: bfloat16 autocast, lower precision of products, tuned kernels

    python -m benchmarks.speed.limit        writes benchmarks/results/limit.json
"""

import argparse
import json
import math
import statistics
from collections import Counter
from functools import partial
from typing import Any

import torch

from benchmarks.speed import peers, timing
from purestep import tree
from purestep.compiling.products import onednn_matmul
from support.torch_private import TorchDispatchMode

ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = {
    "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default",
    f"{ATTENTION}.default", f"{ATTENTION}_backward.default",
}  # fmt: skip
BFLOAT16 = "purestep, compiled, bfloat16 autocast"
MEDIUM = 'purestep, compiled, matmul precision "medium"'
TUNED = "purestep, compiled, max-autotune"


class Products(TorchDispatchMode):
    """Records the products that run: one call of each shape, and how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, partial[Any]] = {}
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs the operation, and keeps the call of a product."""
        if str(func) in PRODUCTS:
            shapes = [
                f"{tuple(arg.shape)}{arg.stride()}"
                for arg in args
                if isinstance(arg, torch.Tensor)
            ]
            name = f"{func} {' '.join(shapes)}"
            self.calls.setdefault(name, partial(func, *args, **(kwargs or {})))
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def by_onednn(call: partial[Any]) -> partial[Any] | None:
    """Makes the call of a product of two matrices by oneDNN, which takes large ones; None for other calls."""
    if str(call.func) == "aten.mm.default":
        return partial(onednn_matmul, *call.args)
    if str(call.func) == "aten.addmm.default":
        # Without the sum, which a compiler joins to the next kernel.
        return partial(onednn_matmul, *call.args[1:])
    return None


def seconds_of_products(
    problem: peers.Problem, batch: peers.Batch
) -> tuple[float, float]:
    """Adds up the products of one microbatch, each as fast as it is alone: by eager torch, and by the faster library."""
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), problem.params)
    with Products() as products:
        problem.loss_sum(params, batch).backward()
    others = {
        f"oneDNN {name}": other
        for name, call in products.calls.items()
        if (other := by_onednn(call)) is not None
    }
    with torch.no_grad():
        samples = timing.in_turn(products.calls | others, repeats=15, block=5)
    seconds = {name: statistics.median(each) for name, each in samples.items()}
    eager = sum(number * seconds[name] for name, number in products.counts.items())
    fastest = sum(
        number * min(seconds[name], seconds.get(f"oneDNN {name}", math.inf))
        for name, number in products.counts.items()
    )
    return eager, fastest


def seconds_of_the_optimizer(problem: peers.Problem) -> float:
    """Times torch's fused AdamW alone: it reads and writes each number once."""
    leaves = [leaf.clone() for leaf in tree.leaves(problem.params)]
    for leaf in leaves:
        leaf.grad = torch.randn_like(leaf)
    calls = {"step": peers.torch_adamw(leaves).step}
    return statistics.median(timing.in_turn(calls, repeats=15)["step"])


def under_autocast(problem: peers.Problem) -> peers.Problem:
    """Lets the products of the losses run in bfloat16."""

    def token_losses(params: Any, batch: peers.Batch) -> torch.Tensor:
        with torch.autocast(timing.device().type, torch.bfloat16):
            return problem.token_losses(params, batch)

    return peers.Problem(problem.params, token_losses, problem.loss_sum)


def at_medium_precision(way: peers.Way) -> peers.Way:
    """Lets float32 products run in bfloat16 where the processor has it, during updates of this way alone."""

    def update(group: Any) -> peers.Metrics:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            return way.update(group)
        finally:
            torch.set_float32_matmul_precision(before)

    return way._replace(update=update)


def make_ways(problem: peers.Problem, options: argparse.Namespace) -> dict[str, Any]:
    """Makes the ways: those of the peers, and purestep with other settings."""
    peers_without = [name for name in options.leave_out if name in peers.WAYS]
    makers = peers.ways_without(peers_without)
    names = [
        peers.BY_HAND, peers.PURE, peers.BY_HAND_COMPILED, peers.PURE_COMPILED, peers.JAX,
    ]  # fmt: skip
    ways = {name: makers[name](problem) for name in names if name in makers}
    compiled = partial(peers.purestep, donate=True, compile=True)
    advice = {
        BFLOAT16: lambda: compiled(under_autocast(problem)),
        MEDIUM: lambda: at_medium_precision(compiled(problem)),
        TUNED: lambda: peers.purestep(
            problem,
            donate=True,
            compile=partial(torch.compile, mode="max-autotune-no-cudagraphs"),
        ),
    }
    return ways | {
        name: make() for name, make in advice.items() if name not in options.leave_out
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the floor and all ways in this process."""
    problem = peers.gpt_problem(peers.CONFIG)
    group = peers.group_of(options.microbatches, options.rows, [peers.CONFIG.context])
    eager, fastest = seconds_of_products(problem, group[0])
    optimizer = seconds_of_the_optimizer(problem)
    ways = make_ways(problem, options)
    calls = {name: partial(way.update, way.data(group)) for name, way in ways.items()}
    seconds = timing.in_turn(calls, options.repeats, warmup=2)
    return {
        "products": options.microbatches * eager,
        "fastest products": options.microbatches * fastest,
        "optimizer": optimizer,
        "seconds": seconds,
    }


def main() -> None:
    """Measures in fresh processes, prints, and writes the report."""
    parser = timing.arguments(__doc__, repeats=12, launches=3)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="in a microbatch")
    options = parser.parse_args()
    if options.report:
        torch.set_num_threads(1)
        timing.same_cores()
        options.report.write_text(json.dumps(measure(options)))
        return
    launches = [
        timing.launch("benchmarks.speed.limit", OMP_NUM_THREADS="1")
        for _ in range(options.launches)
    ]
    parts = {
        part: statistics.median(launch[part] for launch in launches)
        for part in ("products", "fastest products", "optimizer")
    }
    floor = parts["products"] + parts["optimizer"]
    table = timing.joined([launch["seconds"] for launch in launches], [peers.BY_HAND])
    of_floor = {way: seconds / floor for way, seconds in table["seconds"].items()}
    timing.show("GPT, 4M parameters, one thread", table)
    print(
        f"\nfloor: {1e3 * floor:.1f} ms, of which products {1e3 * parts['products']:.1f}, "
        f"and {1e3 * parts['fastest products']:.1f} each by the faster library"
    )
    for way, ratio in of_floor.items():
        print(f"  {way}: {ratio:.2f} of the floor")
    report = {"floor": floor, **parts, "of the floor": of_floor, "table": table}
    timing.write(options.results, "limit", report)


if __name__ == "__main__":
    main()
