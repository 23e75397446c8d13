"""What does it cost to keep only a piece of the state on each rank, and what does it save?

One update on two real ranks (gloo processes, one thread each) against the number of microbatches K: purestep with the state on
every rank, and with the state in pieces in each of three ways; FSDP2 (`fully_shard` on each block and on the model) as its
documentation has it, which reduces gradients at every microbatch, and with `set_requires_gradient_sync(False)` on all but the
last. `gather="loss"` runs each block twice, under `ps.remat`; beside it stands FSDP2 with `torch.utils.checkpoint` on each block.
The units are those of `from_module(units=Block)`, on the module that FSDP2 has; `remat` runs each twice.
All take AdamW, count tokens globally before the first backward pass, report loss and gradient norm, and arrive at the same
parameters.

Times are taken in turn in one process for each rank, of several launches; memory in a fresh process for each way: what it has
between updates, and the peak above that in one update.

    python -m benchmarks.speed.sharded                              benchmarks/results/sharded.{json,png}
    python -m benchmarks.speed.sharded --size large --microbatches 4    sharded_large.{json,png}
"""

import argparse
import gc
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from benchmarks.speed import memory, timing
from benchmarks.speed.ranks import CONFIG, Batch, group_of
from purestep import tree
from purestep.examples import gpt
from purestep.torch_private import count_collectives
from support.torch_private import TorchDispatchMode

RATE = 1e-3
SIZES = {"small": CONFIG, "large": gpt.Config(context=64, layers=8, width=512, heads=8)}
WHOLE, STEP, MICROBATCH, BLOCKS = (
    "state on every rank", 'gather="step"', 'gather="microbatch"', 'gather="loss"',
)  # fmt: skip
SYNCHRONISING, NOT, CHECKPOINTED = "FSDP2", "FSDP2, no sync", "FSDP2, checkpointed"
KEPT, NOT_KEPT = "FSDP2, kept whole", "FSDP2, no sync, kept whole"
UNITS, RECOMPUTED = "units", "units, remat"
WAYS = [
    WHOLE,
    STEP,
    MICROBATCH,
    BLOCKS,
    UNITS,
    RECOMPUTED,
    NOT,
    SYNCHRONISING,
    CHECKPOINTED,
]
BESIDE = [NOT_KEPT, KEPT]
"""FSDP2 with ``reshard_after_forward=False``, which keeps in memory what two of our ways keep; only its memory is measured."""


class Way(NamedTuple):
    """An update, and the parameters that it has arrived at, whole."""

    update: Callable[[list[Batch]], object]
    params: Callable[[], Any]
    state: Callable[[], list[Tensor]]


def block(config: gpt.Config, layer: Any, x: Tensor) -> Tensor:
    """One block, which gathers its params."""
    return gpt.block(config, ps.unshard(layer), x)


def logits_of(config: gpt.Config, params: Any, tokens: Tensor) -> Tensor:
    """The GPT of the examples, whose params are in pieces: each block is whole while it is at work, forward and backward."""
    outer = ps.unshard({key: value for key, value in params.items() if key != "layers"})
    x = (
        functional.embedding(tokens, outer["embedding"])
        + outer["position"][: tokens.shape[1]]
    )
    for layer in params["layers"]:
        x = ps.remat(block)(config, layer, x)
    x = functional.layer_norm(x, x.shape[-1:]) * outer["norm"]
    embedding: Tensor = outer["embedding"]
    return x @ embedding.T


