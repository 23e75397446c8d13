"""What is put together is alike: examples are trees of any mapping, of one structure, and may be empty."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import purestep as ps
from purestep import data
from tests.examples import examples_of


def odd_ones() -> dict[str, Any]:
    """What is not like ``{"tokens": int64, "more": [float32 of (n, 2)]}``, and what a refusal of it says."""
    tokens, more = torch.ones(2, dtype=torch.int64), torch.ones(2, 2)
    return {
        "different names": ({"ids": tokens, "more": [more]}, "differs in structure"),
        "fewer": ({"tokens": tokens}, "differs in structure"),
        "deeper": ({"tokens": [tokens], "more": [more]}, "differs in structure"),
        "no tensor": ({"tokens": tokens, "more": [None]}, "differs in structure"),
        "dtype": ({"tokens": tokens.int(), "more": [more]}, r"\['tokens'\] is torch.int32 .*int64"),
        "dtype below": (
            {"tokens": tokens, "more": [more.half()]},
            r"\['more'\]\[0\] is torch.float16",
        ),
        "shape": ({"tokens": tokens, "more": [more[:, :1]]}, r"\['more'\]\[0\] .*shape \(2, 1\)"),
        "rank": ({"tokens": tokens, "more": [more[:, 0]]}, r"\['more'\]\[0\] .*shape \(2,\)"),
    }


TOGETHER: dict[str, Any] = {
    "pack": lambda examples, budget: ps.pack(examples, max_tokens=budget, pad=0),
    "pack_documents": lambda examples, budget: ps.pack_documents(
        examples, row_tokens=budget, pad=0
    ),
    "stack": lambda examples, budget: data.stack(examples, budget, 0),
    "merge": lambda examples, _: ps.merge(examples),
}


@given(
    st.sampled_from(sorted(odd_ones())),
    st.sampled_from(sorted(TOGETHER)),
    st.integers(0, 4),
    st.integers(2, 20),
)
def test_examples_that_are_not_alike_are_refused(kind: str, how: str, at: int, budget: int) -> None:
    """Whatever the budget, and wherever the odd one stands."""
    example = {"tokens": torch.ones(2, dtype=torch.int64), "more": [torch.ones(2, 2)]}
    odd, message = odd_ones()[kind]
    examples: list[Any] = [example] * 4
    examples.insert(at, odd)
    told = rf"(examples|microbatches)\[{at or 1}\]"
    with pytest.raises(ValueError, match=told + (".*" if at == 0 else ".*" + message)):
        TOGETHER[how](examples, budget)


EMPTY: dict[str, Any] = {"tokens": torch.tensor([]), "labels": torch.tensor([])}


@given(st.lists(st.integers(0, 3), max_size=6), st.integers(0, 6))
def test_examples_of_length_0_cost_nothing(lengths: list[int], at: int) -> None:
    """Wherever they stand, and though the dtype of what is empty is that of any other list."""
    examples = examples_of([length for length in lengths if length])
    more: list[Any] = [*examples[:at], EMPTY, *examples[at:], EMPTY]
    same = ps.pack(examples, max_tokens=6)
    assert str(ps.pack(more, max_tokens=6)) == str(same)
    documents = ps.pack_documents(more, row_tokens=6)
    if examples:
        assert str(documents) == str(ps.pack_documents(examples, row_tokens=6))
    else:
        assert {name: tuple(leaf.shape) for name, leaf in documents.items()} == dict.fromkeys(
            ["tokens", "labels", "positions", "segments"], (0, 6)
        )
        assert same == []
        assert ps.count_tokens([documents]) == 0
    assert sum(map(len, ps.balance(more, 2))) == len(more)


class Encoding(UserDict[str, Any]):
    """As a tokenizer of transformers returns it: a mapping that optree does not know."""


def encoded(example: Any) -> Any:
    """The same example as such mappings, also inside of lists and of each other."""
    return Encoding(
        text=[Encoding(tokens=example["tokens"])],
        more=Encoding(labels=example["labels"], none=None),
    )


def decoded(example: Any) -> Any:
    """The same as dicts."""
    return {
        "text": [{"tokens": example["tokens"]}],
        "more": {"labels": example["labels"], "none": None},
    }


def test_mappings_of_any_kind_are_trees() -> None:
    """What is made of them is made of dicts."""
    plain, batches = examples_of([3, 1, 2]), examples_of([4, 4])
    ours, theirs = [encoded(e) for e in plain], [decoded(e) for e in plain]
    for how in ("pack", "pack_documents"):
        assert str(TOGETHER[how](ours, 6)) == str(TOGETHER[how](theirs, 6))
    assert [[id(e) for e in share] for share in ps.balance(ours, 2)] == [
        [id(ours[0])],
        [id(ours[1]), id(ours[2])],
    ]
    assert str(ps.split(encoded(batches[0]), 2)) == str(ps.split(decoded(batches[0]), 2))
    assert str(ps.merge(list(map(encoded, batches)))) == str(ps.merge(list(map(decoded, batches))))


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_mappings_of_any_kind_are_microbatches(normalize: Any) -> None:
    """Of an update as they are, and prefetched."""

    def loss_fn(w: Tensor, microbatch: Any) -> Tensor:
        return (w - microbatch["text"][0]["tokens"]) ** 2

    def weight_fn(microbatch: Any) -> Tensor:
        return ps.label_weights(microbatch["more"])

    optimizer, w = ps.optim.sgd(0.1), torch.tensor(0.5)
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=weight_fn, normalize=normalize)
    group = ps.pack(examples_of([3, 1, 2]), max_tokens=4)
    expected = step(w, optimizer.init(w), list(map(decoded, group)))
    ours = list(map(encoded, group))
    groups = ps.prefetch([ours], "cpu", weight_fn=weight_fn)
    fetched = next(groups)
    for microbatches in (ours, fetched):
        assert step(w, optimizer.init(w), microbatches)[0] == expected[0]
    assert all(type(m) is type(m["text"][0]) is type(m["more"]) is dict for m in fetched)
