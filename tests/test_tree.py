"""Trees of tensors."""

import math
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import purestep as ps
from purestep import LocalAxis, Shard, tree
from purestep.tree.norms import SMALL_LEAF
from purestep.tree.ops import format_leaf as describe_leaf
from purestep.tree.traced import flatten_traced, unflatten_traced
from purestep.tree.tracing import concrete
from support.strategies import assert_same
from support.torch_private import FakeTensorMode

register: Any = optree.dataclasses.dataclass


@register(namespace=tree.NAMESPACE)
class _Layer:
    weight: torch.Tensor


Layer: Any = _Layer
"""A registered class, and so a node of trees."""


def test_map_knows_registered_classes() -> None:
    params = {
        "layer": Layer(torch.ones(2)),
        "none": None,
        "list": [torch.zeros(1)],
    }

    doubled = tree.map(lambda a, b: a + b, params, params)

    assert torch.equal(doubled["layer"].weight, torch.full((2,), 2.0))
    assert doubled["none"] is None
    paths = tree.paths(params, "params")
    assert paths == ["params['layer'].weight", "params['list'][0]"]


def test_plain_makes_dicts_of_mappings_alone() -> None:
    class Unregistered(dict[str, Any]):
        """A mapping that optree takes for a leaf."""

    inner = Unregistered(b=UserDict(c=1))
    mappings = UserDict(a=inner)
    layer = Layer(UserDict(d=2))
    others = {"e": (3, None)}

    plain = tree.mappings_to_dicts([mappings, layer, others])

    assert plain[0] == {"a": {"b": {"c": 1}}}
    assert type(plain[0]) is dict
    assert type(plain[0]["a"]) is dict
    assert type(plain[0]["a"]["b"]) is dict
    assert plain[1] == Layer({"d": 2})
    assert plain[2] == others
    same = {"x": [1]}
    assert tree.mappings_to_dicts(same) is same


# Structures

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
        structure = tree.flatten(one)[1]
        other_structure = tree.flatten(other)[1]
        return tree.is_same_spec(structure, other_structure)

    def tensors(values: Any) -> Any:
        return optree.tree_map(torch.tensor, values)

    if compiled:
        is_same = torch.compile(is_same, backend="eager", fullgraph=True)
    expected = (one, other) in LIKE
    assert is_same(tensors(one), tensors(other)) == expected


class Pair(NamedTuple):
    first: Any
    second: Any


CONTAINERS: list[Any] = [
    1,
    None,
    {},
    {"b": 1, "a": [2, (3, None)]},
    {2: "x", 1: {"d": [], "c": ()}},
    OrderedDict(b=1, a={"z": 2, "y": 3}),
    defaultdict(list, b=1, a=2),
    Pair({"b": 1, "a": 2}, Pair(3, ())),
    [Shard(torch.ones(2), LocalAxis(), (2,)), {"w": torch.zeros(1)}],
]


@pytest.mark.parametrize("example", CONTAINERS, ids=repr)
def test_a_trace_flattens_as_optree_does(example: Any) -> None:
    """The same leaves in the same order, and the same tree of others, with the order of keys."""
    leaves, spec = flatten_traced(example, None)
    expected, optree_spec = tree.flatten(example)
    assert len(leaves) == len(expected) == spec.num_leaves
    assert all(leaf is other for leaf, other in zip(leaves, expected, strict=True))
    assert spec.num_children == optree_spec.num_children
    assert tree.shard_specs(spec) == tree.shard_specs(optree_spec)

    others = [f"leaf {i}" for i in range(len(leaves))]
    rebuilt = unflatten_traced(spec, others)
    assert tree.flatten(rebuilt) == (others, optree_spec)
    # The oldest optree sorts the keys of a defaultdict, where Python runs it.
    if not isinstance(example, defaultdict):
        assert repr(rebuilt) == repr(tree.unflatten(optree_spec, others))
    with pytest.raises(ValueError, match=r"leaves for a tree of"):
        unflatten_traced(spec, [*others, "one more"])


@pytest.mark.parametrize(
    "example", [1, None, {"b": 1, "a": [2, (3, None)]}, Pair((), (1, 2))], ids=repr
)
def test_a_trace_formats_specs_as_optree_does(example: Any) -> None:
    _, spec = flatten_traced(example, None)
    _, optree_spec = tree.flatten(example)
    assert tree.format_spec(spec) == tree.format_spec(optree_spec)


def test_a_trace_formats_shards() -> None:
    _, spec = flatten_traced({"w": Shard(torch.ones(2), LocalAxis(), (2,))}, None)
    assert tree.format_spec(spec) == "{'w': Shard(local=*)}"


