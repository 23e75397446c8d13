"""Trees of tensors."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from typing import Any

import optree
import pytest
import torch
from torch.autograd import forward_ad

from purestep import tree
from purestep.tree.alike import kind
from purestep.tree.leaves import SMALL, at_hand
from tests.torch_private import FakeTensorMode

register: Any = optree.dataclasses.dataclass


@register(namespace=tree.NAMESPACE)
class Layer:
    """A class of one's own."""

    weight: torch.Tensor


def test_map_knows_registered_classes() -> None:
    make: Any = Layer
    params = {"layer": make(torch.ones(2)), "none": None, "list": [torch.zeros(1)]}
    doubled = tree.map(lambda a, b: a + b, params, params)
    assert torch.equal(doubled["layer"].weight, torch.full((2,), 2.0))
    assert doubled["none"] is None
    assert tree.paths(params, "params") == ["params['layer'].weight", "params['list'][0]"]


def test_broadcast_prefix_knows_registered_classes() -> None:
    """As a node of the tree below a leaf of the prefix, and as a node of both."""
    make: Any = Layer
    params = {"layers": [make({"a": 1, "b": 2}), make(3)], "last": make(4)}
    assert tree.broadcast_prefix({"layers": "all", "last": "one"}, params) == ["one", *["all"] * 3]
    prefix = {"layers": [make("first"), "second"], "last": make("last")}
    assert tree.broadcast_prefix(prefix, params) == ["last", "first", "first", "second"]


def test_plain_makes_dicts_of_mappings_alone() -> None:
    class Own(dict[str, Any]):
        """Of which optree knows nothing, either."""

    make: Any = Layer
    inner = Own(b=UserDict(c=1))
    done = tree.plain([UserDict(a=inner), make(UserDict(d=2)), {"e": (3, None)}])
    assert done == [{"a": {"b": {"c": 1}}}, make({"d": 2}), {"e": (3, None)}]
    assert [type(done[0]), type(done[0]["a"]), type(done[0]["a"]["b"])] == [dict] * 3
    same = {"x": [1]}
    assert tree.plain(same) is same


@pytest.mark.parametrize("other", [{"w": None}, {"w": {"v": 1}}, {"v": 1}, [1], {"w": 1, "x": 2}])
def test_map_refuses_another_structure(other: object) -> None:
    with pytest.raises(ValueError, match=r"trees differ in structure: {'w': \*} against"):
        tree.map(lambda a, b: a, {"w": 1}, other)
    with pytest.raises(ValueError, match="trees differ in structure"):
        tree.select(torch.tensor(True), {"w": torch.ones(())}, other)


def test_select_takes_bits_and_leaves_order() -> None:
    chosen, other = (
        [torch.tensor(1.0), torch.tensor(2)],
        [torch.tensor(float("nan")), torch.tensor(7)],
    )
    assert tree.select(torch.tensor(True), chosen, other) == chosen
    assert tree.select(torch.tensor(False), other, chosen) == chosen


def test_global_norm() -> None:
    leaves = {"a": torch.full((4,), 1e15), "b": torch.zeros(2, 0)}
    assert tree.global_norm(leaves) == pytest.approx(2e15)
    assert tree.global_norm({"half": torch.full((4,), 300.0, dtype=torch.float16)}) == 600
    assert torch.equal(torch.func.grad(tree.global_norm)(torch.zeros(3)), torch.zeros(3))
    assert tree.global_norm(()) == 0


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bool, torch.int64),
        (torch.uint8, torch.int64),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_accumulation_dtype(dtype: torch.dtype, wide: torch.dtype) -> None:
    assert tree.accumulation_dtype(dtype) == wide
    assert tree.zeros_like([torch.ones(1).to(dtype)])[0].dtype == wide


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_of_zero_has_the_derivative_zero(dtype: torch.dtype) -> None:
    """In both modes, batched, recorded, and of second order; beside leaves that are not zero, too."""
    zero, rest = torch.zeros(3, dtype=dtype), torch.tensor([3.0, 4.0], dtype=dtype)
    ones = torch.ones_like(zero)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return tree.global_norm({"x": x, "y": x[:0]})

    def beside(x: torch.Tensor) -> torch.Tensor:
        return tree.global_norm({"x": x, "y": rest})

    for function in (norm, beside):
        slope = torch.func.grad(function)
        assert torch.equal(slope(zero), zero)
        assert torch.equal(torch.vmap(slope)(zero[None])[0], zero)
        assert torch.func.jvp(function, (zero,), (ones,))[1] == 0
        own = zero.clone().requires_grad_()
        assert torch.equal(torch.autograd.grad(function(own), own)[0], zero)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(zero, ones))).tangent
        assert tangent is None or tangent == 0
    assert torch.equal(torch.func.hessian(norm)(zero), zero.new_zeros(3, 3))