def pure_step(
    config: gpt.Config, params: Any, gather: str | None, *, blocks: bool = False
) -> Way:
    """purestep, with the state in pieces if there is a ``gather``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    axis = ps.MeshAxis(mesh, "dp")

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        if blocks:
            logits = logits_of(config, params, batch["tokens"])
        else:
            logits = gpt.apply(config, params, batch["tokens"])
        return ps.losses.cross_entropy(logits, batch["labels"])

    optimizer = ps.optim.adamw(RATE)
    how: dict[str, Any] = {"gather": gather} if gather else {}
    step = ps.make_update_step(loss_fn, optimizer, axis=axis, donate=True, **how)
    mine = ps.shard(params, axis) if gather else tree.map(Tensor.clone, params)
    state = mine, optimizer.init(mine)

    def update(group: list[Batch]) -> None:
        nonlocal state
        new_params, new_opt_state, _ = step(*state, group)
        state = new_params, new_opt_state

    return Way(update, lambda: ps.unshard(state[0]), lambda: tree.leaves(state))


class Block(nn.Module):
    """One block of the same network, for FSDP2, which wants modules."""

    def __init__(self, config: gpt.Config, params: Any, checkpointed: bool) -> None:
        super().__init__()
        self.config = config
        self.checkpointed = checkpointed
        self.leaves = nn.ParameterDict(
            {key: nn.Parameter(leaf.clone()) for key, leaf in params.items()}
        )

    def forward(self, x: Tensor) -> Tensor:
        """One block further; checkpointed inside the unit that FSDP2 gathers, as torchtitan does."""
        if self.checkpointed:
            result: Tensor = checkpoint(self.plain, x, use_reentrant=False)
            return result
        return self.plain(x)

    def plain(self, x: Tensor) -> Tensor:
        """The same, which keeps its activations."""
        return gpt.block(self.config, dict(self.leaves.items()), x)


class Model(nn.Module):
    """The same network."""

    def __init__(self, config: gpt.Config, params: Any, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(config, layer, checkpointed) for layer in params["layers"]
        )
        outer = {
            key: nn.Parameter(leaf.clone())
            for key, leaf in params.items()
            if key != "layers"
        }
        self.outer = nn.ParameterDict(outer)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        outer = self.outer
        x = (
            functional.embedding(tokens, outer["embedding"])
            + outer["position"][: tokens.shape[1]]
        )
        for block in self.blocks:
            x = block(x)
        return (
            functional.layer_norm(x, x.shape[-1:])
            * outer["norm"]
            @ outer["embedding"].T
        )


def unit_step(config: gpt.Config, params: Any, *, remat: bool) -> Way:
    """purestep on the module that FSDP2 has, with its blocks as units."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    axis = ps.MeshAxis(mesh, "dp")
    model = Model(config, params, checkpointed=False)
    full, apply = ps.from_module(model, units=Block, remat=remat)

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        return ps.losses.cross_entropy(apply(params, batch["tokens"]), batch["labels"])

    optimizer = ps.optim.adamw(RATE)
    step = ps.make_update_step(
        loss_fn, optimizer, axis=axis, donate=True, gather="loss"
    )
    shards = ps.shard(full, axis)
    del full
    model.to("meta")  # It keeps the code alone, as where the model does not fit.
    state = shards, optimizer.init(shards)

    def update(group: list[Batch]) -> None:
        nonlocal state
        new_params, new_opt_state, _ = step(*state, group)
        state = new_params, new_opt_state

    def whole() -> Any:
        named = ps.unshard(state[0])
        layers = [
            {key: named[f"blocks.{number}.leaves.{key}"] for key in layer}
            for number, layer in enumerate(params["layers"])
        ]
        outer = {key: named[f"outer.{key}"] for key in params if key != "layers"}
        return {**outer, "layers": layers}

    return Way(update, whole, lambda: tree.leaves(state))