def test_a_trace_asks_what_is_a_leaf() -> None:
    example = {"b": Pair(1, 2), "a": [3]}

    def is_pair(node: Any) -> bool:
        return isinstance(node, Pair)

    leaves, _ = flatten_traced(example, is_pair)
    assert leaves == tree.flatten(example, is_pair)[0] == [3, Pair(1, 2)]


@pytest.mark.parametrize(
    "other",
    [
        {"w": None},
        {"w": {"v": 1}},
        {"v": 1},
        [1],
        {"w": 1, "x": 2},
    ],
)
def test_map_refuses_another_structure(other: object) -> None:
    message = r"trees differ in structure: {'w': \*} against"
    with pytest.raises(ValueError, match=message):
        tree.map(lambda a, b: a, {"w": 1}, other)
    with pytest.raises(ValueError, match="trees differ in structure"):
        tree.where(torch.tensor(True), {"w": torch.ones(())}, other)


# Numbers


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
    assert tree.zeros_like(torch.ones(1).to(dtype)).dtype == wide


def test_global_norm() -> None:
    large = torch.full((4,), 1e15)
    empty = torch.zeros(2, 0)
    half = torch.full((4,), 300.0, dtype=torch.float16)

    assert tree.global_norm({"a": large, "b": empty}) == pytest.approx(2e15)
    assert tree.global_norm({"half": half}) == 600
    assert tree.global_norm(()) == 0


@pytest.mark.parametrize("size", [2, SMALL_LEAF + 1])
def test_the_norm_of_complex_leaves_beside_real_ones(size: int) -> None:
    half = torch.full((size,), 3.0, dtype=torch.bfloat16)
    leaves = [half, torch.full((size,), 4.0j), torch.full((size,), 2.0).double()]
    norm = tree.global_norm(leaves)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm.item(), math.sqrt(29 * size))


def test_empty_leaves_are_finite_on_their_device() -> None:
    """A rank may hold nothing of a leaf, and sums this over the others on the device."""
    empty = torch.zeros(0, device="meta")
    assert tree.all_finite([empty]).device == empty.device
    assert tree.all_finite([torch.zeros(0)])


def derive_forward(function: Callable[[Any], Tensor], primals: Any) -> Tensor | None:
    """Differentiates along ones, by dual numbers without functorch."""
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, torch.ones_like(x)) for x in primals]
        return forward_ad.unpack_dual(function(duals)).tangent


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

    slope = torch.func.grad(norm)

    def sum_of_slopes(x: Any) -> Tensor:
        return torch.stack([leaf.sum() for leaf in slope(x)]).sum()

    leaves = [x.clone().requires_grad_() for x in zeros]
    batch = [x[None] for x in zeros]
    derivatives: list[Any] = [
        slope(zeros),
        torch.vmap(slope)(batch),
        torch.func.jvp(norm, (zeros,), (ones,))[1],
        torch.autograd.grad(norm(leaves), leaves),
    ]
    tangent = derive_forward(norm, zeros)
    if tangent is not None:
        derivatives.append(tangent)
    if not rest:
        second = torch.func.grad(sum_of_slopes)(zeros)
        second_forward = torch.func.jvp(slope, (zeros,), (ones,))[1]
        derivatives += [second, second_forward]

    for derivative in tree.leaves(derivatives):
        assert (derivative == 0).all()


# Differences


class Differing(NamedTuple):
    """Two trees, and how their first difference is described."""

    actual: Any
    expected: Any
    difference: str | None


TWO = torch.ones(2)
LONGS = TWO.long()
SCALED = TWO.to(torch.float8_e4m3fn)
COLUMN = torch.ones(2, 1)


def differing_from_two(leaf: Tensor) -> Differing:
    difference = f"s is {describe_leaf(leaf)}, and {describe_leaf(TWO)} was expected"
    return Differing(leaf, TWO, difference)


DIFFERENCES = [
    Differing(
        actual={"a": 1, "b": 2},
        expected={"a": 1, "c": 2},
        difference="s['c'] is missing",
    ),
    Differing(
        actual={"a": 1},
        expected={"a": 1, "c": 2},
        difference="s['c'] is missing",
    ),
    Differing(
        actual={"c": 1},
        expected={"a": 1, "c": 2},
        difference="s['a'] is missing",
    ),
    Differing(
        actual={"a": 1, "b": 2, "c": 3},
        expected={"a": 1, "c": 3},
        difference="s['b'] has no place",
    ),
    Differing(
        actual={"a": 1, "c": 3},
        expected={"a": 1},
        difference="s['c'] has no place",
    ),
    Differing(
        actual=[1],
        expected=(1,),
        difference="s has other containers",
    ),
    Differing(
        actual={"a": 1},
        expected={"a": "x"},
        difference="s['a'] is int, no tensor, and 'x' was expected",
    ),
    Differing(
        actual={"a": 1},
        expected={"a": 2},
        difference=None,
    ),
    # Floating point dtypes are alike.
    Differing(TWO, TWO.double(), difference=None),
    differing_from_two(LONGS),
    differing_from_two(SCALED),
    differing_from_two(COLUMN),
]


