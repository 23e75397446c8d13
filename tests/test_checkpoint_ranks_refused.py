"""Checkpoints of many ranks that are refused on every one of them: other names and shapes, damage, and what is no piece."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import purestep as ps
from purestep.testing.processes import World, values
from tests.held_by_ranks import BAD, axis, refused, save_to, together

SMALL = {"w": torch.zeros(5, 3), "n": torch.tensor(1), "b": torch.ones(2)}


def test_every_difference_is_named_on_every_rank(three: World, path: Path) -> None:
    together(three, save_small, path)
    ps.checkpoint.save(path.with_name("file"), SMALL)
    for name in ("state", "file"):
        text = [
            f"{path.with_name(name)} does not fit like: build like as the saved tree was",
            "tree['b'] is torch.float32 of shape (2,); like has no such leaf",
            "tree['n'] is torch.int64 of shape (); like has torch.float32 of shape ()",
            "tree['w'] is torch.float32 of shape (5, 3); like has torch.float32 of shape (5, 4)",
            "tree['x'] is missing; like has torch.float32 of shape (4,)",
        ]
        for said in together(three, load_other, path.with_name(name)):
            assert said == ("ValueError", "\n  ".join(text))


def save_small(_: int, path: Path) -> None:
    """In pieces."""
    ps.checkpoint.save(path, ps.shard(SMALL, axis()))


def load_other(_: int, path: Path) -> tuple[str, str]:
    """What differs in names, shapes and dtypes."""
    like = {"w": torch.zeros(5, 4), "n": torch.tensor(1.0), "x": torch.zeros(4)}
    return refused(lambda: ps.checkpoint.load(path, ps.shard(like, axis())))


def test_each_changed_missing_or_further_byte_is_noticed(three: World, path: Path) -> None:
    """Whichever file of the folder it is in."""
    together(three, save_small, path)
    ps.checkpoint.load(path, SMALL)
    for file in [*path.iterdir()]:
        content = file.read_bytes()
        changes = [content[:-1], content + b"\0", b"\0" + content, b""]
        for place in range(0, len(content), 7):
            changes.append(
                content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
            )
        for change in changes:
            file.write_bytes(change)
            with pytest.raises(ValueError, match=r"state.* is no checkpoint .* changed"):
                ps.checkpoint.load(path, SMALL)
        file.unlink()
        with pytest.raises(ValueError, match=r"state.* is no checkpoint .* changed"):
            ps.checkpoint.load(path, SMALL)
        file.write_bytes(content)
    ps.checkpoint.load(path, SMALL)


def test_what_one_rank_finds_damaged_all_refuse(three: World, path: Path) -> None:
    """Each rank reads what it needs: the file with its pieces."""
    together(three, save_small, path)
    file = path / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    said = together(three, load_damaged, path)
    assert [kind for kind, _ in said].count("ValueError") >= 1
    for kind, text in said:
        assert f"{file} is no checkpoint" in text
        assert kind == "ValueError" or text.startswith("rank ")
    for name, expected in (("nowhere", "FileNotFoundError"), ("text", "ValueError")):
        (path.parent / "text").write_text("text")
        for kind, text in together(three, load_damaged, path.with_name(name)):
            assert kind == expected
            assert str(path.with_name(name)) in text


def load_damaged(_: int, path: Path) -> tuple[str, str]:
    """What would fit."""
    return refused(lambda: ps.checkpoint.load(path, ps.shard(SMALL, axis())))


def test_different_checkpoints_on_different_ranks_are_refused(three: World, path: Path) -> None:
    paths = [path.with_name(name) for name in ("one", "two", "one")]
    for number, place in enumerate(paths[:2]):
        ps.checkpoint.save(place, SMALL | {"w": torch.full((5, 3), float(number))})
    for kind, text in values(three.run(load_damaged, paths)):
        assert kind == "ValueError"
        assert re.search(r"rank 1 differs from rank 0 in .*/(one|two), [0-9a-f]{8}: ", text)
    news = [path.with_name(name) for name in ("three", "four", "three")]
    for kind, text in values(three.run(save_to, news)):
        assert kind == "ValueError"
        assert re.search(r"rank 1 differs from rank 0 in .*/(three|four): give all ranks one", text)
    for kind, text in together(three, save_different, path):
        assert kind == "ValueError"
        assert re.search(r"rank 1 differs .* tree\['w'\], torch.float32 of shape \(1,\): ", text)
    assert {file.name for file in path.parent.iterdir()} == {"one", "two"}


def save_different(rank: int, path: Path) -> tuple[str, str]:
    """A tensor of which one rank has another name."""
    state = {"x" if rank == BAD else "w": ps.shard(torch.ones(1), axis())}
    return refused(lambda: ps.checkpoint.save(path, state))


def test_pieces_that_no_processes_hold_are_refused(path: Path) -> None:
    """Those of simulated ranks, and of processes that have parted."""
    threads = ps.testing.ThreadAxis(2)

    def save(rank: Tensor) -> tuple[str, str]:
        return refused(lambda: ps.checkpoint.save(path, {"w": ps.shard(torch.ones(3), threads)}))

    place: Any = {"init_method": f"file://{path}.store", "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **place)
    state = {"w": ps.shard(torch.ones(3), axis())}
    dist.destroy_process_group()
    acts = (ps.checkpoint.save, ps.checkpoint.load, ps.checkpoint.export)
    parted = [refused(partial(act, path, state)) for act in acts]
    for kind, text in [*threads.map(save)([torch.tensor(0), torch.tensor(1)]), *parted]:
        assert kind == "ValueError"
        assert re.search("there is none: take ps.unshard", text)


def test_pieces_of_simulated_ranks_are_refused_among_processes(three: World, path: Path) -> None:
    for kind, text in together(three, save_simulated, path):
        assert kind == "TypeError"
        assert text.startswith("a Shard over LocalAxis() cannot be a DTensor")
    assert not [*path.parent.iterdir()]


def save_simulated(_: int, path: Path) -> tuple[str, str]:
    """Over an axis that is no ``MeshAxis``."""
    state = {"w": ps.Shard(torch.ones(3), ps.LocalAxis(), (3,))}
    return refused(lambda: ps.checkpoint.save(path, state))


def test_a_piece_of_another_length_is_refused(three: World, path: Path) -> None:
    for kind, text in together(three, save_wrong, path):
        assert kind == "ValueError"
        assert text.startswith("tree['w'].piece has shape (2,), but this rank's piece of a tensor")


def test_what_one_rank_may_not_save_all_refuse(three: World, path: Path) -> None:
    file = path.with_name("file")
    ps.checkpoint.save(file, {"w": torch.ones(3), "n": torch.tensor(1)})
    for act, place in ((ps.checkpoint.save, path), (ps.checkpoint.load, file)):
        for rank, (kind, text) in enumerate(together(three, with_number, act, place)):
            assert kind == ("TypeError" if rank == BAD else "RankError")
            assert rank == BAD or text.startswith("rank 1 failed, and all ranks with it: TypeError")
            assert "tree['n'] is int, no tensor" in text


def with_number(rank: int, act: Callable[..., Any], path: Path) -> tuple[str, str]:
    """No tensor, on one rank: what is saved, or into what something is loaded."""
    state = {"w": ps.shard(torch.ones(3), axis()), "n": 1 if rank == BAD else torch.tensor(1)}
    return refused(lambda: act(path, state))


def save_wrong(_: int, path: Path) -> tuple[str, str]:
    """Two of three, on each."""
    return refused(lambda: ps.checkpoint.save(path, {"w": ps.Shard(torch.ones(2), axis(), (3,))}))
