"""State as a flat dict: names, what lies where, and what is refused."""

import io
import re
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
from tests.states import (
    COMPLEX,
    DTYPES,
    Moments,
    anything,
    assert_same_bits,
    noise,
    zeros,
)
from tests.torch_private import FakeTensorMode


class Part(Enum):
    """Keys that are neither text nor a number; one prints its address."""

    ENCODER = 1
    UNNAMED = object()


register: Any = optree.dataclasses.dataclass


@register(namespace=tree.NAMESPACE)
class Layer:
    """A class of one's own."""

    weight: Any
    bias: Any


class Pair(list[Any]):
    """A class that gives its entries one name for all."""


optree.register_pytree_node(
    Pair, lambda pair: ([*pair], None, ["same"] * len(pair)), lambda _, children: Pair(children),
    namespace=tree.NAMESPACE,
)  # fmt: skip


def by_torch_save(flat: dict[str, Tensor], _: Path) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(flat, file)
    assert len(file.getvalue()) < 2 * sum(t.nbytes for t in flat.values()) + 400 * (
        len(flat) + 5
    )
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


def by_distributed_checkpoint(
    flat: dict[str, Tensor], folder: Path
) -> dict[str, Tensor]:
    save_distributed(flat, checkpoint_id=folder / "many", no_dist=True)
    found = {name: torch.zeros_like(tensor) for name, tensor in flat.items()}
    load_distributed(found, checkpoint_id=folder / "many", no_dist=True)
    return found


@pytest.mark.filterwarnings(
    "ignore:ComplexHalf support", "ignore:torch.distributed is disabled"
)
@pytest.mark.parametrize("way", [by_torch_save, by_distributed_checkpoint])
def test_any_format_takes_it(way: Any, tmp_path: Path) -> None:
    state = anything([*DTYPES, *COMPLEX])
    flat = ps.state_dict(state)
    addresses = [t.untyped_storage().data_ptr() for t in flat.values() if t.numel()]
    assert len(set(addresses)) == len(addresses)
    assert all(t.is_contiguous() and not t.requires_grad for t in flat.values())
    found = way(flat, tmp_path)
    assert found.keys() == flat.keys()
    assert_same_bits(ps.load_state_dict(zeros(state), found), state)


def test_what_lies_by_itself_is_not_copied() -> None:
    w, buffer = torch.randn(2, 3), torch.randn(6)
    state = {
        "whole": w,
        "parts": [*buffer.split(3)],
        "again": w,
        "column": torch.randn(3, 2).T,
    }
    places = {leaf.data_ptr() for leaf in tree.leaves(state)}
    own = [
        name for name, leaf in ps.state_dict(state).items() if leaf.data_ptr() in places
    ]
    assert own in (["tree['whole']"], ["tree['again']"])


def test_what_is_loaded_is_fresh_and_lies_as_like_does() -> None:
    state = {
        "column": torch.randn(4, 3).T,
        "gaps": torch.randn(4, 6)[:, ::2],
        "p": torch.randn(2),
    }
    like = {**zeros(state), "p": torch.zeros(2, requires_grad=True)}
    flat = {name: t.requires_grad_() for name, t in ps.state_dict(state).items()}
    found = ps.load_state_dict(like, flat)
    assert found["column"].stride() == like["column"].stride() == (1, 3)
    theirs = {
        t.untyped_storage().data_ptr() for t in [*flat.values(), *tree.leaves(like)]
    }
    assert not theirs & {t.untyped_storage().data_ptr() for t in tree.leaves(found)}
    assert not tree.any_requires_grad(found)
    assert_same_bits(found, state)