@pytest.mark.parametrize(
    ("found", "wanted", "difference"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "c": 2}, "s['c'] is missing"),
        ({"a": 1}, {"a": 1, "c": 2}, "s['c'] is missing"),
        ({"c": 1}, {"a": 1, "c": 2}, "s['a'] is missing"),
        ({"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 3}, "s['b'] has no place"),
        ({"a": 1, "c": 3}, {"a": 1}, "s['c'] has no place"),
        ([1], (1,), "s has other containers"),
        ({"a": 1}, {"a": "x"}, "s['a'] is int, no tensor, and 'x' was expected"),
        ({"a": 1}, {"a": 2}, None),
    ],
)
def test_the_first_difference(found: Any, wanted: Any, difference: str | None) -> None:
    assert tree.difference(found, wanted, "s") == difference


def test_floating_point_dtypes_are_alike() -> None:
    one = torch.ones(2)
    assert tree.difference(one, one.double(), "s") is None
    for other in (one.to(torch.float8_e4m3fn), one.long(), torch.ones(2, 1)):
        kinds = f"s is {kind(other)}, and {kind(one)} was expected"
        assert tree.difference(other, one, "s") == kinds


def test_what_the_host_can_read() -> None:
    """Below wrappers, but not what stands for values that do not exist."""
    x = torch.tensor([1.0, 2.0])
    seen: list[Any] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(at_hand(x))
        return x.sum()

    look(x)
    torch.vmap(torch.func.grad(look))(x[None])
    torch.func.jvp(look, (x,), (x,))
    assert [list(values.flatten()) for values in seen] == [[1.0, 2.0]] * 3
    with FakeTensorMode():
        assert at_hand(torch.ones(2)) is None
    assert at_hand(torch.ones(2, device="meta")) is None


PAIRED: list[tuple[Any, Any, list[str]]] = [
    (OrderedDict(z="slow", a="fast"), {"a": 1, "z": 2}, ["fast", "slow"]),
    ({"a": "fast", "z": "slow"}, OrderedDict(z=1, a=2), ["slow", "fast"]),
    (defaultdict(str, a="fast", z="slow"), {"z": [1, 2], "a": 3}, ["fast", "slow", "slow"]),
    ({"a": None, "z": "slow"}, {"a": None, "z": 1}, ["slow"]),
    ({"a": "any", "z": ("slow",)}, {"a": [], "z": (1,)}, ["slow"]),
]


@pytest.mark.parametrize(("prefix", "whole", "expected"), PAIRED)
def test_a_prefix_is_paired_by_key(prefix: Any, whole: Any, expected: list[str]) -> None:
    """Whatever kind of dict either is, and whatever order it keeps."""
    assert tree.broadcast_prefix(prefix, whole) == expected


@pytest.mark.parametrize(
    ("prefix", "whole"),
    [
        ({"a": None, "b": "x"}, {"a": 1, "b": 2}),
        ({"a": {"x": "m"}}, {"a": 1}),
        ({"a": ()}, {"a": 1}),
        ({"a": "m", "b": "m"}, {"a": 1}),
        ({}, {"a": 1}),
        (("m", "m"), [1, 2]),
        (["m"], [1, 2]),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_no_prefix_is_refused(prefix: Any, whole: Any, compiled: bool) -> None:
    def spread(leaf: torch.Tensor) -> torch.Tensor:
        return leaf * len(tree.broadcast_prefix(prefix, tree.map(lambda _: leaf, whole)))

    run = torch.compile(spread, fullgraph=True, backend="eager") if compiled else spread
    # The compiler cannot follow the message, and says so instead.
    with pytest.raises(RuntimeError if compiled else ValueError):
        run(torch.ones(2))


@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize("sizes", [(2,), (2, 0, 3), (SMALL, 2)])
def test_all_derivatives_of_the_norm_at_zero(mode: str, sizes: tuple[int, ...]) -> None:
    """Zero, in whichever mode: what clips by it is differentiated twice, too."""
    slope = torch.func.grad(tree.global_norm)
    zeros = [torch.zeros(size).double() for size in sizes]
    if mode == "reverse":
        second = torch.func.grad(lambda x: sum(leaf.sum() for leaf in slope(x)))(zeros)
    else:
        ones = tree.map(torch.ones_like, zeros)
        second = torch.func.jvp(slope, (zeros,), (ones,))[1]
    assert all((leaf == 0).all() for leaf in (*slope(zeros), *second))
