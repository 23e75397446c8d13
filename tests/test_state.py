"""State as a flat dict: names, what lies where, and what is refused."""

import io
import re
import warnings
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import purestep as ps
from purestep import tree
from support.torch_private import FakeTensorMode
from tests.checkpoint_states import (
    DTYPES,
    UNSUPPORTED_DTYPES,
    Moments,
    assert_same_bits,
    random_bits,
    state_of_all_dtypes,
    zeros_like,
)


class Part(Enum):
    """Keys that are neither text nor a number; one prints its address."""

    ENCODER = 1
    UNNAMED = object()


register: Any = optree.dataclasses.dataclass


@register(namespace=tree.NAMESPACE)
class Layer:
    """A registered class, and so a node of trees."""

    weight: Any
    bias: Any


class Pair(list[Any]):
    """Gives its entries one name for all."""


def flatten_pair(pair: Any) -> Any:
    children = list(pair)
    names = ["same"] * len(pair)
    return children, None, names


def unflatten_pair(_: Any, children: Any) -> Pair:
    return Pair(children)


optree.register_pytree_node(
    Pair,
    flatten_pair,
    unflatten_pair,
    namespace=tree.NAMESPACE,
)


def addresses_of(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


# Formats


def copy_by_torch_save(flat: dict[str, Tensor], _: Path) -> dict[str, Tensor]:
    """Saves and loads by torch; checks that the file holds little beside the numbers."""
    file = io.BytesIO()
    torch.save(flat, file)
    num_bytes = sum(tensor.nbytes for tensor in flat.values())
    overhead = 400 * (len(flat) + 5)
    assert len(file.getvalue()) < 2 * num_bytes + overhead

    file.seek(0)
    return dict(torch.load(file, weights_only=True))


def copy_by_distributed_checkpoint(
    flat: dict[str, Tensor], folder: Path
) -> dict[str, Tensor]:
    checkpoint = folder / "many"
    save_distributed(flat, checkpoint_id=checkpoint, no_dist=True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in flat.items()}
    load_distributed(loaded, checkpoint_id=checkpoint, no_dist=True)
    return loaded


@pytest.mark.filterwarnings(
    "ignore:ComplexHalf support",
    "ignore:torch.distributed is disabled",
)
@pytest.mark.parametrize(
    "copy_by_format",
    [copy_by_torch_save, copy_by_distributed_checkpoint],
)
def test_any_format_takes_it(copy_by_format: Any, tmp_path: Path) -> None:
    state = state_of_all_dtypes([*DTYPES, *UNSUPPORTED_DTYPES])
    flat = ps.state_dict(state)
    with_numbers = [tensor for tensor in flat.values() if tensor.numel() > 0]
    assert len(addresses_of(with_numbers)) == len(with_numbers)
    for tensor in flat.values():
        assert tensor.is_contiguous()
        assert not tensor.requires_grad

    loaded = copy_by_format(flat, tmp_path)

    assert loaded.keys() == flat.keys()
    assert_same_bits(ps.load_state_dict(zeros_like(state), loaded), state)


# Memory


def test_what_lies_by_itself_is_not_copied() -> None:
    w = torch.randn(2, 3)
    state = {
        "full": w,
        "parts": list(torch.randn(6).split(3)),
        "again": w,
        "column": torch.randn(3, 2).T,
    }
    pointers = {leaf.data_ptr() for leaf in tree.leaves(state)}

    flat = ps.state_dict(state)

    not_copied = [name for name, leaf in flat.items() if leaf.data_ptr() in pointers]
    assert not_copied in (["tree['full']"], ["tree['again']"])


def test_what_is_loaded_is_fresh_and_lies_as_like_does() -> None:
    state = {
        "column": torch.randn(4, 3).T,
        "gaps": torch.randn(4, 6)[:, ::2],
        "p": torch.randn(2),
    }
    like = {**zeros_like(state), "p": torch.zeros(2, requires_grad=True)}
    flat = ps.state_dict(state)
    for tensor in flat.values():
        tensor.requires_grad_()

    loaded = ps.load_state_dict(like, flat)

    assert like["column"].stride() == (1, 3)
    assert loaded["column"].stride() == (1, 3)
    arguments = [*flat.values(), *tree.leaves(like)]
    results = tree.leaves(loaded)
    assert addresses_of(arguments).isdisjoint(addresses_of(results))
    assert not tree.any_requires_grad(loaded)
    assert_same_bits(loaded, state)


# Names

TEXTS = [
    "0",
    "a",
    "a.b",
    "a']['b",
    'q"',
    "'",
    "\n",
    "é",
    "",
    "tree",
    "__metadata__",
]
KEYS = st.one_of(
    st.integers(-2, 2),
    st.sampled_from(TEXTS),
    st.sampled_from([Part.ENCODER, None, (1, "x"), 0.5, b"a", torch.float32]),
    st.just(torch.Size([1, 2])),
)
MAPPINGS: list[Any] = [OrderedDict, lambda d: defaultdict(list, d), dict]
SEQUENCES = [list, tuple, deque]
CLASSES = [Moments, Layer]
LEAVES = st.sampled_from([torch.float32, torch.bool, torch.int64]).map(
    lambda dtype: random_bits(dtype, 2)
)


def containers_of(children: Any) -> Any:
    """Draws sequences, mappings and registered classes with these children."""
    lists = st.lists(children, max_size=3)
    dicts = st.dictionaries(KEYS, children, max_size=4)
    return st.one_of(
        *[lists.map(sequence) for sequence in SEQUENCES],
        *[dicts.map(mapping) for mapping in MAPPINGS],
        *[st.builds(cls, children, children) for cls in CLASSES],
    )


TREES = st.recursive(LEAVES | st.none(), containers_of, max_leaves=12)


@given(TREES)
def test_names_are_unique_and_say_where_a_leaf_is(state: Any) -> None:
    flat = ps.state_dict(state)
    leaves = tree.leaves(state)
    assert len(flat) == len(leaves)
    scope = {"tree": state, "Part": Part, "torch": torch}
    for name, leaf in zip(flat, leaves, strict=True):
        expression = re.sub(r"<(Part\.\w+): 1>", r"\1", name)
        assert eval(expression, scope) is leaf

    in_other_order = dict(reversed(flat.items()))
    loaded = ps.load_state_dict(zeros_like(state), in_other_order)
    assert type(loaded) is type(state)
    assert_same_bits(loaded, state)


def test_every_difference_is_named() -> None:
    state = {
        "a": torch.ones(2),
        "b": [torch.ones(3), torch.ones(1)],
        "n": torch.tensor(1),
    }
    flat: dict[Any, Any] = {
        "tree['b'][0]": torch.ones(3, 1),
        "tree['b'][1]": torch.ones(1).double(),
        "tree['n']": 1,
        "new": torch.ones(1),
        7: None,
    }
    message = "flat does not fit like: build like as"
    with pytest.raises(ValueError, match=message) as refusal:
        ps.load_state_dict(state, flat)

    _, *differences = str(refusal.value).split("\n  ")
    assert differences == [
        "7 is NoneType, no tensor; like has no such leaf",
        "new is torch.float32 of shape (1,); like has no such leaf",
        "tree['a'] is missing; like has torch.float32 of shape (2,)",
        "tree['b'][0] is torch.float32 of shape (3, 1); like has torch.float32 of shape (3,)",
        "tree['b'][1] is torch.float64 of shape (1,); like has torch.float32 of shape (1,)",
        "tree['n'] is int, no tensor; like has torch.int64 of shape ()",
    ]


def test_a_message_has_an_end() -> None:
    message = r"(\n  tree\[\d+\] is missing; .*){8}\n  and 4,992 more$"
    with pytest.raises(ValueError, match=message):
        ps.load_state_dict([torch.ones(1)] * 5000, {})


# What is refused


class Name(str):
    """A key that prints its address."""

    def __repr__(self) -> str:
        return object.__repr__(self)


class Address(Enum):
    """Prints its address, too."""

    HERE = 1

    def __repr__(self) -> str:
        return object.__repr__(self)


ONE = torch.ones(1)
with FakeTensorMode():
    FAKE = torch.ones(2)
META = torch.ones(2, device="meta")
SPARSE = torch.eye(2).to_sparse()
with warnings.catch_warnings(action="ignore"):
    NESTED = torch.nested.nested_tensor([ONE])
NAN = float("nan")

KEY = r"its key is of type .* make it a str"
SAME = "is the name of two leaves"
CLASS = r"tree\[0\] is of class .* plain tensors"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {object(): ONE}}, KEY),
        ({"a": {Part.UNNAMED: ONE}}, KEY),
        ({"a": {frozenset({"a", "b"}): ONE}}, KEY),
        ({"a": {(1, random_bits): ONE}}, KEY),
        ({"a": {Name("w"): ONE}}, KEY),
        ({"a": {Address.HERE: ONE}}, KEY),
        ([Pair([ONE, ONE])], SAME),
        ({NAN: ONE, -NAN: ONE}, SAME),
        ({"step": 3}, r"tree\['step'\] is int, no tensor: .* torch.tensor\(3\)"),
        ([FAKE], CLASS),
        ([META], CLASS),
        ([SPARSE], CLASS),
        ([NESTED], CLASS),
    ],
)
def test_leaves_without_a_lasting_name_or_of_another_class_are_refused(
    state: Any, message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ps.state_dict(state)
    with pytest.raises((ValueError, TypeError), match=message):
        ps.load_state_dict(state, {"tree[0]": torch.ones(2)})
