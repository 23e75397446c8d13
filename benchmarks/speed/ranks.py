"""What do more microbatches cost when gradients cross ranks?

One update on two real ranks (gloo processes, one thread each), against the number of microbatches K, four ways in turn:
purestep with `MeshAxis`; a loop with `ps.make_backward`; DistributedDataParallel that synchronises every microbatch, which is its default; and
DistributedDataParallel with `no_sync` on all but the last. All count tokens globally before the first
backward pass, report loss and gradient norm, and arrive at the same parameters.

Where a process's memory comes to lie makes a difference of one or two percent that lasts as long as the process: the
ranks are launched several times, and the ratios are medians over all updates of all launches.

    python -m benchmarks.speed.ranks        writes benchmarks/results/ranks.{json,png}
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import purestep as ps
from benchmarks.speed import timing
from purestep import tree
from purestep.examples import gpt

CONFIG = gpt.Config(context=64, layers=4, width=256, heads=8)
LEARNING_RATE = 0.1
BRIDGED = "purestep, make_backward"
WAYS = ["purestep", BRIDGED, "DDP, no_sync", "DDP"]
Batch = dict[str, Tensor]
Way = Callable[[list[Batch]], Any]


def group_of(k: int, rows: int, generator: torch.Generator) -> list[Batch]:
    """K microbatches of random bytes, each with labels to ignore."""
    shape = (rows, CONFIG.context)
    group = []
    for _ in range(k):
        labels = torch.randint(0, 256, shape, generator=generator)
        ignored = torch.rand(shape, generator=generator) < 0.3
        tokens = torch.randint(0, 256, shape, generator=generator)
        group.append({"tokens": tokens, "labels": labels.masked_fill(ignored, -100)})
    return group


class Module(nn.Module):
    """The same network for DistributedDataParallel, which wants a module."""

    def __init__(self, params: Any) -> None:
        super().__init__()
        leaves, self.structure = tree.flatten(params)
        self.leaves = nn.ParameterList(leaf.clone() for leaf in leaves)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        return gpt.apply(
            CONFIG, tree.unflatten(self.structure, list(self.leaves)), tokens
        )


def pure_step(params: Any) -> tuple[Way, Callable[[], Any]]:
    """purestep, and a function to its parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        return ps.losses.cross_entropy(
            gpt.apply(CONFIG, params, batch["tokens"]), batch["labels"]
        )

    optimizer = ps.optim.sgd(LEARNING_RATE)
    step = ps.make_update_step(
        loss_fn, optimizer, axis=ps.MeshAxis(mesh, "dp"), donate=True
    )
    state = tree.map(Tensor.clone, (params, optimizer.init(params)))

    def update(group: list[Batch]) -> None:
        nonlocal state
        new_params, new_opt_state, _ = step(state[0], state[1], group)
        state = (new_params, new_opt_state)

    return update, lambda: state[0]