def fsdp_step(
    config: gpt.Config,
    params: Any,
    *,
    synchronise: bool,
    kept: bool = False,
    checkpointed: bool = False,
) -> Way:
    """FSDP2 as its users write it when they count tokens."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    model: Any = Model(config, params, checkpointed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not kept)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    own = list(model.parameters())
    metrics: dict[str, Any] = {}

    def update(group: list[Batch]) -> None:
        num_tokens = torch.stack(
            [(batch["labels"] != -100).sum() for batch in group]
        ).sum()
        dist.all_reduce(num_tokens)
        total = torch.zeros(())
        for position, batch in enumerate(group):
            last = position == len(group) - 1
            model.set_requires_gradient_sync(synchronise or last)
            model.set_reshard_after_backward(synchronise or last or not kept)
            logits = model(batch["tokens"])
            loss = functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
            )
            # FSDP2 averages over ranks.
            (loss / num_tokens * dist.get_world_size()).backward()
            total += loss.detach()
        # What purestep reports as well: the loss, and the norm of the gradients.
        dist.all_reduce(total)
        norm: Any = nn.utils.get_total_norm([p.grad for p in own])
        metrics.update(loss=total / num_tokens, grad_norm=norm.full_tensor())
        optimizer.step()
        optimizer.zero_grad()

    def whole() -> Any:
        outer = {key: leaf.full_tensor().detach() for key, leaf in model.outer.items()}
        layers = [
            {key: leaf.full_tensor().detach() for key, leaf in block.leaves.items()}
            for block in model.blocks
        ]
        return {**outer, "layers": layers}

    def state() -> list[Tensor]:
        moments = [leaf for each in optimizer.state.values() for leaf in each.values()]
        return [
            leaf.to_local() if hasattr(leaf, "to_local") else leaf
            for leaf in [*own, *moments]
        ]

    return Way(update, whole, state)


MAKE: dict[str, Callable[[gpt.Config, Any], Way]] = {
    WHOLE: partial(pure_step, gather=None),
    STEP: partial(pure_step, gather="step"),
    MICROBATCH: partial(pure_step, gather="microbatch"),
    BLOCKS: partial(pure_step, gather="loss", blocks=True),
    UNITS: partial(unit_step, remat=False),
    RECOMPUTED: partial(unit_step, remat=True),
    NOT: partial(fsdp_step, synchronise=False),
    SYNCHRONISING: partial(fsdp_step, synchronise=True),
    CHECKPOINTED: partial(fsdp_step, synchronise=True, checkpointed=True),
    NOT_KEPT: partial(fsdp_step, synchronise=False, kept=True),
    KEPT: partial(fsdp_step, synchronise=True, kept=True),
}


def times(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each way in turn."""
    config = SIZES[options.size]
    params = gpt.init(config, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(dist.get_rank())
    ways = {name: MAKE[name](config, params) for name in WAYS}
    orders = list(itertools.permutations(WAYS))
    seconds: dict[str, dict[str, list[float]]] = {}
    for k in options.microbatches:
        seconds[str(k)] = {name: [] for name in ways}
        for repeat in range(options.repeats + 1):
            group = group_of(k, options.rows, generator)
            for name in orders[97 * repeat % len(orders)]:
                dist.barrier()
                start = time.perf_counter()
                ways[name].update(group)
                dist.barrier()
                if repeat:
                    seconds[str(k)][name].append(time.perf_counter() - start)
    arrived = {name: way.params() for name, way in ways.items()}
    reference = arrived[WHOLE]
    distances = {
        name: float(
            tree.global_norm(tree.map(torch.sub, there, reference))
            / tree.global_norm(reference)
        )
        for name, there in arrived.items()
    }
    elements = sum(leaf.numel() for leaf in tree.leaves(params))
    return {"seconds": seconds, "distances": distances, "parameters": elements}


def bytes_of(options: argparse.Namespace) -> dict[str, Any]:
    """What one way keeps between updates on this rank, and the peak above that in one update."""
    config = SIZES[options.size]
    params = gpt.init(config, torch.Generator().manual_seed(0))
    way = MAKE[options.way](config, params)
    del params
    [k] = options.microbatches
    group = group_of(k, options.rows, torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        way.update(group)
    gc.collect()
    dist.barrier()
    peak = memory.peak_on_host(lambda: way.update(group))
    with Traffic() as traffic:
        way.update(group)
    before = begun_collectives()
    way.update(group)
    return {
        "state": sum(leaf.nbytes for leaf in way.state()), "peak": peak,
        "collectives": begun_collectives() - before, "sent": traffic.sent,
    }  # fmt: skip


def begun_collectives() -> int:
    """How many collectives the ranks have begun, in a mesh of all of them.

    Counted by the process group: a mode does not see those that DTensor runs.
    """
    return count_collectives(dist.group.WORLD, torch.device("cpu")) or 0


class Traffic(TorchDispatchMode):
    """Counts the bytes that a rank sends for collectives where ranks stand in a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), func.__name__
        if "c10d" in func.namespace and "barrier" not in name and "wait" not in name:
            size = dist.get_world_size()
            # An all-reduce sends everything twice; others have the whole on one side, and a part of it on the other.
            rounds = 2 if "allreduce" in name or "all_reduce" in name else 1
            leaves = tree.leaves((args, result))
            whole = max(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
            self.sent += rounds * whole * (size - 1) // size
        return result


def worker(options: argparse.Namespace) -> None:
    """One rank; rank 0 writes the report."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report = bytes_of(options) if options.way else times(options)
    if dist.get_rank() == 0:
        options.report.write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def joined(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """For each K, a table of several launches."""
    first = reports[0]
    ks = list(first["seconds"])
    return {
        "parameters": first["parameters"],
        "distances": first["distances"],
        "times": {
            k: timing.joined(
                [report["seconds"][k] for report in reports],
                [WHOLE, SYNCHRONISING, CHECKPOINTED],
            )
            for k in ks
        },
    }


COLORS = {
    WHOLE: "0.45", STEP: "#0072b2", MICROBATCH: "#56b4e9", BLOCKS: "#009e73",
    UNITS: "#7b3294", RECOMPUTED: "#c2a5cf", NOT: "#e69f00", SYNCHRONISING: "#d55e00", CHECKPOINTED: "#cc79a7", NOT_KEPT: "#f0c987", KEPT: "#e5a27c",
}  # fmt: skip


def draw(path: Path, report: dict[str, Any]) -> None:
    """Time per microbatch on the left; on the right what a rank holds, between updates and at the peak."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 4.2), dpi=150, layout="constrained"
    )
    ks = [int(k) for k in report["times"]]
    for way in WAYS:
        color = COLORS[way]
        lines = [1e3 * report["times"][str(k)]["seconds"][way] / k for k in ks]
        left.plot(ks, lines, "o-", color=color, label=way, linewidth=2)
    left.set_xscale("log", base=2)
    left.set_xticks(ks, [str(k) for k in ks])
    left.set_xlabel("microbatches per update")
    left.set_ylabel("milliseconds per microbatch")
    left.set_ylim(0, 1.05 * left.get_ylim()[1])
    left.legend(frameon=False, fontsize=9, ncols=2, loc="lower center")
    for place, (way, color) in enumerate(COLORS.items()):
        state, peak = (report["bytes"][way][name] / 2**20 for name in ("state", "peak"))
        right.barh(place, state, color=color)
        right.barh(place, peak, left=state, color=color, alpha=0.4)
        right.text(
            state + peak + 2,
            place,
            f"{state:.0f} + {peak:.0f}",
            va="center",
            fontsize=9,
        )
    right.set_yticks(range(len(COLORS)), list(COLORS))
    right.invert_yaxis()
    right.set_xlabel("MiB on a rank: state, and an update's peak above it")
    right.margins(x=0.2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Starts the ranks, prints, draws."""
    parser = timing.arguments(__doc__, repeats=6, launches=3)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--rows", type=int, default=4, help="rows of 64 bytes in a microbatch"
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="of the GPT")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        worker(options)
        return
    report = joined(
        [
            timing.launch_ranks(2, "benchmarks.speed.sharded")
            for _ in range(options.launches)
        ]
    )
    print(f"{report['parameters'] / 1e6:.1f}M parameters on 2 ranks")
    for k, table in report["times"].items():
        timing.show(f"K = {k}", table)
    for way, value in report["distances"].items():
        print(
            f"distance of the parameters from the state on every rank, {way}: {value:.1e}"
        )
    report["bytes"] = {}
    for way in [*WAYS, *BESIDE]:
        how = ("--way", way, "--microbatches", "4")
        seen = [
            timing.launch_ranks(2, "benchmarks.speed.sharded", *how, **memory.THRESHOLD)
            for _ in range(options.launches)
        ]
        here = {
            name: statistics.median(each[name] for each in seen) for name in seen[0]
        }
        report["bytes"][way] = here
        state, peak, sent = (here[name] / 2**20 for name in ("state", "peak", "sent"))
        print(
            f"{way:>26}: {state:6.1f} MiB of state, {peak:6.1f} at the peak above it; "
            f"{here['collectives']:.0f} collectives send {sent:.1f} MiB"
        )
    picture = timing.write(
        options.results,
        "sharded" if options.size == "small" else "sharded_large",
        report,
    )
    draw(picture, report)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main()
