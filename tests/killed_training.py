"""Kills one or all processes of a training at any moment, half of the times in a save, and compares the end.

Each run has one to three processes, forked from one that has imported torch: one saves files, several
save folders, with the state sharded over them. The loss is linear in the params and all numbers are
integers, so that the bits do not depend on the number of processes. A process that loses the others
must end by itself.

    python -m tests.killed_training FOLDER
"""

import importlib
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from tests.checkpoint_states import assert_same_bits

STEPS = 60
"""Updates of the whole training."""
LIVES = 8
"""Runs that are killed."""
PATIENCE = 60.0
"""Seconds to wait for a save."""
TIMEOUT = 20.0
"""Seconds that gloo waits for a process that is gone."""
KEEP = 2
"""Checkpoints to keep."""
OPTIMIZER = ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(1e-2))

# These take seconds to import: once here, before any run begins.
importlib.import_module("torch._dynamo")
importlib.import_module("torch.distributed.checkpoint.state_dict_saver")


def begin() -> Any:
    """Makes params, optimizer state and position in the data: megabytes, which take time to save."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randint(-3, 4, (65, 2048), generator=generator).double()
    params = {"w": w}
    return params, OPTIMIZER.init(params), torch.tensor(0)


def batches() -> list[Any]:
    """Draws uneven batches, of which an update takes two, with eight rows together."""
    generator = torch.Generator().manual_seed(1)

    def draw(size: int) -> Any:
        x = torch.randint(-3, 4, (size, 65), generator=generator)
        return {"x": x.double()}

    sizes = [1, 3, 8, 4, 0] * (STEPS // 5)
    return [draw(size) for first in sizes for size in (first, 8 - first)]


def loss_fn(params: Any, microbatch: Any) -> torch.Tensor:
    return (microbatch["x"] @ params["w"]).sum(-1)


def weight_fn(microbatch: Any) -> torch.Tensor:
    return torch.ones(len(microbatch["x"]))


def train(state: Any, axis: ps.Axis, save: Callable[[int, Any], None]) -> Any:
    """Trains to the end, and saves each step; ranks take microbatches in turn."""
    params, opt_state, position = state
    update_step = ps.make_update_step(
        loss_fn, OPTIMIZER, weight_fn=weight_fn, axis=axis, donate=True
    )
    rank = 0
    size = 1
    if isinstance(axis, ps.MeshAxis):
        rank = axis.rank
        size = axis.size
    groups = ps.group(batches(), 2, start=int(position))
    for step, group in enumerate(groups, int(position) // 2 + 1):
        group_of_rank = [*group][rank::size]
        params, opt_state, _ = update_step(params, opt_state, group_of_rank)
        state = params, opt_state, torch.tensor(2 * step)
        save(step, state)
    return state


def live(folder: Path, store: Path, rank: int, size: int, in_background: bool) -> None:
    """Trains from the last checkpoint to the end, as one of the processes."""
    state: Any = begin()
    axis: ps.Axis = ps.LocalAxis()
    if size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT),
        )
        mesh = DeviceMesh("cpu", [*range(size)], mesh_dim_names=("dp",))
        axis = ps.MeshAxis(mesh, "dp")
        params, opt_state, position = state
        state = *ps.shard((params, opt_state), axis), position
    if last := ps.checkpoint.latest_checkpoint(folder):
        state = ps.checkpoint.load(last, like=state)
    with ps.checkpoint.AsyncCheckpointer() as background:
        save_step = background.save_step if in_background else ps.checkpoint.save_step
        train(state, axis, lambda step, state: save_step(folder, step, state, KEEP))
    if size > 1:
        dist.barrier()


def life(folder: Path, size: int, in_background: bool) -> list[int]:
    """Starts processes that train together. Each that loses another ends with an error."""
    store = folder.with_name(f"store.{os.urandom(4).hex()}")
    processes = []
    for rank in range(size):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                live(folder, store, rank, size, in_background)
                code = 0
            except Exception as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            finally:
                os._exit(code)
        processes.append(process)
    return processes


def wait_until(happened: Callable[[], Any], process: int) -> None:
    """Waits for a condition, while the process lives."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        still_runs = os.waitpid(process, os.WNOHANG) == (0, 0)
        assert still_runs, "it ended before it was killed"
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.0002)


