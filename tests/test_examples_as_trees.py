"""Examples that are put together are alike: trees of any mapping and one structure; or empty."""

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import data
from tests.examples import examples_of

TOKENS, MORE = torch.ones(2, dtype=torch.int64), torch.ones(2, 2)
STRUCTURE = "differs in structure"
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "different names": ({"ids": TOKENS, "more": [MORE]}, STRUCTURE),
    "fewer": ({"tokens": TOKENS}, STRUCTURE),
    "deeper": ({"tokens": [TOKENS], "more": [MORE]}, STRUCTURE),
    "no tensor": ({"tokens": TOKENS, "more": [None]}, STRUCTURE),
    "dtype": ({"tokens": TOKENS.int(), "more": [MORE]}, r"\['tokens'\] is torch.int32 .*int64"),
    "dtype below": ({"tokens": TOKENS, "more": [MORE.half()]}, r"\['more'\]\[0\] is torch.float16"),
    "shape": ({"tokens": TOKENS, "more": [MORE[:, :1]]}, r"\['more'\]\[0\] .*shape \(2, 1\)"),
    "rank": ({"tokens": TOKENS, "more": [MORE[:, 0]]}, r"\['more'\]\[0\] .*shape \(2,\)"),
}
TOGETHER: dict[str, Any] = {
    "pack": lambda examples: ps.pack(examples, max_tokens=6, pad=0),
    "pack_documents": lambda examples: ps.pack_documents(examples, row_tokens=6, pad=0),
    "stack": lambda examples: data.stack(examples, 6, 0),
    "merge": ps.merge,
}


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("how", TOGETHER)
@pytest.mark.parametrize("kind", ODD)
def test_examples_that_are_not_alike_are_refused(kind: str, how: str, at: int) -> None:
    """Wherever the odd one stands."""
    odd, message = ODD[kind]
    examples: list[Any] = [{"tokens": TOKENS, "more": [MORE]}] * 4
    examples.insert(at, odd)
    where = rf"(examples|microbatches)\[{at or 1}\]"
    with pytest.raises(ValueError, match=where + (".*" + message if at else "")):
        TOGETHER[how](examples)


EMPTY: dict[str, Any] = {"tokens": torch.tensor([]), "labels": torch.tensor([])}


@pytest.mark.parametrize("lengths", [[], [2], [3, 1, 3, 2]])
@pytest.mark.parametrize("at", [0, 1])
def test_examples_of_length_0_cost_nothing(lengths: list[int], at: int) -> None:
    """Though the dtype of what is empty is that of any other list."""
    examples = examples_of(lengths)
    more: list[Any] = [*examples[:at], EMPTY, *examples[at:], EMPTY]
    assert str(ps.pack(more, max_tokens=6)) == str(ps.pack(examples, max_tokens=6))
    documents = ps.pack_documents(more, row_tokens=6)
    if examples:
        assert str(documents) == str(ps.pack_documents(examples, row_tokens=6))
    else:
        names = ["tokens", "labels", "positions", "segments"]
        shapes = {name: tuple(leaf.shape) for name, leaf in documents.items()}
        assert shapes == dict.fromkeys(names, (0, 6))
        assert ps.count_tokens([documents]) == 0
    assert sum(map(len, ps.balance(more, 2))) == len(more)


class Encoding(UserDict[str, Any]):
    """As a tokenizer of transformers returns it: a mapping that optree does not know."""


def encoded(example: Any, mapping: Any = Encoding) -> Any:
    """The same example as such mappings, also inside of lists and of each other."""
    more = mapping(labels=example["labels"], none=None)
    return mapping(text=[mapping(tokens=example["tokens"])], more=more)


@pytest.mark.parametrize("how", TOGETHER)
def test_mappings_of_any_kind_are_trees(how: str) -> None:
    """What is made of them is made of dicts."""
    examples = examples_of([4, 4])
    ours, theirs = ([encoded(e, mapping) for e in examples] for mapping in (Encoding, dict))
    assert str(TOGETHER[how](ours)) == str(TOGETHER[how](theirs))
    assert str(ps.split(ours[0], 2)) == str(ps.split(theirs[0], 2))
    assert [[id(e) for e in share] for share in ps.balance(ours, 2)] == [[id(e)] for e in ours]


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
    ours, theirs = ([encoded(e, mapping) for e in group] for mapping in (Encoding, dict))
    groups = ps.prefetch([ours], "cpu", weight_fn=weight_fn)
    fetched = next(groups)
    expected = step(w, optimizer.init(w), theirs)[0]
    assert all(step(w, optimizer.init(w), each)[0] == expected for each in (ours, fetched))
    assert all(type(m) is type(m["text"][0]) is type(m["more"]) is dict for m in fetched)
