"""One rank over NCCL: its steps are those without ranks, in each setting."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import purestep as ps
from benchmarks.gpu import measure, models
from benchmarks.gpu.entries import Run
from benchmarks.gpu.exact import all_equal, find_distance, leaves_of
from benchmarks.gpu.graphs import choose_compiler
from benchmarks.gpu.models import Batch, count_rows
from purestep import optim, tree

WIDTHS = [64, 256, 256, 8]
ROWS = [5, 9]
STEPS = 4
BUCKET_BYTES = 1 << 16
"""So small that gradients take several buckets."""
CLIPPED = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
NEAR = 1e-4


class Way(NamedTuple):
    """How a step is taken on ranks."""

    settings: dict[str, Any]
    sharded_over: Any = None
    """The axis over which params are cut, if they are."""
    waits: int = 0
    """How often the host waits for the device."""


def run_nccl(run: Run) -> None:
    """Takes steps on a world of one rank."""
    if run.is_cuda:
        torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            # As by default: what ranks say to each other on the host does not wait for the device.
            "cpu:gloo,cuda:nccl" if run.is_cuda else "gloo",
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
        )
        try:
            world = World(run)
            world.compare_ways()
            for name, check in world.checks().items():
                if run.has_time(8, name):
                    with run.attempt(name):
                        check()
        finally:
            with suppress(Exception):
                dist.barrier()
                dist.destroy_process_group()


class World:
    """One rank, a small network, and what is compared there."""

    def __init__(self, run: Run) -> None:
        self.run = run
        mesh = init_device_mesh(
            run.device, (1, 1), mesh_dim_names=("replicate", "shard")
        )
        line = init_device_mesh(run.device, (1,), mesh_dim_names=("dp",))
        self.axis = ps.MeshAxis(line, "dp", bucket_bytes=BUCKET_BYTES)
        alone = DeviceMesh.from_group(
            dist.new_group(backend="nccl" if run.is_cuda else "gloo"),
            run.device,
            mesh_dim_names=("dp",),
        )
        self.device_axis = ps.MeshAxis(alone, "dp", bucket_bytes=BUCKET_BYTES)
        self.shard_axis = ps.MeshAxis(mesh, "shard", bucket_bytes=BUCKET_BYTES)
        self.both = ps.MeshAxis(mesh, ("replicate", "shard"), bucket_bytes=BUCKET_BYTES)
        self.group = models.make_regression(ROWS, WIDTHS, run.device)
        self.params, self.apply = ps.from_module(models.build_mlp(WIDTHS, run.device))

    def loss(self, params: Any, batch: Batch) -> Any:
        """Returns the loss of each row."""
        return ps.losses.mse(self.apply(params, batch["x"]), batch["y"])

    def gathered_loss(self, params: Any, batch: Batch) -> Any:
        """Returns the same of sharded params."""
        return self.loss(ps.unshard(params), batch)

    def loss_with_aux(self, params: Any, batch: Batch) -> Any:
        """Returns the same, and their sum beside it."""
        losses = self.loss(params, batch)
        return ps.LossOutput(losses, aux={"sum": losses.detach().sum()})

    def ways(self) -> dict[str, Way]:
        """Returns each way to take a step."""
        axis, both = {"axis": self.axis}, {"axis": self.both}
        gathered = {**axis, "loss_fn": self.gathered_loss}
        on_device = {"axis": self.device_axis}
        return {
            "replicated": Way(axis),
            "replicated, donate": Way({**axis, "donate": True}),
            "replicated, grads": Way({**axis, "normalize": "grads"}),
            "replicated, skip": Way({**axis, "on_nonfinite": "skip"}),
            "aux": Way({**axis, "loss_fn": self.loss_with_aux}),
            "gather=step": Way({**axis, "gather": "step"}, self.axis),
            "gather=microbatch": Way({**axis, "gather": "microbatch"}, self.axis),
            "gather=loss": Way({**gathered, "gather": "loss"}, self.axis),
            "replicated, no backend of the host": Way(on_device),
            "gather=microbatch, no backend of the host": Way(
                {**on_device, "gather": "microbatch"}, self.device_axis, waits=2
            ),
            "mesh of two dimensions": Way(both),
            "shards in one of two dimensions": Way(
                {**both, "gather": "step"}, self.shard_axis
            ),
            "compile": Way({**axis, "compile": choose_compiler(self.run)}),
        }

    def make_step(self, settings: dict[str, Any]) -> Any:
        """Returns a step with these settings."""
        settings = {"loss_fn": self.loss, "weight_fn": count_rows, **settings}
        return ps.make_update_step(settings.pop("loss_fn"), CLIPPED, **settings)

    def train(self, way: Way) -> tuple[list[Tensor], Any, list[str]]:
        """Returns the params after some steps, the last metrics, and the waits of one more step."""
        params = tree.map(torch.clone, self.params)
        if way.sharded_over is not None:
            params = ps.shard(params, way.sharded_over)
        opt_state = CLIPPED.init(params)
        step = self.make_step(way.settings)
        for _ in range(STEPS):
            params, opt_state, metrics = step(params, opt_state, self.group)
        full = params if way.sharded_over is None else ps.unshard(params)
        leaves = [leaf.clone() for leaf in leaves_of(full)]
        waits = measure.find_waits(
            self.run, lambda: step(params, opt_state, self.group)
        )
        return leaves, metrics, waits

    def compare_ways(self) -> None:
        """Trains in each way, and compares with a step without ranks."""
        expected, metrics, _ = self.train(Way({}))
        for name, way in self.ways().items():
            if not self.run.has_time(8, "ways", name):
                continue
            with self.run.attempt("ways", name):
                leaves, actual, waits = self.train(way)
                distance = find_distance(leaves, expected)
                self.run.add("ways", name, waits=waits, distance_to_local=distance)
                loss = find_distance([actual.loss], [metrics.loss])
                self.run.check(
                    "ways", name, near_to_local=distance < NEAR and loss < NEAR
                )
                if self.run.is_cuda:
                    is_expected = len(waits) == way.waits
                    self.run.check("ways", name, waits_as_expected=is_expected)

    def checks(self) -> dict[str, Any]:
        """Returns what is looked at beside the ways."""
        return {
            "launches": self.count_launches,
            "no tokens": self.check_no_tokens,
            "on_nonfinite=skip": self.check_skipped,
            "checkpoint": self.check_checkpoint,
            "background save": self.check_background_save,
        }

    def count_launches(self) -> None:
        """Counts the kernels of a step on ranks and of one without, and times both."""
        for name, settings in {"local": {}, "one rank": {"axis": self.axis}}.items():
            step = self.make_step({**settings, "donate": True})
            params = tree.map(torch.clone, self.params)
            state = [params, CLIPPED.init(params)]

            def update(step: Any = step, state: Any = state) -> None:
                state[:] = step(*state, self.group)[:2]

            for _ in range(3):
                update()
            self.run.add("launches", name, **measure.count_launches(self.run, update))
            times = measure.time_calls(self.run, update, seconds=0.1, blocks=3)
            self.run.add("launches", name, **times)

    def check_no_tokens(self) -> None:
        """Takes a step without any token, which must leave the state as it is."""
        step = self.make_step({"axis": self.axis, "weight_fn": weigh_nothing})
        state = self.params, CLIPPED.init(self.params)
        params, opt_state, metrics = step(*state, self.group)
        same = all_equal(leaves_of((params, opt_state)), leaves_of(state))
        self.run.check(
            "no tokens", state_stays=same, not_applied=not bool(metrics.applied)
        )

    def check_skipped(self) -> None:
        """Takes a step of infinite gradients, which must be skipped."""
        step = self.make_step({"axis": self.axis, "on_nonfinite": "skip"})
        state = self.params, CLIPPED.init(self.params)
        group = [{**batch, "y": batch["y"] * torch.inf} for batch in self.group]
        params, opt_state, metrics = step(*state, group)
        same = all_equal(leaves_of((params, opt_state)), leaves_of(state))
        self.run.check(
            "on_nonfinite=skip", state_stays=same, not_applied=not bool(metrics.applied)
        )

    def check_checkpoint(self) -> None:
        """Saves shards and loads them."""
        params = ps.shard(tree.map(torch.clone, self.params), self.axis)
        state = {"params": params, "opt_state": CLIPPED.init(params)}
        with tempfile.TemporaryDirectory() as folder:
            ps.checkpoint.save(f"{folder}/state", state)
            loaded = ps.checkpoint.load(f"{folder}/state", like=state)
        same = all_equal(leaves_of(loaded), leaves_of(state))
        self.run.check("checkpoint", loads_the_bits=same)

    def check_background_save(self) -> None:
        """Saves beside the training: tensors, and then shards."""
        shards = ps.shard(tree.map(torch.clone, self.params), self.axis)
        for name, state in {"tensors": self.params, "shards": shards}.items():
            before = [leaf.clone() for leaf in leaves_of(state)]
            with tempfile.TemporaryDirectory() as folder:
                with ps.checkpoint.AsyncCheckpointer() as background:
                    background.save(f"{folder}/state", state)
                loaded = ps.checkpoint.load(f"{folder}/state", like=state)
            same = all_equal(leaves_of(loaded), before)
            self.run.check("background save", name, loads_the_bits=same)


def weigh_nothing(batch: Batch) -> Tensor:
    """Ignores every row."""
    return torch.zeros_like(count_rows(batch))
