"""Checkpoints of many ranks: what comes back, on how many of them, and what other tools read and write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

import purestep as ps
from purestep.testing.processes import World
from tests.held_by_ranks import LARGE, axis, load, save, together, whole
from tests.memory import LiveBytes
from tests.states import assert_same_bits, noise, zeros


def test_any_number_of_ranks_loads_what_any_number_saves(
    three: World, world: World, path: Path
) -> None:
    together(world, save, path)
    together(three, load, path)
    together(three, load, path, "dp", 1)
    found = ps.checkpoint.load(path, zeros(whole()))
    assert_same_bits(found, whole())
    assert found["columns"].stride() == whole()["columns"].stride()
    other = path.with_name("other")
    together(three, save, other, "dp", 1)
    together(world, load, other, "shard")
    assert {*path.parent.iterdir()} == {path, other}
    assert {file.name for file in other.iterdir()} == {
        ".metadata", *(f"__{rank}_0.distcp" for rank in range(3))
    }  # fmt: skip


def test_ranks_load_pieces_of_a_file(three: World, world: World, path: Path) -> None:
    ps.checkpoint.save(path, whole())
    together(three, load, path)
    together(world, load, path, "shard", 1)


def test_what_replicas_hold_is_written_once(world: World, path: Path) -> None:
    together(world, save_large, path)
    sizes = [file.stat().st_size for file in path.glob("*.distcp")]
    assert sum(sizes) < 1.1 * 4 * (LARGE + LARGE // 4)
    assert max(sizes) < 0.6 * 4 * (LARGE + LARGE // 4), "shared among the ranks"
    like = {"pieces": torch.zeros(LARGE), "whole": [torch.zeros(LARGE // 16)] * 4}
    found = ps.checkpoint.load(path, like)
    assert_same_bits(found, large())


def large() -> Any:
    """A tensor to be cut, and others."""
    return {
        "pieces": noise(torch.float32, LARGE),
        "whole": [noise(torch.float32, LARGE // 16) for _ in range(4)],
    }


def save_large(_: int, path: Path) -> None:
    """Pieces over two of four ranks."""
    state = large()
    ps.checkpoint.save(path, state | {"pieces": ps.shard(state["pieces"], axis("shard"))})


def test_nothing_is_held_but_pieces(three: World, path: Path) -> None:
    piece, largest = 171 * 512 * 4, 512 * 512 * 4
    for saved, exported, loaded in together(three, peaks, path):
        assert saved < 0.1 * piece
        assert exported < 8.1 * largest + 2.1 * largest, "all, on the first, and one in the making"
        assert loaded < 10.1 * piece, "eight, what is read, and what was read before"
    found = safetensors.torch.load_file(path.with_name("model"))
    assert len(found) == 8
    assert all(torch.equal(tensor, torch.ones(512, 512)) for tensor in found.values())


def peaks(_: int, path: Path) -> tuple[int, ...]:
    """Bytes that saving, exporting and loading make."""
    state = {str(i): ps.shard(torch.ones(512, 512), axis()) for i in range(8)}

    def peak(act: Callable[..., Any], *args: Any) -> int:
        with LiveBytes() as live:
            kept = act(*args)
        del kept
        return live.peak

    return (
        peak(ps.checkpoint.save, path, state),
        peak(ps.checkpoint.export, path.with_name("model"), state),
        peak(ps.checkpoint.load, path, state),
    )


def test_torch_reads_it(three: World, path: Path) -> None:
    together(three, save, path)
    reader, planner = FileSystemReader(path), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    state: dict[str, Any] = dict(ps.state_dict(zeros(whole())))
    assert metadata.state_dict_metadata.keys() == state.keys()
    planner.set_up_planner(state, metadata)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    assert_same_bits(state, ps.state_dict(whole()))


def test_safetensors_of_others_and_for_others(three: World, path: Path) -> None:
    model = {"wte.weight": noise(torch.bfloat16, 7, 3), "b": noise(torch.float32), "a.b": noise(torch.float16, 2)}  # fmt: skip
    foreign = path.with_name("foreign")
    safetensors.torch.save_file(model, foreign, {"format": "pt"})
    together(three, take_in_and_give_out, foreign, path)
    assert_same_bits(safetensors.torch.load_file(path), model)


def take_in_and_give_out(_: int, foreign: Path, path: Path) -> None:
    """One tensor after the other."""
    over = axis()
    with safetensors.safe_open(foreign, "pt") as file:
        params = {name: ps.shard(file.get_tensor(name), over) for name in file.keys()}  # noqa: SIM118
    ps.checkpoint.export(path, params)
