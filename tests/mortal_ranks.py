"""A training on ranks of which one or all may be killed at any moment, and who kills them: twenty times, most of them in a save.

The state is spread over two or three ranks, as each life has it. The loss is linear in the params and all numbers are integers, so
that the bits do not depend on how many ranks there are. Whoever is left alone must end by itself.

    python -m tests.mortal_ranks FOLDER
"""

from __future__ import annotations

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
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from purestep import tree
from tests.mortal import unfinished, wait_until

STEPS, LIVES, TIMEOUT, KEEP = 50, 20, 20.0, 2
OPTIMIZER = ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(1e-2))

# What takes seconds to import, before any life begins.
for module in ("torch._dynamo", "torch.distributed.checkpoint.state_dict_saver"):
    importlib.import_module(module)


def begin() -> Any:
    """Params, what the optimizer keeps, and the position in the data: some megabytes, so that saving takes time."""
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randint(-3, 4, (65, 2048), generator=generator).double()}
    return params, OPTIMIZER.init(params), torch.tensor(0)


def batches() -> list[Any]:
    """Uneven ones, of which an update takes two, with eight rows."""
    generator = torch.Generator().manual_seed(1)
    sizes = [size for first in [1, 3, 8, 4, 0] * (STEPS // 5) for size in (first, 8 - first)]
    return [{"x": torch.randint(-3, 4, (size, 65), generator=generator).double()} for size in sizes]


def train(state: Any, axis: ps.Axis, save: Callable[[int, Any], None]) -> Any:
    """From a state to the end, with a save for each step; ranks take microbatches in turn."""
    params, opt_state, position = state
    update_step = ps.make_update_step(
        lambda p, m: (m["x"] @ p["w"]).sum(-1),
        OPTIMIZER,
        weight_fn=lambda m: torch.ones(len(m["x"])),
        axis=axis,
        donate=True,
    )
    rank, size = (axis.rank, axis.size) if isinstance(axis, ps.MeshAxis) else (0, 1)
    groups = ps.group(batches(), 2, start=int(position))
    for step, group in enumerate(groups, int(position) // 2 + 1):
        params, opt_state, _ = update_step(params, opt_state, [*group][rank::size])
        state = params, opt_state, torch.tensor(2 * step)
        save(step, state)
    return state


def train_on_ranks(folder: Path, axis: ps.MeshAxis, in_background: bool) -> None:
    """From the last checkpoint to the end."""
    whole = begin()
    state = *ps.shard(whole[:2], axis), whole[2]
    if last := ps.checkpoint.latest(folder):
        state = ps.checkpoint.load(last, like=state)
    with ps.checkpoint.Background() as background:
        save = background.save_step if in_background else ps.checkpoint.save_step
        train(state, axis, lambda step, state: save(folder, step, state, KEEP))


def life(folder: Path, size: int, in_background: bool) -> list[int]:
    """Processes that train together."""
    store = folder.with_name(f"store.{os.urandom(4).hex()}")
    processes = []
    for rank in range(size):
        process = os.fork()
        if process == 0:
            _live(folder, store, rank, size, in_background)
        processes.append(process)
    return processes


def _live(folder: Path, store: Path, rank: int, size: int, in_background: bool) -> NoReturn:
    code = 1
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT),
        )
        mesh = DeviceMesh("cpu", list(range(size)), mesh_dim_names=("dp",))
        train_on_ranks(folder, ps.MeshAxis(mesh, "dp"), in_background)
        dist.barrier()
        code = 0
    except Exception as error:
        # Of those who lost another.
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


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


def kill_at_random(folder: Path, draw: random.Random, number: int) -> bool:
    """Lets them save a few times, and kills one or all a moment later; whether that was in the middle of a save."""
    for left in unfinished(folder / "state"):
        shutil.rmtree(left)
    processes = life(folder, draw.choice([2, 3]), in_background=number % 4 >= 2)
    victims = processes if number % 3 == 0 else [draw.choice(processes)]
    # Whoever waits for a rank to make a group with waits as long as torch allows, so one dies after that.
    first = 0 if victims is processes else 1
    try:
        for _ in range(draw.randrange(first, 3)):
            wait_until(partial(has_moved, folder, ps.checkpoint.latest(folder)), processes[0])
        time.sleep(draw.uniform(0, 0.04))
        if number % 2 == 0:
            wait_until(lambda: unfinished(folder / "state"), processes[0])
            time.sleep(draw.uniform(0, 0.03))
    finally:
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
    in_a_save = bool(unfinished(folder / "state"))
    try:
        for process, end in zip(processes, ends(processes), strict=True):
            expected = signal.SIGKILL if process in victims else 1 << 8
            assert end == expected, f"a rank ended with {end}"
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    return in_a_save


def has_moved(folder: Path, before: Path | None) -> bool:
    """Whether a later checkpoint is there now."""
    return ps.checkpoint.latest(folder) != before


def main(folder: Path) -> None:
    """Compares a run that was killed again and again with one of a single process that saves nothing."""
    draw = random.Random(0)
    in_saves = 0
    for number in range(LIVES):
        in_saves += kill_at_random(folder, draw, number)
        if last := ps.checkpoint.latest(folder):
            ps.checkpoint.load(last, like=begin())
    assert [*ends(life(folder, 3, in_background=False))] == [0, 0, 0]
    last = ps.checkpoint.latest(folder)
    assert last
    found = ps.checkpoint.load(last, like=begin())
    expected = train(begin(), ps.LocalAxis(), lambda step, state: None)
    assert int(found[2]) == 2 * STEPS
    for name, one, two in zip(
        tree.paths(found, "state"), tree.leaves_of(found), tree.leaves_of(expected), strict=True
    ):
        assert torch.equal(one, two), f"{name} differs"
    assert len([*folder.iterdir()]) == KEEP, "something was left"
    print(f"killed {LIVES} times, {in_saves} of them in the middle of a save: the same bits")


if __name__ == "__main__":
    main(Path(sys.argv[1], "series"))
