"""How much memory does one update need above its state, and does it depend on the number of microbatches?

For each way of `benchmarks/speed/peers.py` that runs on torch, in a fresh process: the peak of the resident size during one update,
less the resident size before it, which holds parameters, moments and data. Two updates that are not measured come
first: libraries have loaded, kernels are compiled, moments exist. On a GPU it is the peak of what torch has allocated. The
unit is the tree of parameters: 1 is what the gradients alone take. With a single microbatch there is no sum to hold while
the next forward pass runs, and gradients take the place of activations that are freed.

glibc keeps small blocks for itself, which adds up to 20 % of noise; with MALLOC_MMAP_THRESHOLD_=65536, which this sets,
peaks repeat to a few tenths of a percent.

    python -m benchmarks.speed.memory        writes benchmarks/results/memory.{json,png}
"""

import argparse
import gc
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed import peers, timing
from purestep import tree

THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def resident(name: str) -> int:
    """The resident size in bytes: ``VmRSS`` now, or ``VmHWM`` at its peak."""
    status = Path("/proc/self/status").read_text()
    [kilobytes] = re.findall(rf"{name}:\s+(\d+) kB", status)
    return 1024 * int(kilobytes)


def peak_on_host(call: Callable[[], object]) -> int:
    """Bytes by which the resident size rose."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def peak_on_gpu(call: Callable[[], object]) -> int:
    """Bytes by which torch's allocations rose."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def worker(options: argparse.Namespace) -> dict[str, float]:
    """One way and one number of microbatches: the peak of one update, in trees of parameters."""
    [k] = options.microbatches
    problem = peers.gpt_problem(peers.CONFIG)
    size = sum(
        leaf.numel() * leaf.element_size() for leaf in tree.leaves(problem.params)
    )
    way = peers.WAYS[options.way](problem)
    group = peers.group_of(k, options.rows, [peers.CONFIG.context])
    for _ in range(2):
        way.update(group)
    gc.collect()
    measure = peak_on_gpu if torch.cuda.is_available() else peak_on_host
    return {"trees": measure(lambda: way.update(group)) / size, "bytes of a tree": size}


def draw(path: Path, ks: list[int], trees: dict[str, list[float]]) -> None:
    """The peaks against the number of microbatches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), dpi=150, layout="constrained")
    styles = {
        peers.PURE: "#0072b2",
        peers.PURE_KEPT: "#56b4e9",
        peers.BY_HAND: "#d55e00",
    }
    others = iter(["#009e73", "#cc79a7", "#e69f00", "0.6", "0.3", "#8c6d31"])
    highest_first = sorted(trees.items(), key=lambda item: -item[1][-1])
    for way, values in highest_first:
        axes.plot(
            ks, values, "o-", label=f"{way}: {values[-1]:.2f}", color=styles.get(way) or next(others),
            linewidth=5 if way == peers.BY_HAND else 2,
            zorder={peers.BY_HAND: 3, peers.PURE: 4}.get(way, 2),
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("microbatches per update")
    axes.set_ylabel("peak above the state, in trees of parameters")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measures each way in fresh processes, prints, draws."""
    parser = timing.arguments(__doc__, repeats=1, launches=3)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument(
        "--rows", type=int, default=4, help="of 64 bytes in a microbatch"
    )
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.report:
        options.report.write_text(json.dumps(worker(options)))
        return

    ways = peers.ways_without([*options.leave_out, peers.JAX])
    report: dict[str, Any] = {
        "microbatches": options.microbatches,
        "trees": {},
        "launches": {},
    }
    for way in ways:
        peaks = [
            [
                timing.launch("benchmarks.speed.memory", "--way", way, "--microbatches", str(k), **THRESHOLD)
                for _ in range(options.launches)
            ]
            for k in options.microbatches
        ]  # fmt: skip
        report["bytes of a tree"] = peaks[0][0]["bytes of a tree"]
        report["launches"][way] = [
            [peak["trees"] for peak in launches] for launches in peaks
        ]
        report["trees"][way] = [
            statistics.median(values) for values in report["launches"][way]
        ]
        reference = report["trees"].get(peers.BY_HAND, report["trees"][way])
        columns = [
            f"K = {k}: {own:.3f} trees ({own / base:.3f}x)"
            for k, own, base in zip(
                options.microbatches, report["trees"][way], reference, strict=True
            )
        ]
        print(f"{way:>22}: " + ", ".join(columns))
    picture = timing.write(options.results, "memory", report)
    draw(picture, options.microbatches, report["trees"])


if __name__ == "__main__":
    main()