def bridged_step(params: Any) -> tuple[Way, Callable[[], Any]]:
    """A loop whose backward passes are those of ``ps.make_backward``, and a function to its parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    module = Module(params)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, foreach=True)

    def loss_fn(module: Any, batch: Batch) -> Tensor:
        return ps.losses.cross_entropy(module(batch["tokens"]), batch["labels"])

    backward = ps.make_backward(module, loss_fn, axis=ps.MeshAxis(mesh, "dp"))

    def update(group: list[Batch]) -> None:
        backward(group)
        optimizer.step()

    def params_of() -> Any:
        return tree.unflatten(module.structure, [p.detach() for p in module.leaves])

    return update, params_of


def ddp_step(params: Any, *, synchronise: bool) -> tuple[Way, Callable[[], Any]]:
    """DistributedDataParallel as its users write it when they count tokens, and a function to its parameters."""
    module = DistributedDataParallel(Module(params), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, foreach=True)

    own = list(module.parameters())
    metrics: dict[str, Tensor] = {}
    norm_of: Any = nn.utils.get_total_norm

    def update(group: list[Batch]) -> None:
        num_tokens = torch.stack(
            [(batch["labels"] != -100).sum() for batch in group]
        ).sum()
        dist.all_reduce(num_tokens)
        total = torch.zeros(())
        for position, batch in enumerate(group):
            last = position == len(group) - 1
            with contextlib.nullcontext() if synchronise or last else module.no_sync():
                logits = module(batch["tokens"])
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
                )
                # DistributedDataParallel averages over ranks.
                (loss / num_tokens * dist.get_world_size()).backward()
            total += loss.detach()
        # What purestep reports as well: the loss, and the norm of the gradients.
        dist.all_reduce(total)
        metrics.update(
            loss=total / num_tokens, grad_norm=norm_of([p.grad for p in own])
        )
        optimizer.step()
        optimizer.zero_grad()

    structure = module.module.structure
    return update, lambda: tree.unflatten(structure, [p.detach() for p in own])


def traffic(update: Way, group: list[Batch]) -> dict[str, int]:
    """How many collectives run in one update, by name: those that Python can see."""
    with CommDebugMode() as mode:
        update(group)
    return {str(op): count for op, count in mode.get_comm_counts().items()}


def worker(options: argparse.Namespace) -> None:
    """One rank: measures all ways in turn; rank 0 writes the report."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    params = gpt.init(CONFIG, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(dist.get_rank())
    ways = {
        "purestep": pure_step(params),
        BRIDGED: bridged_step(params),
        "DDP, no_sync": ddp_step(params, synchronise=False),
        "DDP": ddp_step(params, synchronise=True),
    }
    elements = sum(leaf.numel() for leaf in tree.leaves(params))
    orders = list(itertools.permutations(WAYS))
    measured = []
    for k in options.microbatches:
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for repeat in range(options.repeats + 1):
            group = group_of(k, options.rows, generator)
            for way in orders[repeat % len(orders)]:
                dist.barrier()
                start = time.perf_counter()
                ways[way][0](group)
                dist.barrier()
                if repeat:
                    seconds[way].append(time.perf_counter() - start)
        measured.append(
            {
                "k": k,
                "seconds": seconds,
                "gradient megabytes": {
                    way: 4e-6 * elements * (k if way == "DDP" else 1) for way in ways
                },
                "collectives": traffic(ways["purestep"][0], group),
            }
        )
        # The update that was counted belongs to the others too.
        for way in (BRIDGED, "DDP, no_sync", "DDP"):
            ways[way][0](group)
    reference = ways["DDP, no_sync"][1]()
    distances = {
        way: float(
            tree.global_norm(tree.map(torch.sub, get(), reference))
            / tree.global_norm(reference)
        )
        for way, (_, get) in ways.items()
    }
    if dist.get_rank() == 0:
        report = {
            "torch": torch.__version__, "machine": platform.machine(), "parameters": elements,
            "rows": options.rows, "measured": measured, "distance from no_sync": distances,
        }  # fmt: skip
        options.report.write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def joined(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of several launches: medians, and the median ratio of each launch beside that of all."""
    measured = []
    for parts in zip(*(report["measured"] for report in reports), strict=True):
        times = {way: [part["seconds"][way] for part in parts] for way in WAYS}
        ratios = {
            way: [
                [t / own for t, own in zip(there, here, strict=True)]
                for there, here in zip(times[way], times["purestep"], strict=True)
            ]
            for way in WAYS
        }
        medians = {
            "seconds": {
                way: statistics.median(itertools.chain(*times[way])) for way in WAYS
            },
            "ratio": {
                way: statistics.median(itertools.chain(*ratios[way])) for way in WAYS
            },
            "ratio of each launch": {
                way: [statistics.median(launch) for launch in ratios[way]]
                for way in WAYS
            },
        }
        measured.append(parts[0] | medians)
    return reports[0] | {"measured": measured, "launches": len(reports)}


def draw(path: Path, measured: list[dict[str, Any]]) -> None:
    """Time per microbatch on the left, gradient traffic per update on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {
        "purestep": "#0072b2",
        BRIDGED: "#56b4e9",
        "DDP, no_sync": "#d55e00",
        "DDP": "0.55",
    }
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 3.8), dpi=150, layout="constrained"
    )
    ks = [result["k"] for result in measured]
    for way, color in colors.items():
        # The line below the other is seen.
        line = {"DDP, no_sync": (5, 2), "purestep": (1.8, 4)}.get(way, (1.8, 3))
        style: dict[str, Any] = {
            "color": color,
            "label": way,
            "linewidth": line[0],
            "zorder": line[1],
        }
        per_microbatch = [
            1e3 * result["seconds"][way] / result["k"] for result in measured
        ]
        left.plot(ks, per_microbatch, "o-", **style)
        right.plot(
            ks,
            [result["gradient megabytes"][way] for result in measured],
            "o-",
            **style,
        )
    left.set_ylabel("milliseconds per microbatch")
    left.set_ylim(0, 1.1 * left.get_ylim()[1])
    right.set_ylabel("megabytes of gradients reduced per update")
    right.set_yscale("log", base=2)
    of_each = [result["gradient megabytes"]["DDP"] for result in measured]
    right.set_yticks(of_each, [f"{value:.0f}" for value in of_each])
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, [str(k) for k in ks])
        axes.set_xlabel("microbatches per update")
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Starts the ranks, prints, draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--rows", type=int, default=4, help="rows of 64 bytes in a microbatch"
    )
    parser.add_argument(
        "--repeats", type=int, default=12, help="updates of each way in a launch"
    )
    parser.add_argument("--launches", type=int, default=6)
    parser.add_argument("--report", type=Path, help="for the ranks: where to write")
    options = parser.parse_args()
    if "RANK" in os.environ:
        worker(options)
        return

    report = joined(
        [
            timing.launch_ranks(2, "benchmarks.speed.ranks")
            for _ in range(options.launches)
        ]
    )
    timing.RESULTS.mkdir(exist_ok=True)
    (timing.RESULTS / "ranks.json").write_text(json.dumps(report, indent=1))
    print(f"{report['parameters'] / 1e6:.1f}M parameters on 2 ranks")
    for result in report["measured"]:
        parts = [
            f"{way} {1e3 * result['seconds'][way]:.0f} ms ({result['ratio'][way]:.3f}x, "
            f"{result['gradient megabytes'][way]:.0f} MB)"
            for way in WAYS
        ]
        print(f"K = {result['k']:>2}: " + ", ".join(parts))
        spread = [
            f"{ratio:.3f}" for ratio in result["ratio of each launch"]["DDP, no_sync"]
        ]
        print(f"        DDP, no_sync in each launch: {' '.join(spread)}")
    for way, value in report["distance from no_sync"].items():
        print(f"distance of the parameters from no_sync, {way}: {value:.1e}")
    draw(timing.RESULTS / "ranks.png", report["measured"])
    print(f"picture: {timing.RESULTS / 'ranks.png'}")


if __name__ == "__main__":
    main()
