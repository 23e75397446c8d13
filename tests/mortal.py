"""A training of which one process or all may be killed at any moment, and what kills them: half of the times in a save.

Each life is of one to three processes, forked from one that has imported torch: alone with files, together with folders and the
state spread over them. The loss is linear in the params and all numbers are integers, so that the bits do not depend on how many
there are. A process that is left alone must end by itself.

    python -m tests.mortal FOLDER
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
from tests.states import assert_same_bits

STEPS, LIVES, PATIENCE, TIMEOUT, KEEP = 100, 24, 60.0, 20.0, 2
OPTIMIZER = ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(1e-2))

# What takes seconds to import, before any life begins.
importlib.import_module("torch._dynamo")
importlib.import_module("torch.distributed.checkpoint.state_dict_saver")


def begin() -> Any:
    """Params, what the optimizer keeps, and the position in the data: some megabytes, so that saving takes time."""
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randint(-3, 4, (65, 2048), generator=generator).double()}
    return params, OPTIMIZER.init(params), torch.tensor(0)


def batches() -> list[Any]:
    """Uneven ones, of which an update takes two, with eight rows."""
    generator = torch.Generator().manual_seed(1)
    sizes = [
        size for first in [1, 3, 8, 4, 0] * (STEPS // 5) for size in (first, 8 - first)
    ]
    return [
        {"x": torch.randint(-3, 4, (size, 65), generator=generator).double()}
        for size in sizes
    ]


def train(state: Any, axis: ps.Axis, save: Callable[[int, Any], None]) -> Any:
    """From a state to the end, with a save for each step; ranks take microbatches in turn."""
    params, opt_state, position = state
    how: Any = {
        "weight_fn": lambda m: torch.ones(len(m["x"])),
        "axis": axis,
        "donate": True,
    }
    update_step = ps.make_update_step(
        lambda p, m: (m["x"] @ p["w"]).sum(-1), OPTIMIZER, **how
    )
    rank, size = (axis.rank, axis.size) if isinstance(axis, ps.MeshAxis) else (0, 1)
    groups = ps.group(batches(), 2, start=int(position))
    for step, group in enumerate(groups, int(position) // 2 + 1):
        params, opt_state, _ = update_step(params, opt_state, [*group][rank::size])
        state = params, opt_state, torch.tensor(2 * step)
        save(step, state)
    return state


def live(folder: Path, store: Path, rank: int, size: int, in_background: bool) -> None:
    """From the last checkpoint to the end."""
    state: Any = begin()
    axis: ps.Axis = ps.LocalAxis()
    if size > 1:
        place: Any = {
            "init_method": f"file://{store}",
            "rank": rank,
            "world_size": size,
        }
        dist.init_process_group("gloo", **place, timeout=timedelta(seconds=TIMEOUT))
        axis = ps.MeshAxis(
            DeviceMesh("cpu", [*range(size)], mesh_dim_names=("dp",)), "dp"
        )
        state = *ps.shard(state[:2], axis), state[2]
    if last := ps.checkpoint.latest_checkpoint(folder):
        state = ps.checkpoint.load(last, like=state)
    with ps.checkpoint.AsyncCheckpointer() as background:
        save = background.save_step if in_background else ps.checkpoint.save_step
        train(state, axis, lambda step, state: save(folder, step, state, KEEP))
    if size > 1:
        dist.barrier()


def life(folder: Path, size: int, in_background: bool) -> list[int]:
    """Processes that train together. Those who lose another end with an error."""
    store, processes = folder.with_name(f"store.{os.urandom(4).hex()}"), []
    for rank in range(size):
        processes.append(os.fork())
        if processes[-1] == 0:
            code = 1
            try:
                live(folder, store, rank, size, in_background)
                code = 0
            except Exception as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            finally:
                os._exit(code)
    return processes


def wait_until(happened: Callable[[], Any], process: int) -> None:
    """Looks again and again, while the process lives."""
    end = time.monotonic() + PATIENCE
    while not happened():
        assert os.waitpid(process, os.WNOHANG) == (0, 0), (
            "it ended before it was killed"
        )
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.0002)


def ends(processes: list[int]) -> Iterator[int]:
    """How each process ends: soon, or when gloo, which may miss a death, has waited long enough.

    A save that waits for the dead may begin a moment later, and then training that waits for it.
    """
    until = time.monotonic() + 3 * TIMEOUT
    for process in processes:
        while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < until, "a rank waits for one that is dead"
            time.sleep(0.002)
        yield ended[1]


def unfinished(folder: Path) -> list[Path]:
    """What a save has begun to write, or has left there when it was killed."""
    return [*folder.glob("*.unfinished")]


def kill_at_random(folder: Path, draw: random.Random, number: int) -> bool:
    """Lets them save a few times, and kills one or all a moment later; whether that was in the middle of a save."""
    for left in unfinished(folder):
        # A file is one that was to be removed, beside later ones, when its process was killed.
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    processes = life(folder, 1 + number % 3, in_background=number % 4 >= 2)
    victims = processes if number % 5 == 0 else [draw.choice(processes)]
    # A process waits for others to make a group with as long as torch allows, so one dies after that.
    first = 0 if victims == processes else 1
    try:
        for _ in range(draw.randrange(first, 3)):
            before = ps.checkpoint.latest_checkpoint(folder)
            wait_until(
                lambda: ps.checkpoint.latest_checkpoint(folder) != before,  # noqa: B023
                processes[0],
            )
        time.sleep(draw.uniform(0, 0.04))
        if number % 2 == 0:
            wait_until(lambda: unfinished(folder), processes[0])
            time.sleep(draw.uniform(0, 0.03) * (len(processes) > 1))
    finally:
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
    in_a_save = bool(unfinished(folder))
    try:
        for process, end in zip(processes, ends(processes), strict=True):
            expected = signal.SIGKILL if process in victims else 1 << 8
            assert end == expected, f"a rank ended with {end}"
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    return in_a_save


def main(folder: Path) -> None:
    """Compares a run that was killed again and again with one of a single process that saves nothing."""
    draw, in_saves = random.Random(0), 0
    folder.mkdir()
    for number in range(LIVES):
        in_saves += kill_at_random(folder, draw, number)
        if last := ps.checkpoint.latest_checkpoint(folder):
            ps.checkpoint.load(last, like=begin())
    assert [*ends(life(folder, 3, in_background=False))] == [0, 0, 0]
    last = ps.checkpoint.latest_checkpoint(folder)
    assert last
    found = ps.checkpoint.load(last, like=begin())
    expected = train(begin(), ps.LocalAxis(), lambda step, state: None)
    assert int(found[2]) == 2 * STEPS
    assert_same_bits(found, expected)
    assert len([*folder.iterdir()]) == KEEP, "something was left"
    print(
        f"killed {LIVES} times, {in_saves} of them in the middle of a save: the same bits"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1], "series"))
