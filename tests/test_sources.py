"""Where microbatches come from: lists, generators, a ``DataLoader``, rows of a data set."""

from __future__ import annotations

from typing import Any

import datasets
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import purestep as ps
from tests.examples import examples_of


def collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One microbatch of examples as they come."""
    (packed,) = ps.pack(examples, max_tokens=10**6)
    return packed


def counts_of(source: Any) -> list[int]:
    """The tokens of each update, from a source of microbatches."""

    def loss_fn(w: Tensor, microbatch: dict[str, Tensor]) -> Tensor:
        return w * microbatch["labels"]

    step = ps.make_update_step(loss_fn, ps.optim.sgd(0.0))
    w = torch.tensor(1.0)
    counts = []
    for group in ps.prefetch(ps.group(source, 2), "cpu"):
        w, _, metrics = step(w, ps.optim.sgd(0.0).init(w), group)
        counts.append(int(metrics.num_tokens))
    return counts


SOURCE_LENGTHS = [3, 1, 4, 1, 5, 9]


def test_sources_of_every_kind() -> None:
    """A list, a generator, and a DataLoader with workers, of two examples in each microbatch."""
    examples = examples_of(SOURCE_LENGTHS)
    pairs = [examples[i : i + 2] for i in (0, 2, 4)]
    expected = [9, 14]
    assert counts_of([collate(pair) for pair in pairs]) == expected
    assert counts_of(collate(pair) for pair in pairs) == expected
    loader: Any = DataLoader(examples, batch_size=2, collate_fn=collate, num_workers=2)  # type: ignore[arg-type]
    assert counts_of(loader) == expected


def test_rows_of_a_hugging_face_dataset() -> None:
    """Rows are examples as they are, in torch format."""
    lists = {"tokens": [[i] * n for i, n in enumerate(SOURCE_LENGTHS)]}
    rows = datasets.Dataset.from_dict({**lists, "labels": lists["tokens"]}).with_format("torch")
    packed = ps.pack(list(rows), max_tokens=12)
    assert ps.count_tokens(packed) == sum(SOURCE_LENGTHS)
    assert sum(map(len, ps.balance(list(rows), 2))) == len(SOURCE_LENGTHS)
    loader = DataLoader(rows, batch_size=2, collate_fn=collate)
    assert counts_of(loader) == [9, 14]