@pytest.mark.parametrize("case", DIFFERENCES)
def test_the_first_difference(case: Differing) -> None:
    assert tree.describe_mismatch(case.actual, case.expected, "s") == case.difference


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

    assert len(seen) == 3
    for values in seen:
        assert values.flatten().tolist() == [1.0, 2.0]
    with FakeTensorMode():
        assert concrete(torch.ones(2)) is None
    assert concrete(torch.ones(2, device="meta")) is None


# Prefixes

LAYERS = {
    "layers": [Layer({"a": 1, "b": 2}), Layer(3)],
    "last": Layer(4),
}


class Prefix(NamedTuple):
    """A prefix, a tree, and the prefix's label for each leaf of the tree."""

    prefix: Any
    full: Any
    labels: list[str]


PREFIXES = [
    Prefix(
        prefix=OrderedDict(z="slow", a="fast"),
        full={"a": 1, "z": 2},
        labels=["fast", "slow"],
    ),
    Prefix(
        prefix={"a": "fast", "z": "slow"},
        full=OrderedDict(z=1, a=2),
        labels=["slow", "fast"],
    ),
    Prefix(
        prefix=defaultdict(str, a="fast", z="slow"),
        full={"z": [1, 2], "a": 3},
        labels=["fast", "slow", "slow"],
    ),
    Prefix(
        prefix={"a": None, "z": "slow"},
        full={"a": None, "z": 1},
        labels=["slow"],
    ),
    Prefix(
        prefix={"a": "any", "z": ("slow",)},
        full={"a": [], "z": (1,)},
        labels=["slow"],
    ),
    Prefix(
        prefix={"layers": "all", "last": "one"},
        full=LAYERS,
        labels=["one", "all", "all", "all"],
    ),
    Prefix(
        prefix={"layers": [Layer("a"), "b"], "last": Layer("z")},
        full=LAYERS,
        labels=["z", "a", "a", "b"],
    ),
]


@pytest.mark.parametrize("case", PREFIXES)
def test_a_prefix_is_paired_by_key(case: Prefix) -> None:
    """Whatever dict either is, and whatever order it keeps; through classes, too."""
    assert tree.broadcast_prefix(case.prefix, case.full) == case.labels


NO_PREFIXES: list[tuple[Any, Any]] = [
    ({"a": None, "b": "x"}, {"a": 1, "b": 2}),
    ({"a": {"x": "m"}}, {"a": 1}),
    ({"a": ()}, {"a": 1}),
    ({"a": "m", "b": "m"}, {"a": 1}),
    ({}, {"a": 1}),
    (("m", "m"), [1, 2]),
    (["m"], [1, 2]),
    (["m"], {"a": 1}),
]


@pytest.mark.parametrize(("prefix", "full"), NO_PREFIXES)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_no_prefix_is_refused(prefix: Any, full: Any, compiled: bool) -> None:
    def count_leaves(leaf: torch.Tensor) -> torch.Tensor:
        tensors = tree.map(lambda _: leaf, full)
        return leaf * len(tree.broadcast_prefix(prefix, tensors))

    if compiled:
        run = torch.compile(count_leaves, fullgraph=True, backend="eager")
        # The compiler cannot follow the message, and says so instead.
        error: type[Exception] = RuntimeError
    else:
        run = count_leaves
        error = ValueError
    with pytest.raises(error):
        run(torch.ones(2))


@pytest.mark.parametrize("empty", [{}, {"a": None}, [], None, {"b": ({}, None)}])
def test_a_compiled_step_takes_empty_containers(empty: Any) -> None:
    params = {"w": torch.zeros(3), "empty": empty}
    sgd = ps.optim.sgd(0.1, momentum=0.9)
    step = ps.make_update_step(
        lambda p, m: m["x"] @ p["w"] - 1, sgd, weight_fn=lambda m: m["x"][:, 0]
    )
    args = params, sgd.init(params), [{"x": torch.ones(2, 3)}]
    compiled = ps.compile(step, fullgraph=True, backend="eager")
    new_params, *_ = compiled(*args)
    expected, *_ = step(*args)
    assert new_params["empty"] == empty
    assert_same(new_params, expected)


def test_containers_without_leaves_stay_in_a_trace() -> None:
    def replace_leaves(leaf: torch.Tensor) -> Any:
        return leaf, tree.map(lambda _: "x", {"a": leaf, "b": [()]})

    run = torch.compile(replace_leaves, fullgraph=True, backend="eager")
    _, texts = run(torch.ones(2))
    assert texts == {"a": "x", "b": [()]}
