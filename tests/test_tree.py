"""Trees of tensors."""

from collections import OrderedDict, UserDict, defaultdict
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from purestep import tree
from purestep.tree.norms import SMALL_LEAF
from purestep.tree.ops import format_leaf
from purestep.tree.tracing import concrete
from tests.torch_private import FakeTensorMode

register: Any = optree.dataclasses.dataclass


@register(namespace=tree.NAMESPACE)
class _Layer:
    weight: torch.Tensor


Layer: Any = _Layer
"""A class of the user's."""


def test_map_knows_registered_classes() -> None:
    params = {"layer": Layer(torch.ones(2)), "none": None, "list": [torch.zeros(1)]}
    doubled = tree.map(lambda a, b: a + b, params, params)
    assert torch.equal(doubled["layer"].weight, torch.full((2,), 2.0))
    assert doubled["none"] is None
    assert tree.paths(params, "params") == [
        "params['layer'].weight",
        "params['list'][0]",
    ]


def test_plain_makes_dicts_of_mappings_alone() -> None:
    class Own(dict[str, Any]):
        """Of which optree knows nothing, either."""

    inner = Own(b=UserDict(c=1))
    done = tree.mappings_to_dicts(
        [UserDict(a=inner), Layer(UserDict(d=2)), {"e": (3, None)}]
    )
    assert done == [{"a": {"b": {"c": 1}}}, Layer({"d": 2}), {"e": (3, None)}]
    assert [type(done[0]), type(done[0]["a"]), type(done[0]["a"]["b"])] == [dict] * 3
    same = {"x": [1]}
    assert tree.mappings_to_dicts(same) is same


