"""A training that may be killed at any moment, and who kills it: twenty times, half of them in the middle of a save.

Each life is a process of its own, made by forking one that has imported torch, and has computed nothing yet.

    python -m tests.mortal FOLDER
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

import purestep as ps
from purestep import tree

STEPS, LIVES, PATIENCE = 160, 20, 60.0
OPTIMIZER = ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(1e-2))


def begin() -> Any:
    """Params, what the optimizer keeps, and the position in the data: some megabytes, so that saving takes time."""
    generator = torch.Generator().manual_seed(0)
    params = {"in": torch.randn(64, 4096, generator=generator), "out": torch.zeros(4096, 64)}
    return params, OPTIMIZER.init(params), torch.tensor(0)


def batches() -> list[Any]:
    """Uneven ones, of which an update takes two."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 8, (2 * STEPS,), generator=generator).tolist()
    return [{"x": torch.randn(size, 64, generator=generator)} for size in sizes]


def train(path: Path) -> None:
    """From the last checkpoint to the end, with one for each step."""
    state = begin()
    if path.exists():
        state = ps.checkpoint.load(path, like=state)
    params, opt_state, position = state
    update_step = ps.make_update_step(
        lambda p, m: (torch.tanh(m["x"] @ p["in"]) @ p["out"] - m["x"]).square().sum(-1),
        OPTIMIZER,
        weight_fn=weight_fn,
        donate=True,
    )
    groups = ps.group(batches(), 2, start=int(position))
    with closing(ps.prefetch(groups, "cpu", weight_fn=weight_fn)) as stream:
        for group in stream:
            params, opt_state, _ = update_step(params, opt_state, group)
            ps.checkpoint.save(path, (params, opt_state, torch.tensor(stream.position)))


def weight_fn(batch: Any) -> Any:
    """Every row is a token."""
    return torch.ones(len(batch["x"]))


def life(path: Path) -> int:
    """A process that trains."""
    process = os.fork()
    if process == 0:
        _live(path)
    return process


def _live(path: Path) -> NoReturn:
    code = 1
    try:
        train(path)
        code = 0
    finally:
        os._exit(code)


def wait_until(happened: Callable[[], Any], process: int) -> None:
    """Looks again and again, while the process lives."""
    end = time.monotonic() + PATIENCE
    while not happened():
        assert os.waitpid(process, os.WNOHANG) == (0, 0), "it ended before it was killed"
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.0002)


def kill_at_random(path: Path, draw: random.Random, in_a_save: bool) -> bool:
    """Lets it save a few times, and kills it a moment later; whether that was in the middle of a save."""
    for left in unfinished(path):
        shutil.rmtree(left)
    process = life(path)
    try:
        for _ in range(draw.randrange(4)):
            wait_until(partial(has_changed, path, inode(path)), process)
        time.sleep(draw.uniform(0, 0.04))
        if in_a_save:
            wait_until(lambda: unfinished(path), process)
    finally:
        os.kill(process, signal.SIGKILL)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL, "it ended before it was killed"
    return bool(unfinished(path))


def inode(path: Path) -> int | None:
    """Which file stands there; each save puts a new one."""
    return path.stat().st_ino if path.exists() else None


def has_changed(path: Path, before: int | None) -> bool:
    """Whether a different file stands there now."""
    return inode(path) != before


def unfinished(path: Path) -> list[Path]:
    """What a save has begun to write, or has left there when it was killed."""
    return [*path.parent.glob("*.unfinished")]


def main(folder: Path) -> None:
    """Compares a run that was killed again and again with one that was not."""
    whole, killed = folder / "whole", folder / "killed" / "state"
    killed.parent.mkdir()
    assert os.waitpid(life(whole), 0)[1] == 0
    draw = random.Random(0)
    in_saves = 0
    for number in range(LIVES):
        in_saves += kill_at_random(killed, draw, in_a_save=number % 2 == 0)
        if killed.exists():
            ps.checkpoint.load(killed, like=begin())
    assert os.waitpid(life(killed), 0)[1] == 0
    expected, found = (ps.checkpoint.load(path, like=begin()) for path in (whole, killed))
    assert int(found[2]) == 2 * STEPS
    for name, one, two in zip(
        tree.paths(found, "state"), tree.leaves_of(found), tree.leaves_of(expected), strict=True
    ):
        assert torch.equal(one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8)), name
    assert {*killed.parent.iterdir()} == {killed, *unfinished(killed)}
    print(f"killed {LIVES} times, {in_saves} of them in the middle of a save: the same bits")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
