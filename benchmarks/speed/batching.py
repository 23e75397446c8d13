"""How much time does the freedom of the cut buy?

The same groups of examples, three ways to cut them into microbatches for one rank: in order of arrival, padded
to the longest of each microbatch; all padded to the longest of all; and `ps.pack`. The update is the same, so
what differs is padding, and with it time. And `ps.balance` against dealing the examples out in order, over 8 ranks.

    python -m benchmarks.speed.batching        writes benchmarks/results/batching.{json,png}
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import purestep as ps
from purestep import data, tree
from purestep.examples import gpt
from purestep.examples.docstrings import load_corpus

RESULTS = Path(__file__).parent.with_name("results")
RANKS, MULTIPLE = 8, 8
Example = dict[str, Tensor]


def docstring_lengths(
    count: int, longest: int, generator: torch.Generator
) -> list[int]:
    """Lengths of random docstrings of Python's standard library, in bytes."""
    lengths = [min(longest, len(text) - 1) for text in load_corpus()]
    picks = torch.randint(0, len(lengths), (count,), generator=generator)
    return [lengths[i] for i in picks.tolist()]


def lognormal_lengths(
    count: int, longest: int, generator: torch.Generator
) -> list[int]:
    """Log-normal lengths: median 90, σ = 1."""
    draws = torch.randn(count, generator=generator, dtype=torch.float64)
    return (90 * draws.exp()).round().clamp(1, longest).int().tolist()


def examples_of(lengths: list[int], generator: torch.Generator) -> list[Example]:
    """Random bytes of these lengths: what is learned does not matter here."""
    texts = [torch.randint(0, 256, (n + 1,), generator=generator) for n in lengths]
    return [{"tokens": text[:-1], "labels": text[1:]} for text in texts]


def cut_rows(
    examples: list[Example], rows: int, length: int | None = None
) -> list[Any]:
    """Microbatches of so many rows in order of arrival, padded to their longest, or to ``length``."""
    parts = [examples[i : i + rows] for i in range(0, len(examples), rows)]
    return [
        data.stack_examples(
            part, length or max(len(e["tokens"]) for e in part), data.DEFAULT_PAD
        )
        for part in parts
    ]


def padded_tokens(group: list[Any]) -> int:
    """What is computed, padding included."""
    return sum(part["tokens"].numel() for part in group)


def spread(loads: list[int]) -> float:
    """How much longer than the mean the slowest rank takes."""
    return max(loads) / statistics.mean(loads) - 1


