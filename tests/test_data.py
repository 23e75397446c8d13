"""Labels, and what belongs to an example as a whole: from a data set to an update."""

from __future__ import annotations

from collections import UserDict
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

import purestep as ps
from purestep import data

# shift_labels

INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
]


def shifted(ids: list[int], mask: list[int]) -> list[int]:
    """Token by token: what comes next, where both are tokens."""
    return [
        ids[t + 1] if t + 1 < len(ids) and mask[t] and mask[t + 1] else -100
        for t in range(len(ids))
    ]


@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 6),
    st.sampled_from([*INTEGERS, torch.int64]),
    st.sampled_from([None, torch.bool, *INTEGERS, torch.int64]),
    st.randoms(use_true_random=False),
)
def test_labels_are_the_next_tokens(
    leading: list[int], length: int, dtype: torch.dtype, mask_dtype: torch.dtype | None, random: Any
) -> None:
    """Of every text of a batch, wherever there is padding; as a whole, one by one, and mapped."""
    shape = [*leading, length]
    size = torch.Size(shape).numel()
    ids = torch.tensor([random.randint(0, 100) for _ in range(size)]).view(shape)
    mask = torch.tensor([random.randint(0, 1) for _ in range(size)]).view(shape)
    if mask_dtype is None:
        mask = torch.ones_like(mask)
    texts = zip(ids.reshape(-1, length or 1), mask.reshape(-1, length or 1), strict=True)
    expected = [shifted(text.tolist(), one.tolist()) for text, one in texts]
    given_mask = mask.to(mask_dtype) if mask_dtype else None
    labels = ps.shift_labels(ids.to(dtype), given_mask)
    assert labels.dtype == torch.int64
    assert list(labels.shape) == shape
    assert labels.reshape(-1).tolist() == [label for text in expected for label in text]
    if leading and leading[0] and dtype == torch.int64:
        assert torch.equal(torch.vmap(ps.shift_labels)(ids, mask), labels)
        unmapped = torch.vmap(ps.shift_labels, in_dims=(0, None))(ids, mask[0])
        assert torch.equal(unmapped, ps.shift_labels(ids, mask[:1].expand_as(mask)))


def test_labels_do_not_write_to_their_text() -> None:
    ids, mask = torch.tensor([5, 6]), torch.tensor([1, 1])
    labels = ps.shift_labels(ids, mask)
    labels.fill_(0)
    assert (ids.tolist(), mask.tolist()) == ([5, 6], [1, 1])


def test_labels_of_an_empty_text() -> None:
    """Whose dtype is that of any other empty list."""
    for labels in (ps.shift_labels(torch.tensor([])), ps.shift_labels(*[torch.tensor([])] * 2)):
        assert (labels.dtype, labels.tolist()) == (torch.int64, [])


def test_labels_are_made_where_the_text_is() -> None:
    ids = torch.ones(2, 3, dtype=torch.int32, device="meta")
    for mask in (None, ids):
        labels = ps.shift_labels(ids, mask)
        assert (labels.device, labels.dtype, labels.shape) == (ids.device, torch.int64, ids.shape)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([5, 6],), TypeError, "input_ids is list, no tensor, where a tensor of integers"),
        (([],), TypeError, "input_ids is list, no tensor"),
        ((torch.tensor(5.0),), TypeError, "input_ids is torch.float32 of shape"),
        ((torch.ones(2),), TypeError, "input_ids is torch.float32 .*, where a tensor of integers"),
        ((torch.tensor([True]),), TypeError, "input_ids is torch.bool .*, where a tensor of int"),
        ((torch.tensor(5),), ValueError, r"input_ids is a single token, torch.int64 of shape \(\)"),
        (
            (torch.ones(2, 3).long(), torch.ones(3).long()),
            ValueError,
            r"attention_mask has the shape \(3,\), but input_ids \(2, 3\)",
        ),
        (
            (torch.tensor([5, 6]), torch.zeros(2)),
            TypeError,
            "attention_mask is torch.float32 .*, where a tensor of integers is needed",
        ),
    ],
)  # fmt: skip
def test_shift_labels_refuses(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match="shift_labels: " + message):
        ps.shift_labels(*arguments)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from(["left", "right"]))
