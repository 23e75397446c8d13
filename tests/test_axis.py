"""Axes: what they refuse, and how they behave beside the laws of T11."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import optree
import pytest
import torch
import torch.distributed as dist

import purestep as ps
from purestep import tree
from purestep.testing import ThreadAxis
from tests.uneven import sound, step

LAWS: list[Any] = [ps.psum, ps.pmean, ps.pvary, ps.all_gather, ps.psum_scatter]
SIMULATED = [ps.VmapAxis, ThreadAxis]


@pytest.mark.parametrize("make", SIMULATED)
def test_outside_of_map(make: Any) -> None:
    axis = make(2)
    way_out = rf"{make.__name__}\(2\) has ranks only while it maps: .*axis\.map\(fn"
    uses = (lambda: ps.psum(torch.ones(2), axis), lambda: axis.index, lambda: step(axis, sound(0)))
    for use in uses:
        with pytest.raises(RuntimeError, match=way_out):
            use()


@pytest.mark.parametrize("make", SIMULATED)
@pytest.mark.parametrize("size", [0, -1, 2.0, "2"])
def test_size(make: Any, size: Any) -> None:
    with pytest.raises(ValueError, match=rf"{make.__name__}\(size={size!r}\): an axis has a whole"):
        make(size)


@pytest.mark.parametrize("bucket_bytes", [0, -8, 8.0, None])
def test_bucket_bytes(bucket_bytes: Any) -> None:
    with pytest.raises(ValueError, match=rf"bucket_bytes={bucket_bytes} must be a whole number"):
        ThreadAxis(2, bucket_bytes=bucket_bytes)


def test_an_error_inside_leaves_the_axis_usable() -> None:
    axis = ps.VmapAxis(2)

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        axis.map(fails)(torch.ones(2))
    with pytest.raises(RuntimeError, match="has ranks only while it maps"):
        ps.psum(torch.ones(2), axis)
    assert axis.map(lambda x: ps.psum(x, axis), out_dims=None)(torch.ones(2)) == 2


@pytest.mark.parametrize(
    ("x", "dims", "message"),
    [
        (torch.arange(3), {"out_dims": None}, "not the same on all 3 ranks: psum it"),
        ({"a": torch.arange(3)}, {"in_dims": ({"b": 0},)}, r"in_dims=.* does not fit .*'a'"),
        (torch.arange(3), {"out_dims": (0, 0)}, "out_dims="),
    ],
)
def test_dims_that_do_not_fit(x: Any, dims: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.VmapAxis(3).map(lambda x: x, **dims)(x)


register: Any = optree.dataclasses.dataclass


@register(namespace=tree.NAMESPACE)
class Pair:
    """A class of our own, and so a node of trees."""

    a: Any
    b: Any


@pytest.mark.parametrize("make", [cast("Any", Pair), lambda a, b: {"a": a, "b": b}])
def test_dims_are_trees(make: Any) -> None:
    axis = ps.VmapAxis(2)

    def program(pair: Any) -> Any:
        a, b = tree.leaves_of(pair)
        return make(ps.psum(a, axis), a + b)

    x, y = torch.arange(6).view(3, 2), torch.tensor(10)
    result = axis.map(program, in_dims=(make(1, None),), out_dims=make(None, 1))(make(x, y))
    total, each = tree.leaves_of(result)
    assert torch.equal(total, x.sum(1))
    assert torch.equal(each, x + 10)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        *(
            (axis, r'as in ps\.MeshAxis\(mesh, "dp"\)')
            for axis in ("dp", ("dp", "cp"), cast("Any", dist.ProcessGroup)(0, 1))
        ),
        *(
            (axis, r"axis must be an axis object, got .*: take ps\.LocalAxis")
            for axis in (None, 4, ps.VmapAxis, ())
        ),
    ],
    ids=str,
)
def test_what_is_no_axis(axis: Any, message: str) -> None:
    x, optimizer = torch.ones(2), ps.optim.sgd(0.1)
    attempts: list[Callable[[], Any]] = [
        lambda: ps.make_update_step(lambda p, m: p * m, optimizer, axis=axis),
        lambda: ps.make_eval_step(lambda p, m: p * m, axis=axis),
        *(partial(law, x, axis) for law in LAWS),
    ]
    for attempt in attempts:
        with pytest.raises(TypeError, match=message):
            attempt()


@pytest.mark.parametrize(("tiled", "wanted"), [(False, "exactly 2"), (True, "a multiple of 2")])
def test_scatter_needs_an_entry_for_each_rank(tiled: bool, wanted: str) -> None:
    axis = ps.VmapAxis(2)
    with pytest.raises(ValueError, match=rf"along dim=0 needs {wanted} entries .*\(3,\)"):
        axis.map(lambda x: ps.psum_scatter(x, axis, tiled=tiled))(torch.ones(2, 3))


def test_threads_do_not_meet() -> None:
    """One axis object mapped by two threads at once: each has its own ranks."""
    axis, barrier, totals = ps.VmapAxis(2), threading.Barrier(2), {}

    def work(value: float) -> None:
        def rank(x: torch.Tensor) -> torch.Tensor:
            barrier.wait(timeout=10)
            return ps.psum(x, axis)

        totals[value] = float(axis.map(rank, out_dims=None)(torch.full((2,), value)))

    threads = [threading.Thread(target=work, args=(value,)) for value in (1.0, 10.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert totals == {1.0: 2.0, 10.0: 20.0}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
@pytest.mark.parametrize("law", [ps.psum, ps.psum_scatter])
def test_integers_are_summed_in_int64_on_every_axis(law: Any, dtype: torch.dtype) -> None:
    x = torch.ones(1, 1, dtype=dtype)
    axis = ps.VmapAxis(1)
    for in_dims, argument in ((0, x), (None, x[0])):
        summed = axis.map(lambda block: law(block, axis), in_dims=in_dims)(argument)
        assert summed.dtype == torch.int64
    assert law(x[0], ps.LocalAxis()).dtype == torch.int64