def measure(
    name: str, lengths: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    """Times, tokens and balance for one distribution of lengths."""
    generator = torch.Generator().manual_seed(1)
    config = gpt.Config(context=options.longest)
    params = gpt.init(config, generator)
    optimizer = ps.optim.adamw(1e-3)
    opt_state = optimizer.init(params)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return ps.losses.cross_entropy(
            gpt.apply(config, params, batch["tokens"]), batch["labels"]
        )

    step = ps.make_update_step(loss_fn, optimizer)
    examples = examples_of(lengths, generator)
    groups = {
        "pack": ps.pack(examples, max_tokens=options.budget, multiple_of=MULTIPLE),
        "order of arrival": cut_rows(examples, options.rows),
        "longest of all": cut_rows(examples, options.rows, max(lengths)),
    }
    seconds: dict[str, list[float]] = {way: [] for way in groups}
    results: dict[str, Any] = {}
    for repeat in range(options.repeats + 1):
        for way, group in groups.items():
            start = time.perf_counter()
            results[way] = step(params, opt_state, group)
            if repeat:
                seconds[way].append(time.perf_counter() - start)
    reference = results["order of arrival"][1]
    gradients = {
        way: float(
            tree.global_norm(tree.map(torch.sub, result[1].mu, reference.mu))
            / tree.global_norm(reference.mu)
        )
        for way, result in results.items()
    }
    dealt = [sum(lengths[rank::RANKS]) for rank in range(RANKS)]
    shares = [
        sum(lengths[i] for i in part) for part in data.balance_indices(lengths, RANKS)
    ]
    return {
        "name": name,
        "examples": len(lengths),
        "tokens": sum(lengths),
        "lengths": sorted(lengths),
        "padded": {way: padded_tokens(group) for way, group in groups.items()},
        "microbatches": {way: len(group) for way, group in groups.items()},
        "seconds": {way: statistics.median(times) for way, times in seconds.items()},
        "ratio": {
            way: statistics.median(
                t / p for t, p in zip(times, seconds["pack"], strict=True)
            )
            for way, times in seconds.items()
        },
        "gradient distance": gradients,
        "slowest rank": {"dealt in order": spread(dealt), "balance": spread(shares)},
    }


def planner(count: int) -> dict[str, float]:
    """Seconds to plan a group of so many examples."""
    lengths = lognormal_lengths(count, 2048, torch.Generator().manual_seed(0))
    seconds = {}
    for name, plan in {
        "pack": lambda: data.pack_indices(
            lengths, max_tokens=16384, multiple_of=MULTIPLE
        ),
        "balance": lambda: data.balance_indices(lengths, RANKS),
        "pack_documents": lambda: data.pack_document_indices(lengths, row_tokens=2048),
    }.items():
        start = time.perf_counter()
        plan()
        seconds[name] = time.perf_counter() - start
    return seconds


def draw(path: Path, measured: list[dict[str, Any]]) -> None:
    """Time per update, tokens computed, and balance, for each distribution."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {"pack": "#0072b2", "order of arrival": "#d55e00", "longest of all": "0.6"}
    figure, rows = pyplot.subplots(
        len(measured),
        3,
        figsize=(11, 2.6 * len(measured)),
        dpi=150,
        layout="constrained",
    )
    for (times, tokens, ranks), result in zip(rows, measured, strict=True):
        ways = list(result["seconds"])
        bars = times.barh(
            ways, [result["seconds"][w] for w in ways], color=[colors[w] for w in ways]
        )
        times.bar_label(bars, [f"{result['ratio'][w]:.2f}×" for w in ways], padding=3)
        times.margins(x=0.2)
        times.set_ylabel(result["name"])
        times.set_xlabel("seconds per update")
        tokens.barh(
            ways,
            [result["padded"][w] / 1e3 for w in ways],
            color=[colors[w] for w in ways],
        )
        tokens.axvline(
            result["tokens"] / 1e3, color="black", linewidth=1, linestyle=":"
        )
        tokens.set_yticks([])
        tokens.set_xlabel("thousand tokens computed (dotted: without padding)")
        kinds = list(result["slowest rank"])
        bars = ranks.barh(
            ["in order", "balance"], [100 * result["slowest rank"][k] for k in kinds],
            color=["#d55e00", "#0072b2"],
        )  # fmt: skip
        ranks.bar_label(
            bars, [f"{100 * result['slowest rank'][k]:.2f} %" for k in kinds], padding=3
        )
        ranks.margins(x=0.25)
        ranks.set_xlabel(f"slowest of {RANKS} ranks above the mean, %")
        for axes in (times, tokens, ranks):
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measures, prints, draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=256, help="examples in a group")
    parser.add_argument(
        "--rows", type=int, default=16, help="rows of a microbatch in order of arrival"
    )
    parser.add_argument(
        "--longest", type=int, default=512, help="the context of the model"
    )
    parser.add_argument(
        "--budget", type=int, default=4096, help="max_tokens of a packed microbatch"
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    measured = []
    for name, make in {
        "docstrings": docstring_lengths,
        "log-normal": lognormal_lengths,
    }.items():
        lengths = make(
            options.examples, options.longest, torch.Generator().manual_seed(0)
        )
        result = measure(name, lengths, options)
        measured.append(result)
        print(f"{name}: {result['examples']} examples, {result['tokens']} tokens")
        for way in result["seconds"]:
            print(
                f"  {way:>16}: {result['seconds'][way]:.3f} s, {result['ratio'][way]:.2f}x of pack, "
                f"{result['padded'][way]} tokens computed in {result['microbatches'][way]} microbatches, "
                f"gradient off by {result['gradient distance'][way]:.1e}"
            )
        for way, above in result["slowest rank"].items():
            print(
                f"  slowest of {RANKS} ranks, {way}: {100 * above:.3f} % above the mean"
            )
    seconds = planner(100_000)
    for name, value in seconds.items():
        print(f"planning 100,000 examples, {name}: {value:.3f} s")
    RESULTS.mkdir(exist_ok=True)
    report = {
        "torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine(),
        "measured": measured, "planner": seconds,
    }  # fmt: skip
    (RESULTS / "batching.json").write_text(json.dumps(report, indent=1))
    draw(RESULTS / "batching.png", measured)
    print(f"picture: {RESULTS / 'batching.png'}")


if __name__ == "__main__":
    main()