def ends(processes: list[int]) -> Iterator[int]:
    """Yields the exit status of each process: soon, or when gloo has waited long enough.

    gloo may miss a death. A save that waits for the dead may begin a moment later, and then training
    that waits for the save.
    """
    deadline = time.monotonic() + 3 * TIMEOUT
    for process in processes:
        while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < deadline, "a rank waits for one that is dead"
            time.sleep(0.002)
        _, status = ended
        yield status


def unfinished(folder: Path) -> list[Path]:
    """Lists what a save has begun to write, or did not finish when it was killed."""
    return [*folder.glob("*.unfinished")]


def remove_unfinished(folder: Path) -> None:
    for path in unfinished(folder):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            # An earlier checkpoint, whose process was killed as it removed it.
            path.unlink()


def wait_for_save(folder: Path, process: int) -> None:
    before = ps.checkpoint.latest_checkpoint(folder)
    wait_until(lambda: ps.checkpoint.latest_checkpoint(folder) != before, process)


def kill(processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def check_ends(processes: list[int], victims: list[int]) -> None:
    """Checks that victims ended by SIGKILL, and that the others raised an error."""
    try:
        for process, status in zip(processes, ends(processes), strict=True):
            expected = signal.SIGKILL if process in victims else 1 << 8
            assert status == expected, f"a rank ended with {status}"
    finally:
        kill(processes)


def kill_at_random(folder: Path, draw: random.Random, number: int) -> bool:
    """Waits for a few saves and a moment, and kills one process or all.

    Returns whether that was in the middle of a save.
    """
    remove_unfinished(folder)
    processes = life(folder, 1 + number % 3, in_background=number % 4 >= 2)
    first, *_ = processes
    victims = processes if number % 5 == 0 else [draw.choice(processes)]
    # A process waits for others to make a group with as long as torch allows, so one dies after that.
    fewest = 0 if victims == processes else 1
    try:
        for _ in range(draw.randrange(fewest, 3)):
            wait_for_save(folder, first)
        time.sleep(draw.uniform(0, 0.04))
        if number % 2 == 0:
            wait_until(lambda: unfinished(folder), first)
            pause = draw.uniform(0, 0.03)
            # A single process may have finished its save by then.
            if len(processes) > 1:
                time.sleep(pause)
    finally:
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
    in_a_save = bool(unfinished(folder))
    check_ends(processes, victims)
    return in_a_save


def main(folder: Path) -> None:
    """Compares a run that was killed again and again with one of a single process that saves nothing."""
    # A fork of a process that has used two threads waits for the one that it does not have.
    torch.set_num_threads(1)
    draw = random.Random(0)
    in_saves = 0
    folder.mkdir()
    for number in range(LIVES):
        if kill_at_random(folder, draw, number):
            in_saves += 1
        if last := ps.checkpoint.latest_checkpoint(folder):
            ps.checkpoint.load(last, like=begin())
    statuses = [*ends(life(folder, 3, in_background=False))]
    assert statuses == [0, 0, 0]

    last = ps.checkpoint.latest_checkpoint(folder)
    assert last
    loaded = ps.checkpoint.load(last, like=begin())
    expected = train(begin(), ps.LocalAxis(), lambda step, state: None)
    _, _, position = loaded
    assert int(position) == 2 * STEPS
    assert_same_bits(loaded, expected)
    assert len([*folder.iterdir()]) == KEEP, "something was left"
    print(
        f"killed {LIVES} times, {in_saves} of them in the middle of a save: the same bits"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1], "series"))
