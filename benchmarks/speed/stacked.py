"""What does a whole step cost to compile, and then to run, if its microbatches are stacked?

One donated update of a small GPT, compiled as a whole by ``ps.compile``, against the number of microbatches K: of a stacked group, and of a
list, which is unrolled. Compiling is processor time, that of the C++ compiler included, with all caches off; updates are taken in
turn with the eager step, and, if JAX and optax are installed, with a jitted scan of theirs over the same group.

    python -m benchmarks.speed.stacked                 benchmarks/results/stacked.json

The list with K = 16 takes minutes.
"""

import resource
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

import purestep as ps
from benchmarks.speed import peers, timing
from purestep.examples import gpt

CONFIG = gpt.Config(context=64, layers=2, width=64, heads=4)
ROWS = 4
OPTIMIZER = ps.optim.adamw(1e-3)
STACKED, LIST = "stacked", "list"
GROUPS = {STACKED: [4, 16, 64], LIST: [4, 16]}


def make_step() -> Any:
    """A step of the GPT, which is not compiled yet."""
    return ps.make_update_step(loss_fn, OPTIMIZER, donate=True)


def loss_fn(params: Any, microbatch: Any) -> torch.Tensor:
    """The losses of the next tokens."""
    logits = gpt.apply(CONFIG, params, microbatch["tokens"])
    return ps.losses.cross_entropy(logits, microbatch["labels"])


def make_group(k: int) -> list[Any]:
    """K microbatches of other numbers of tokens."""
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


def make_call(step: Any, group: Any) -> Callable[[], None]:
    """Makes a call that takes the next update, beginning at a new state."""
    params = gpt.init(CONFIG, torch.Generator().manual_seed(0))
    opt_state = OPTIMIZER.init(params)

    def call() -> None:
        nonlocal params, opt_state
        params, opt_state, _ = step(params, opt_state, group)

    return call


def measure(way: str, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of the processor in the first update with each K, and milliseconds of later ones."""
    torch.compiler.config.force_disable_caches = True
    step = ps.compile(make_step(), fullgraph=True)
    rows = {}
    for k in GROUPS[way]:
        group: Any = make_group(k)
        if way == STACKED:
            group = ps.stack(group)
        calls: dict[str, Callable[[], Any]] = {
            "here": make_call(step, group),
            "eager": make_call(make_step(), group),
        }
        before = processor_seconds()
        calls["here"]()
        first = processor_seconds() - before
        if find_spec("optax"):
            jax_way = peers.jax_optax(peers.gpt_problem(CONFIG))
            calls["JAX"] = partial(jax_way.update, jax_way.data(make_group(k)))
        seconds = timing.in_turn(calls, repeats)
        here, *others = (sorted(seconds[name])[repeats // 2] for name in calls)
        _, *names = calls
        ratios = {
            f"of {name}": here / other
            for name, other in zip(names, others, strict=True)
        }
        rows[str(k)] = {"first": first, "ms": 1e3 * here, **ratios}
        texts = ", ".join(f"{ratio:.2f} {name}" for name, ratio in ratios.items())
        print(
            f"{way:>8}, K = {k:>2}: {first:6.1f} s of the processor in the first update, then "
            f"{1e3 * here:6.1f} ms, {texts}",
            flush=True,
        )
    return rows


def main() -> None:
    """Measures all ways, each in this process, and writes the report."""
    parser = timing.arguments(__doc__, repeats=15, launches=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    timing.same_cores()
    report = {way: measure(way, options.repeats) for way in (STACKED, LIST)}
    timing.write(options.results, "stacked", report)


if __name__ == "__main__":
    main()
