"""What does a whole step cost to compile, and then to run, if its microbatches are stacked?

One donated update of a small GPT, compiled as a whole by ``ps.compile``, against the number of microbatches K: of a stacked group, and of a
list, which is unrolled. Compiling is processor time, that of the C++ compiler included, with all caches off; updates are taken in
turn with the eager step, and, if JAX and optax are installed, with a jitted scan of theirs over the same group. Those of a list are also taken in turn
with the stacked group's. Then the same for the network of two hidden layers of ``benchmarks.speed.overhead``, where the loop itself shows. One operation is compiled before all of it: torch imports its
compiler then, which compiles its headers and asks what the processor can, on a new machine.

    python -m benchmarks.speed.stacked                 benchmarks/results/stacked.json

The lists with K = 16 take minutes.
"""

import resource
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

import purestep as ps
from benchmarks.speed import overhead, peers, timing
from purestep import tree
from purestep.examples import gpt

CONFIG = gpt.Config(context=64, layers=2, width=64, heads=4)
ROWS = 4
OPTIMIZER = ps.optim.adamw(1e-3)


class Way(NamedTuple):
    """A network, groups of microbatches for it, and whether they are stacked."""

    problem: peers.Problem
    group_of: Callable[[int], list[Any]]
    is_stacked: bool
    lengths: list[int]
    block: int
    """So many updates are timed at once."""


def make_ways() -> dict[str, Way]:
    """All ways, in order."""
    small_gpt = peers.gpt_problem(CONFIG)
    mlp = overhead.problem_of(overhead.init(0))
    return {
        "stacked": Way(small_gpt, make_group, True, [4, 16, 64], 1),
        "list": Way(small_gpt, make_group, False, [4, 16], 1),
        "MLP, stacked": Way(mlp, overhead.group_of, True, [4, 16, 64], 20),
        "MLP, list": Way(mlp, overhead.group_of, False, [4, 16], 20),
    }


def make_step(problem: peers.Problem) -> Any:
    """A donating step, which is not compiled yet."""
    return ps.make_update_step(problem.token_losses, OPTIMIZER, donate=True)


def make_group(k: int) -> list[Any]:
    """K microbatches of text, of other numbers of tokens."""
    generator = torch.Generator().manual_seed(k)
    group = []
    for number in range(k):
        text = torch.randint(0, 256, (ROWS, CONFIG.context + 1), generator=generator)
        labels = text[:, 1:].clone()
        labels[0, : number % 5] = -100
        group.append({"tokens": text[:, :-1].contiguous(), "labels": labels})
    return group


def processor_seconds() -> float:
    """Of this process and of those that it has waited for, as the C++ compiler."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def make_call(way: Way, step: Any, group: Any) -> Callable[[], None]:
    """Makes a call that takes the next update, beginning at a new state."""
    params = tree.map(torch.clone, way.problem.params)
    opt_state = OPTIMIZER.init(params)

    def call() -> None:
        nonlocal params, opt_state
        params, opt_state, _ = step(params, opt_state, group)

    return call


def measure(name: str, way: Way, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of the processor in the first update with each K, and milliseconds of later ones."""
    step = ps.compile(make_step(way.problem), fullgraph=True)
    rows = {}
    for k in way.lengths:
        group: Any = way.group_of(k)
        if way.is_stacked:
            group = ps.stack(group)
        calls: dict[str, Callable[[], Any]] = {
            "here": make_call(way, step, group),
            "eager": make_call(way, make_step(way.problem), group),
        }
        if not way.is_stacked:
            compiled = ps.compile(make_step(way.problem), fullgraph=True)
            calls["stacked"] = make_call(way, compiled, ps.stack(group))
        before = processor_seconds()
        calls["here"]()
        first = processor_seconds() - before
        if find_spec("optax"):
            in_jax = peers.jax_optax(way.problem)
            calls["JAX"] = partial(in_jax.update, in_jax.data(way.group_of(k)))
        seconds = timing.in_turn(calls, repeats, block=way.block)
        here, *others = (sorted(seconds[each])[repeats // 2] for each in calls)
        _, *names = calls
        ratios = {
            f"of {other}": here / value
            for other, value in zip(names, others, strict=True)
        }
        rows[str(k)] = {"first": first, "ms": 1e3 * here, **ratios}
        texts = ", ".join(f"{ratio:.2f} {other}" for other, ratio in ratios.items())
        print(
            f"{name:>12}, K = {k:>2}: {first:6.1f} s of the processor in the first update, then "
            f"{1e3 * here:7.2f} ms, {texts}",
            flush=True,
        )
    return rows


def compile_one_operation() -> float:
    """Seconds of the processor for that, in a process that has compiled nothing."""
    before = processor_seconds()
    compiled: Any = torch.compile(torch.square)
    compiled(torch.ones(16))
    return processor_seconds() - before


def main() -> None:
    """Measures all ways, each in this process, and writes the report."""
    parser = timing.arguments(__doc__, repeats=15, launches=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    timing.same_cores()
    torch.compiler.config.force_disable_caches = True
    report: dict[str, Any] = {"one operation": compile_one_operation()}
    print(f"one operation: {report['one operation']:.1f} s of the processor")
    for name, way in make_ways().items():
        report[name] = measure(name, way, options.repeats)
    timing.write(options.results, "stacked", report)


if __name__ == "__main__":
    main()