LIKE: list[tuple[Any, Any]] = [
    ({"a": 1, "b": {"c": 2}}, {"b": {"c": 3}, "a": 4}),
    ([1, (2, None)], [3, (4, None)]),
    (OrderedDict(a=1, b=2), OrderedDict(a=3, b=4)),
    (defaultdict(list, a=1, b=2), defaultdict(list, a=3, b=4)),
]
UNLIKE: list[tuple[Any, Any]] = [
    ({"a": 1}, {"b": 1}),
    ({"a": 1}, {"a": [1]}),
    ({"a": 1}, OrderedDict(a=1)),
    ({"a": {"b": 1}}, {"a": {"c": 1}}),
    ([1, 2], (1, 2)),
    ([1, 2], [1, 2, 3]),
    ([1, None], [1, ()]),
    (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    (defaultdict(list, a=1), defaultdict(set, a=1)),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("one", "other"), LIKE + UNLIKE)
def test_structures_are_compared_alike_in_a_trace(
    one: Any, other: Any, compiled: bool, fresh_compiler: None
) -> None:
    """Dicts without the order of their keys, which a compiler's own structures count."""

    def is_same(one: Any, other: Any) -> bool:
        return tree.is_same_spec(tree.flatten(one)[1], tree.flatten(other)[1])

    def tensors(values: Any) -> Any:
        return optree.tree_map(torch.tensor, values)

    if compiled:
        is_same = torch.compile(is_same, backend="eager", fullgraph=True)
    assert is_same(tensors(one), tensors(other)) == ((one, other) in LIKE)


@pytest.mark.parametrize(
    "other", [{"w": None}, {"w": {"v": 1}}, {"v": 1}, [1], {"w": 1, "x": 2}]
)
def test_map_refuses_another_structure(other: object) -> None:
    with pytest.raises(
        ValueError, match=r"trees differ in structure: {'w': \*} against"
    ):
        tree.map(lambda a, b: a, {"w": 1}, other)
    with pytest.raises(ValueError, match="trees differ in structure"):
        tree.where(torch.tensor(True), {"w": torch.ones(())}, other)


def test_accumulation_dtype() -> None:
    wide = {
        torch.bool: torch.int64, torch.uint8: torch.int64, torch.float16: torch.float32,
        torch.bfloat16: torch.float32, torch.float64: torch.float64,
    }  # fmt: skip
    assert {dtype: tree.accumulation_dtype(dtype) for dtype in wide} == wide
    assert {
        dtype: tree.zeros_like(torch.ones(1).to(dtype)).dtype for dtype in wide
    } == wide


def test_global_norm() -> None:
    leaves = {"a": torch.full((4,), 1e15), "b": torch.zeros(2, 0)}
    assert tree.global_norm(leaves) == pytest.approx(2e15)
    assert (
        tree.global_norm({"half": torch.full((4,), 300.0, dtype=torch.float16)}) == 600
    )
    assert tree.global_norm(()) == 0


@pytest.mark.parametrize("rest", [[], [3.0, 4.0]])
@pytest.mark.parametrize("sizes", [(2,), (2, 0, 3), (SMALL_LEAF, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_of_zero_has_the_derivative_zero(
    dtype: Any, sizes: Any, rest: Any
) -> None:
    """In both modes, batched, recorded; beside leaves that are not zero, too. What clips by it is derived twice."""
    zeros = [torch.zeros(size, dtype=dtype) for size in sizes]
    ones = tree.map(torch.ones_like, zeros)

    def norm(x: Any) -> Tensor:
        return tree.global_norm([*x, torch.tensor(rest, dtype=dtype)])

    own = [x.clone().requires_grad_() for x in zeros]
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(x, one) for x, one in zip(zeros, ones, strict=True)
        ]
        tangent = forward_ad.unpack_dual(norm(duals)).tangent
    slope, jvp = torch.func.grad(norm), torch.func.jvp
    found = [
        slope(zeros),
        torch.vmap(slope)([x[None] for x in zeros]),
        jvp(norm, (zeros,), (ones,))[1],
        torch.autograd.grad(norm(own), own),
        [] if tangent is None else tangent,
    ]
    if not rest:
        found.append(
            torch.func.grad(lambda x: sum(leaf.sum() for leaf in slope(x)))(zeros)
        )
        found.append(jvp(slope, (zeros,), (ones,))[1])
    assert all((leaf == 0).all() for leaf in tree.leaves(found))


SCALED = torch.ones(2).to(torch.float8_e4m3fn)
DIFFERENCES: list[tuple[Any, Any, str | None]] = [
    ({"a": 1, "b": 2}, {"a": 1, "c": 2}, "s['c'] is missing"),
    ({"a": 1}, {"a": 1, "c": 2}, "s['c'] is missing"),
    ({"c": 1}, {"a": 1, "c": 2}, "s['a'] is missing"),
    ({"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 3}, "s['b'] has no place"),
    ({"a": 1, "c": 3}, {"a": 1}, "s['c'] has no place"),
    ([1], (1,), "s has other containers"),
    ({"a": 1}, {"a": "x"}, "s['a'] is int, no tensor, and 'x' was expected"),
    ({"a": 1}, {"a": 2}, None),
    (torch.ones(2), torch.ones(2).double(), None),  # Floating point dtypes are alike.
    *(
        (
            other,
            torch.ones(2),
            f"s is {format_leaf(other)}, and {format_leaf(torch.ones(2))} was expected",
        )
        for other in (torch.ones(2).long(), SCALED, torch.ones(2, 1))
    ),
]


@pytest.mark.parametrize(("found", "wanted", "difference"), DIFFERENCES)
def test_the_first_difference(found: Any, wanted: Any, difference: str | None) -> None:
    assert tree.describe_mismatch(found, wanted, "s") == difference


def test_the_host_reads_values_below_wrappers() -> None:
    """But not what stands for values that do not exist."""
    x = torch.tensor([1.0, 2.0])
    seen: list[Any] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(concrete(x))
        return x.sum()

    look(x)
    torch.vmap(torch.func.grad(look))(x[None])
    torch.func.jvp(look, (x,), (x,))
    assert [list(values.flatten()) for values in seen] == [[1.0, 2.0]] * 3
    with FakeTensorMode():
        assert concrete(torch.ones(2)) is None
    assert concrete(torch.ones(2, device="meta")) is None


LAYERS = {"layers": [Layer({"a": 1, "b": 2}), Layer(3)], "last": Layer(4)}
PREFIXES: list[tuple[Any, Any, list[str]]] = [
    (OrderedDict(z="slow", a="fast"), {"a": 1, "z": 2}, ["fast", "slow"]),
    ({"a": "fast", "z": "slow"}, OrderedDict(z=1, a=2), ["slow", "fast"]),
    (
        defaultdict(str, a="fast", z="slow"),
        {"z": [1, 2], "a": 3},
        ["fast", "slow", "slow"],
    ),
    ({"a": None, "z": "slow"}, {"a": None, "z": 1}, ["slow"]),
    ({"a": "any", "z": ("slow",)}, {"a": [], "z": (1,)}, ["slow"]),
    ({"layers": "all", "last": "one"}, LAYERS, ["one", *["all"] * 3]),
    ({"layers": [Layer("a"), "b"], "last": Layer("z")}, LAYERS, ["z", "a", "a", "b"]),
]


@pytest.mark.parametrize(("prefix", "whole", "expected"), PREFIXES)
def test_a_prefix_is_paired_by_key(
    prefix: Any, whole: Any, expected: list[str]
) -> None:
    """Whatever kind of dict either is, and whatever order it keeps; through classes, too."""
    assert tree.broadcast_prefix(prefix, whole) == expected


NO_PREFIXES: list[tuple[Any, Any]] = [
    ({"a": None, "b": "x"}, {"a": 1, "b": 2}), ({"a": {"x": "m"}}, {"a": 1}), ({"a": ()}, {"a": 1}),
    ({"a": "m", "b": "m"}, {"a": 1}), ({}, {"a": 1}), (("m", "m"), [1, 2]), (["m"], [1, 2]), (["m"], {"a": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("prefix", "whole"), NO_PREFIXES)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_no_prefix_is_refused(prefix: Any, whole: Any, compiled: bool) -> None:
    def spread(leaf: torch.Tensor) -> torch.Tensor:
        return leaf * len(
            tree.broadcast_prefix(prefix, tree.map(lambda _: leaf, whole))
        )

    run = torch.compile(spread, fullgraph=True, backend="eager") if compiled else spread
    # The compiler cannot follow the message, and says so instead.
    with pytest.raises(RuntimeError if compiled else ValueError):
        run(torch.ones(2))


def test_containers_without_leaves_stay_in_a_trace() -> None:
    def spread(leaf: torch.Tensor) -> Any:
        return leaf, tree.map(lambda _: "x", {"a": leaf, "b": [()]})

    run = torch.compile(spread, fullgraph=True, backend="eager")
    assert run(torch.ones(2))[1] == {"a": "x", "b": [()]}