def test_labels_of_padded_texts_are_those_of_the_texts(lengths: list[int], side: str) -> None:
    """On whichever side the padding is: nothing is predicted from it."""
    texts = [torch.arange(1, n + 1) for n in lengths]
    longest = max(lengths)

    def row(text: Tensor) -> Tensor:
        padding = torch.zeros(longest - len(text), dtype=torch.int64)
        return torch.cat([padding, text] if side == "left" else [text, padding])

    ids = torch.stack([row(text) for text in texts])
    labels = ps.shift_labels(ids, ids != 0)
    for text, one, found in zip(texts, ids, labels, strict=True):
        assert torch.equal(found[one != 0], ps.shift_labels(text))
        assert (found[one == 0] == -100).all()


# What belongs to an example as a whole

VOCABULARY, CLASSES = 7, 3
WHOLE = ["weights"]  # The others have no dimension.
Reviews = list[dict[str, Any]]


@st.composite
def reviews(draw: st.DrawFn) -> Reviews:
    """Texts with a class each, some of which do not count, and with what else may belong to a text."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    random = draw(st.randoms(use_true_random=False))
    return [
        {
            "input_ids": torch.tensor([random.randrange(VOCABULARY) for _ in range(n)]),
            "attention_mask": torch.ones(n, dtype=torch.bool),
            "labels": torch.tensor(random.choice([*range(CLASSES), -100])),
            "more": {
                "id": torch.tensor(i),
                "weights": torch.tensor([[random.random()], [random.random()]]),
            },
        }
        for i, n in enumerate(lengths)
    ]


def classifier() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embedding": torch.randn(VOCABULARY, 4, generator=generator, dtype=torch.float64),
        "out": torch.randn(4, CLASSES, generator=generator, dtype=torch.float64),
    }


def class_losses(params: Any, microbatch: Any) -> Tensor:
    """Of each text, by the mean of its tokens."""
    real = microbatch["attention_mask"].double().unsqueeze(-1)
    embedded = params["embedding"][microbatch["input_ids"]].tanh() * real
    logits = embedded.sum(-2) / real.sum(-2) @ params["out"]
    losses = ps.losses.cross_entropy(logits, microbatch["labels"])
    return losses * microbatch["more"]["weights"].sum((-2, -1))


def class_losses_of_documents(params: Any, microbatch: Any) -> Tensor:
    """The same, of each segment of each row."""
    numbers = torch.arange(1, microbatch["labels"].shape[1] + 1)
    real = (microbatch["segments"].unsqueeze(1) == numbers.view(1, -1, 1)).double()
    embedded = params["embedding"][microbatch["input_ids"]].tanh()
    logits = real @ embedded / real.sum(-1, keepdim=True).clamp(min=1) @ params["out"]
    losses = ps.losses.cross_entropy(logits, microbatch["labels"])
    return losses * microbatch["more"]["weights"].sum((-2, -1))


def update(loss_fn: Any, group: Any) -> tuple[Any, ps.StepMetrics]:
    optimizer, params = ps.optim.sgd(0.5), classifier()
    step = ps.make_update_step(loss_fn, optimizer)
    after, _, metrics = step(params, optimizer.init(params), group)
    return after, metrics


def test_classes_by_hand() -> None:
    """The reference itself: the gradient of the mean over texts, from autograd."""
    texts = [([1, 2, 2], 0), ([4], 2)]
    one_by_one = [
        {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.ones(len(ids)),
            "labels": torch.tensor(label),
            "more": {"weights": torch.tensor([[0.25], [0.75]])},
        }
        for ids, label in texts
    ]
    params = {name: leaf.requires_grad_() for name, leaf in classifier().items()}
    losses = [
        torch.nn.functional.cross_entropy(
            params["embedding"][ids].tanh().mean(0) @ params["out"], torch.tensor(label)
        )
        for ids, label in texts
    ]
    torch.stack(losses).mean().backward()
    after, _ = update(class_losses, one_by_one)
    for name, leaf in params.items():
        assert leaf.grad is not None
        torch.testing.assert_close(
            after[name], leaf.detach() - 0.5 * leaf.grad, rtol=1e-12, atol=1e-12
        )


@given(reviews(), st.integers(6, 20), st.integers(1, 4))
def test_a_classifier_on_packed_text(examples: Reviews, budget: int, multiple_of: int) -> None:
    """However its texts are packed, over rows or inside of them, its update is that of the texts one by one."""
    budget = max(budget, 6 + multiple_of)
    expected, told = update(class_losses, examples)
    filling = {**data.PAD, "id": -1, "weights": 0}
    packed = ps.pack(examples, max_tokens=budget, multiple_of=multiple_of, whole=WHOLE)
    documents = ps.pack_documents(examples, row_tokens=budget, pad=filling, whole=WHOLE)
    ahead = ps.prefetch(ps.group(packed, len(packed)), "cpu")
    groups = {
        "packed": (class_losses, packed),
        "prefetched": (class_losses, next(ahead)),
        "documents": (class_losses_of_documents, [documents]),
        "rows": (class_losses_of_documents, ps.split(documents, len(documents["labels"]))),
    }
    for loss_fn, group in groups.values():
        after, metrics = update(loss_fn, group)
        assert metrics.num_tokens == told.num_tokens
        for name in expected:
            torch.testing.assert_close(after[name], expected[name], rtol=1e-12, atol=1e-12)


@given(reviews(), st.integers(6, 20))
def test_what_belongs_to_an_example_stays_with_it(examples: Reviews, budget: int) -> None:
    """Each id once, beside the tokens that it came with; nothing but padding beside the rest."""
    packed = ps.pack(examples, max_tokens=budget, whole=WHOLE)
    found = []
    for part in packed:
        for row, (number, weights) in enumerate(
            zip(part["more"]["id"], part["more"]["weights"], strict=True)
        ):
            one = examples[int(number)]
            assert torch.equal(
                part["input_ids"][row][part["attention_mask"][row]], one["input_ids"]
            )
            assert part["labels"][row] == one["labels"]
            assert torch.equal(weights, one["more"]["weights"])
            found.append(int(number))
    assert sorted(found) == list(range(len(examples)))
    filling = {**data.PAD, "id": -1, "weights": 0}
    documents = ps.pack_documents(examples, row_tokens=budget, pad=filling, whole=WHOLE)
    ids = documents["more"]["id"]
    assert ids.shape[1] == documents["segments"].max()
    assert sorted(ids[ids >= 0].tolist()) == list(range(len(examples)))
    for row, column in (ids >= 0).nonzero().tolist():
        one = examples[int(ids[row, column])]
        segment = documents["segments"][row] == column + 1
        assert torch.equal(documents["input_ids"][row][segment], one["input_ids"])
        assert documents["labels"][row, column] == one["labels"]
        assert torch.equal(documents["more"]["weights"][row, column], one["more"]["weights"])
    assert (documents["labels"][ids < 0] == -100).all()


def test_a_mapping_of_any_kind_has_leaves_of_its_own() -> None:
    """As a tokenizer of transformers returns it."""
    plain = [{"input_ids": torch.ones(n), "labels": torch.tensor(n)} for n in (3, 1, 2)]
    mappings: Any = list(map(UserDict, plain))
    assert str(ps.pack(mappings, max_tokens=4)) == str(ps.pack(plain, max_tokens=4))
    documents = [ps.pack_documents(each, row_tokens=4) for each in (mappings, plain)]
    assert str(documents[0]) == str(documents[1])
    assert [len(share) for share in ps.balance(mappings, 2)] == [1, 2]


def test_balance_by_length_alone() -> None:
    examples = [
        {"tokens": torch.ones(n), "labels": torch.tensor(n), "image": torch.ones(9, 2)}
        for n in (5, 4, 3, 3, 3)
    ]
    shares = ps.balance(examples, 2, whole=["image"])
    assert [[int(one["labels"]) for one in share] for share in shares] == [[5, 3], [4, 3, 3]]


def refused(example: Any, *others: Any) -> str:
    """What all that pack say of it, alike."""
    told = set()
    for together in (
        lambda examples: ps.pack(examples, max_tokens=9, pad=0),
        lambda examples: ps.pack_documents(examples, row_tokens=9, pad=0),
    ):
        with pytest.raises(ValueError, match="examples") as event:
            together([*others, example])
        told.add(str(event.value))
    (message,) = told
    return message


def test_what_belongs_to_no_tokens_is_refused() -> None:
    """Left out with its example, it would be missing from N."""
    one = {"tokens": torch.ones(2), "class": torch.tensor(1)}
    empty = {"tokens": torch.ones(0), "class": torch.tensor(1)}
    message = refused(empty, one)
    assert "examples[1] has length 0, but examples[1]['class'] belongs to it" in message
    assert "leave the example out" in message
    assert refused(empty).startswith("examples[0] has length 0")


def test_what_belongs_to_an_example_is_alike() -> None:
    one = {"tokens": torch.ones(2), "class": torch.tensor(1)}
    assert "['class'] is torch.float32 of shape ()" in refused(
        {**one, "class": torch.tensor(1.0)}, one
    )
    assert "['class'] is torch.int64 of shape (2,)" in refused(
        {**one, "class": torch.tensor([1, 2])}, one
    )
    assert "['class'] is torch.int64 of shape ()" in refused(
        one, {**one, "class": torch.tensor([1, 2])}
    )
    assert "common first dimension" in refused({"class": torch.tensor(1)})
    assert "make tensors of them" in refused({**one, "class": 1})
    with pytest.raises(ValueError, match=r"no pad value for example\['class'\]: add it to pad="):
        ps.pack_documents([one, one], row_tokens=4)
    assert ps.pack([one, one], max_tokens=4)[0]["class"].tolist() == [1, 1]


def test_names_of_what_belongs_to_an_example() -> None:
    """Of any shape, one for all; a name that nothing has is refused, since what was meant would be padded."""
    one = {"tokens": torch.ones(2), "image": torch.ones(2, 3)}
    assert ps.pack([one, one], max_tokens=4, pad=0, whole=["image"])[0]["image"].shape == (2, 2, 3)
    other = {**one, "image": torch.ones(3, 3)}
    with pytest.raises(
        ValueError, match=r"examples\[1\]\['image'\] is torch.float32 of shape \(3, 3\)"
    ):
        ps.pack([one, other], max_tokens=4, pad=0, whole=["image"])
    with pytest.raises(ValueError, match=r"whole=\['picture'\] names 'picture'.*\['image'\]"):
        ps.pack([one], max_tokens=4, pad=0, whole=["picture"])
    with pytest.raises(ValueError, match=r"examples\[0\]\['image'\].* belongs to it as a whole"):
        ps.pack([{**one, "tokens": torch.ones(0)}], max_tokens=4, pad=0, whole=["image"])


# From a table to updates

TABLE: dict[str, list[Any]] = {
    "input_ids": [[(i * k) % VOCABULARY for k in range(1 + i * 5 % 7)] for i in range(13)],
    "kind": [i % CLASSES for i in range(13)],
}


def table() -> datasets.Dataset:
    return datasets.Dataset.from_dict(TABLE).with_format("torch")


def microbatch_of(rows: list[dict[str, Tensor]]) -> Any:
    """Rows of the table as one microbatch of a causal model."""
    examples = [{**row, "labels": ps.shift_labels(row["input_ids"])} for row in rows]
    (microbatch,) = ps.pack(examples, max_tokens=1000)
    return microbatch


def loader(epoch: int, workers: int) -> Any:
    """In an order that the epoch seeds."""
    order = torch.Generator().manual_seed(epoch)
    return DataLoader(
        table(),
        batch_size=2,
        shuffle=True,
        generator=order,
        collate_fn=microbatch_of,
        num_workers=workers,
    )


def stream(epoch: int, workers: int) -> Any:
    """As it is read: of a table that need not fit into memory."""
    rows = table().with_format(None).to_iterable_dataset().with_format("torch")
    return DataLoader(rows, batch_size=2, collate_fn=microbatch_of)


def token_losses(params: Any, microbatch: Any) -> Tensor:
    """Of each token, given the kind of its text."""
    hidden = params["embedding"][microbatch["input_ids"]]
    told = (hidden + params["kind"][microbatch["kind"]].unsqueeze(1)) @ params["out"]
    return ps.losses.cross_entropy(told, microbatch["labels"])


def predictor() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"embedding": (VOCABULARY, 4), "kind": (CLASSES, 4), "out": (4, VOCABULARY)}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


@pytest.mark.parametrize(("source", "workers"), [(loader, 0), (loader, 2), (stream, 0)])
def test_a_table_is_resumed_where_it_stopped(source: Any, workers: int, tmp_path: Path) -> None:
    """Bit for bit, after whichever update of whichever epoch it stopped."""
    optimizer, epochs = ps.optim.adamw(0.1), 2
    step = ps.make_update_step(token_losses, optimizer)

    def train(state: Any, updates: int) -> tuple[Any, list[int]]:
        """Params, what the optimizer keeps, the epoch and the position; the tokens of each update."""
        params, opt_state, epoch, position = state
        tokens: list[int] = []
        while epoch < epochs and len(tokens) < updates:
            batches = source(int(epoch), workers)
            groups = ps.prefetch(ps.group(batches, 2, start=int(position)), "cpu")
            for microbatches in islice(groups, updates - len(tokens)):
                params, opt_state, metrics = step(params, opt_state, microbatches)
                tokens.append(int(metrics.num_tokens))
            position = torch.tensor(groups.position)
            groups.close()
            if len(tokens) < updates:
                epoch, position = epoch + 1, torch.tensor(0)
        return (params, opt_state, epoch, position), tokens

    torch.manual_seed(0)
    begin = predictor(), optimizer.init(predictor()), torch.tensor(0), torch.tensor(0)
    whole, tokens = train(begin, 100)
    assert sum(tokens) == epochs * sum(len(ids) - 1 for ids in TABLE["input_ids"])
    assert (tokens[:4] != tokens[4:]) == (source is loader), "each epoch has its own order"
    for stop in (1, 4, 6):
        state, first = train(begin, stop)
        ps.checkpoint.save(tmp_path / "state", state)
        torch.manual_seed(stop)  # another program
        state, rest = train(ps.checkpoint.load(tmp_path / "state", begin), 100)
        assert [*first, *rest] == tokens
        leaves = zip(ps.tree.leaves_of(state), ps.tree.leaves_of(whole), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in leaves)


def test_a_table_packed_is_the_table_row_by_row() -> None:
    """A loader may make whole groups, in its workers."""
    rows = list(table())
    expected, told = update_of([microbatch_of([row]) for row in rows])
    groups: Any = DataLoader(
        table(),
        batch_size=len(rows),
        collate_fn=packed_groups,
        num_workers=1,
    )
    ahead = ps.prefetch(groups, "cpu")
    after, metrics = update_of(next(ahead))
    ahead.close()
    assert metrics.num_tokens == told.num_tokens
    for name in expected:
        torch.testing.assert_close(after[name], expected[name], rtol=1e-12, atol=1e-12)


def packed_groups(rows: list[dict[str, Tensor]]) -> list[Any]:
    examples = [{**row, "labels": ps.shift_labels(row["input_ids"])} for row in rows]
    return ps.pack(examples, max_tokens=16)


def update_of(group: Any) -> tuple[Any, ps.StepMetrics]:
    params = {name: leaf.double() for name, leaf in predictor().items()}
    optimizer = ps.optim.sgd(0.5)
    step = ps.make_update_step(token_losses, optimizer)
    after, _, metrics = step(params, optimizer.init(params), group)
    return after, metrics


def test_a_mask_that_is_added() -> None:
    """By attention that adds it, and by torch's own, to the same result; a dtype that scores cannot have is refused."""
    segments = torch.tensor([[1, 1, 2, 2, 2, 0]])
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=generator, dtype=torch.float64).unbind()
    scores = q @ k.mT / 2 + ps.segment_mask(segments, torch.float64)
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    expected = attend(q, k, v, attn_mask=ps.segment_mask(segments))
    # Four products in a score, six in what is attended to, and the exponentials of six scores, each way.
    roundings = 2 * (4 + 6 + 3 * 6) * torch.finfo(torch.float64).eps
    assert ((scores.softmax(-1) @ v - expected).abs() <= roundings * v.abs().max()).all()
    with pytest.raises(TypeError, match="floating point dtype of the scores"):
        ps.segment_mask(segments, torch.int64)
