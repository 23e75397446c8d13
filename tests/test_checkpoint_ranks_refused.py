"""Checkpoints of many ranks that are refused on every one of them: other names and shapes, damage, and what is no piece."""

from __future__ import annotations

import os
import pickle
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import purestep as ps
from purestep.checkpoint import files
from purestep.testing.processes import World, values
from tests.hazards import Bomb
from tests.held_by_ranks import BAD, axis, refused, save_to, together

SMALL = {"w": torch.zeros(5, 3), "n": torch.tensor(1), "b": torch.ones(2)}


def test_every_difference_is_named_on_every_rank(three: World, path: Path) -> None:
    together(three, save_small, path)
    ps.checkpoint.save(path.with_name("file"), SMALL)
    for name in ("state", "file"):
        text = [
            f"{path.with_name(name)} does not fit like:",
            "tree['b'] has no place",
            "tree['n'] is torch.int64 of shape (), and torch.float32 of shape () was expected",
            "tree['w'] is torch.float32 of shape (5, 3), and torch.float32 of shape (5, 4) was expected",
            "tree['x'] is missing",
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
    together(three, save_small, path)
    file = path / "__2_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    said = together(three, load_damaged, path)
    assert len({*said}) == 1
    assert re.fullmatch(r"rank \d: .*/__2_0.distcp is no checkpoint .*", said[0][1])
    assert said[0][0] == "ValueError"
    for name in ("nowhere", "text"):
        (path.parent / "text").write_text("text")
        kind, text = together(three, load_damaged, path.with_name(name))[BAD]
        assert kind == {"nowhere": "FileNotFoundError", "text": "ValueError"}[name]
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
        assert re.search(r"is not the same on rank 1 as on rank 0", text)
    for kind, text in values(three.run(save_to, paths)):
        assert kind == "ValueError"
        assert re.search(r"rank 1 does not save what rank 0 saves: it goes to .*two, and on rank 0 it goes", text)  # fmt: skip
    for kind, text in together(three, save_different, path):
        assert kind == "ValueError"
        assert re.search(r"rank 1 does not .*: tree\['x'\] is torch.float32 of shape \(1,\)", text)
    assert not path.exists()


def save_different(rank: int, path: Path) -> tuple[str, str]:
    """A tensor of which one rank has another name."""
    state = {"x" if rank == BAD else "w": ps.shard(torch.ones(1), axis())}
    return refused(lambda: ps.checkpoint.save(path, state))


def test_nothing_in_a_folder_is_run(three: World, path: Path) -> None:
    """Even one whose checksums are right."""
    together(three, save_small, path)
    sums, _ = files.read_all(path / "checksums")
    bomb = path.with_name("bomb")
    pickled = pickle.dumps(Bomb(bomb))
    for forged in (pickled, b"", pickle.dumps(7), pickle.dumps(os.system), pickle.dumps(Path)):
        (path / ".metadata").write_bytes(forged)
        size, checksum = len(forged), zlib.crc32(forged)
        files.write(path / "checksums", sums | {".metadata": torch.tensor([size, checksum])})
        with pytest.raises(ValueError, match=r"state/.metadata is no checkpoint"):
            ps.checkpoint.load(path, SMALL)
    assert not bomb.exists()


def test_pieces_that_are_no_pieces_are_refused(path: Path) -> None:
    threads = ps.testing.ThreadAxis(2)

    def save(rank: Tensor) -> tuple[str, str]:
        return refused(lambda: ps.checkpoint.save(path, {"w": ps.shard(torch.ones(3), threads)}))

    for kind, text in threads.map(save)([torch.tensor(0), torch.tensor(1)]):
        assert kind == "TypeError"
        assert text.startswith(
            "a Shard over ThreadAxis(2), which is no ps.MeshAxis, is neither saved"
        )


def test_ranks_that_have_parted_save_nothing(path: Path) -> None:
    place: Any = {"init_method": f"file://{path}.store", "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **place)
    state = {"w": ps.shard(torch.ones(3), axis())}
    dist.destroy_process_group()
    for act in (ps.checkpoint.save, ps.checkpoint.load, ps.checkpoint.export):
        with pytest.raises(ValueError, match=r"a Shard over MeshAxis\('dp', 1 rank\) .* has ended"):
            act(path, state)


def test_a_piece_of_another_length_is_refused(three: World, path: Path) -> None:
    for kind, text in together(three, save_wrong, path):
        assert kind == "ValueError"
        assert text.startswith("tree['w'].piece has shape (2,), but this rank's piece of a tensor")


def test_what_one_rank_may_not_save_all_refuse(three: World, path: Path) -> None:
    for act in (ps.checkpoint.save, ps.checkpoint.load):
        for kind, text in together(three, with_number, act, path):
            assert kind == "TypeError"
            assert text.startswith("rank 1: tree['n'] is int, no tensor")


def with_number(rank: int, act: Callable[..., Any], path: Path) -> tuple[str, str]:
    """No tensor, on one rank: what is saved, or into what something is loaded."""
    state = {"w": ps.shard(torch.ones(3), axis()), "n": 1 if rank == BAD else torch.tensor(1)}
    return refused(lambda: act(path, state))


def save_wrong(_: int, path: Path) -> tuple[str, str]:
    """Two of three, on each."""
    return refused(lambda: ps.checkpoint.save(path, {"w": ps.Shard(torch.ones(2), axis(), (3,))}))