KEYS = st.one_of(
    st.integers(-2, 2),
    st.sampled_from(
        ["0", "a", "a.b", "a']['b", 'q"', "'", "\n", "é", "", "tree", "__metadata__"]
    ),
    st.sampled_from([Part.ENCODER, None, (1, "x"), 0.5, b"a", torch.float32]),
)
CONTAINERS: list[Any] = [OrderedDict, lambda d: defaultdict(list, d), dict]
TREES = st.recursive(
    st.sampled_from([torch.float32, torch.bool, torch.int64]).map(lambda dtype: noise(dtype, 2)) | st.none(),
    lambda children: st.one_of(
        *(st.lists(children, max_size=3).map(kind) for kind in (list, tuple, deque)),
        *(st.dictionaries(KEYS, children, max_size=4).map(kind) for kind in CONTAINERS),
        *(st.builds(kind, children, children) for kind in (Moments, Layer)),
    ),
    max_leaves=12,
)  # fmt: skip


@given(TREES)
def test_names_are_unique_and_say_where_a_leaf_is(state: Any) -> None:
    flat = ps.state_dict(state)
    leaves = tree.leaves(state)
    assert len(flat) == len(leaves)
    names = {"tree": state, "Part": Part, "torch": torch}
    for name, leaf in zip(flat, leaves, strict=True):
        assert eval(re.sub(r"<(Part\.\w+): 1>", r"\1", name), names) is leaf
    found = ps.load_state_dict(zeros(state), dict(reversed(flat.items())))
    assert type(found) is type(state)
    assert_same_bits(found, state)


def test_every_difference_is_named_and_a_message_has_an_end() -> None:
    state = {
        "a": torch.ones(2),
        "b": [torch.ones(3), torch.ones(1)],
        "n": torch.tensor(1),
    }
    flat: dict[Any, Any] = ps.state_dict(state)
    del flat["tree['a']"]
    flat |= {"tree['b'][0]": torch.ones(3, 1), "tree['b'][1]": torch.ones(1).double()}
    flat |= {"tree['n']": 1, "new": torch.ones(1), 7: None}
    with pytest.raises(
        ValueError, match="flat does not fit like: build like as"
    ) as refusal:
        ps.load_state_dict(state, flat)
    assert str(refusal.value).split("\n  ")[1:] == [
        "7 is NoneType, no tensor; like has no such leaf",
        "new is torch.float32 of shape (1,); like has no such leaf",
        "tree['a'] is missing; like has torch.float32 of shape (2,)",
        "tree['b'][0] is torch.float32 of shape (3, 1); like has torch.float32 of shape (3,)",
        "tree['b'][1] is torch.float64 of shape (1,); like has torch.float32 of shape (1,)",
        "tree['n'] is int, no tensor; like has torch.int64 of shape ()",
    ]
    with pytest.raises(
        ValueError, match=r"(\n  tree\[\d+\] is missing; .*){8}\n  and 4,992 more$"
    ):
        ps.load_state_dict([torch.ones(1)] * 5000, {})


class Name(str):
    """A key that prints its address."""

    def __repr__(self) -> str:
        return object.__repr__(self)


ONE = torch.ones(1)
with FakeTensorMode():
    FAKE = torch.ones(2)
KEY = r"its key is of type .* make it a str"
REFUSED: list[tuple[Any, str]] = [
    *(({"a": {key: ONE}}, KEY) for key in (object(), Part.UNNAMED, frozenset({"a", "b"}), (1, noise), Name("w"))),
    ([Pair([ONE, ONE])], "is the name of two leaves"),
    ({float("nan"): ONE, -float("nan"): ONE}, "is the name of two leaves"),
    ({"step": 3}, r"tree\['step'\] is int, no tensor: .* torch.tensor\(3\)"),
    *(([leaf], r"tree\[0\] is of class .* plain tensors") for leaf in (FAKE, torch.ones(2, device="meta"), torch.eye(2).to_sparse())),
]  # fmt: skip


@pytest.mark.parametrize(("state", "text"), REFUSED)
def test_what_has_no_name_that_stays_or_is_no_plain_tensor(
    state: Any, text: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        ps.state_dict(state)
    with pytest.raises((ValueError, TypeError), match=text):
        ps.load_state_dict(state, {"tree[0]": torch.ones(2)})
