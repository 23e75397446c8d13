"""``ps.random``: the published words, the same everywhere, for each element by its coordinates."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.devices import Waits, lazy
from purestep.random import TokenKeys, philox as words_of

MASK = 2**32 - 1

PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Counters, key and words of philox4x32-10 in Random123's kat_vectors."""


def philox(counters: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The paper's own words, in Python's whole numbers."""
    (a, b, c, d), (low, high) = counters, key
    for _ in range(10):
        one, two = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (two >> 32) ^ b ^ low, two & MASK, (one >> 32) ^ d ^ high, one & MASK
        low, high = (low + 0x9E3779B9) & MASK, (high + 0xBB67AE85) & MASK
    return a, b, c, d


def halves(key: int) -> tuple[int, int]:
    return key & MASK, (key >> 32) & MASK


@pytest.mark.parametrize(("counters", "key", "words"), PUBLISHED)
def test_published_words(
    counters: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert philox(counters, key) == words
    a, b, c, d = map(torch.tensor, counters)
    made = words_of(ps.random.key(key[0] | key[1] << 32), (a, b, c, d))
    assert tuple(map(int, made)) == words


@pytest.mark.parametrize("shape", [(), (9,), (3, 6), (2, 3, 5), (2, 1, 3, 7)])
def test_an_element_is_drawn_by_its_coordinates(shape: tuple[int, ...]) -> None:
    """The counters are the coordinates, the last one first and by fours, with which of four words."""
    keys = [0, 5, 2**64 - 3]
    drawn = ps.random.bits(torch.stack([*map(ps.random.key, keys)]), shape)
    assert drawn.dtype == torch.int64
    assert drawn.shape == (3, *shape)
    for (row, key), place in itertools.product(
        enumerate(keys), itertools.product(*map(range, shape))
    ):
        last, *others = [*place[::-1], 0, 0, 0, 0][:4]
        expected = philox((last // 4, *others), halves(key))[last % 4]
        assert drawn[(row, *place)] == expected


def test_more_coordinates_than_counters_make_keys() -> None:
    """Of each further coordinate, with counters that neither a draw nor a child of the key has."""
    seed, shape = 7, (2, 3, 1, 2, 2, 5)
    key = ps.random.key(seed)
    drawn = ps.random.bits(key, shape)

    def within(seed: int, coordinate: int) -> int:
        low, high, _, _ = philox((coordinate, 0, 2, MASK), halves(seed))
        return low | high << 32

    for i, j in itertools.product(range(2), range(3)):
        own = ps.random.key(within(within(seed, i), j))
        assert torch.equal(drawn[i, j], ps.random.bits(own, shape[2:]))
    children = [*ps.random.split(key, 2), *ps.random.fold_in(key, torch.arange(2))]
    words = torch.stack([ps.random.bits(child, shape[1:]) for child in children])
    assert len(torch.cat([drawn, words]).unique()) == 3 * drawn.numel()


def test_keys_of_keys() -> None:
    key = ps.random.key(3)
    folded = philox((5, 7, 0, MASK), (3, 0))
    made = ps.random.fold_in(key, 5 | 7 << 32)
    assert made.shape == ()
    assert halves(int(made)) == folded[:2]
    assert torch.equal(ps.random.fold_in(key, torch.tensor(5 | 7 << 32)), made)
    assert torch.equal(ps.random.fold_in(key, -1), ps.random.fold_in(key, torch.tensor(-1)))
    assert halves(int(ps.random.split(key, 3)[2])) == philox((2, 0, 1, MASK), (3, 0))[:2]
    many = [ps.random.fold_in(key, torch.arange(1000)), ps.random.split(key, 1000), key[None]]
    assert len(torch.cat(many).unique()) == 2001
    keys = ps.random.split(key, 4)
    assert torch.equal(ps.random.split(keys, 2), torch.vmap(ps.random.split)(keys))


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "bits": lambda key: ps.random.bits(key, (3, 5)),
    "fold_in": lambda key: ps.random.fold_in(key, 4),
    "split": lambda key: ps.random.split(key, 3),
    "uniform": lambda key: ps.random.uniform(key, (3, 5)),
    "normal": lambda key: ps.random.normal(key, (3, 5)),
    "bernoulli": lambda key: ps.random.bernoulli(key, 0.3, (3, 5)),
    "dropout": lambda key: ps.random.dropout(torch.ones(*key.shape, 3, 6), 0.3, key),
    "six dimensions": lambda key: ps.random.bits(key, (2, 1, 2, 1, 2, 3)),
    "tokens": lambda key: ps.random.dropout(
        torch.ones(*key.shape, 2, 4, 4), 0.3, TokenKeys(key[..., None].expand(*key.shape, 4), torch.arange(4).expand(*key.shape, 4))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_everywhere(name: str) -> None:
    """One key, many, under vmap of either depth, and under grad: the same bits."""
    draw, keys = DRAWS[name], ps.random.split(ps.random.key(1), 4)
    drawn = draw(keys)
    assert torch.equal(torch.stack([draw(key) for key in keys]), drawn)
    assert torch.equal(torch.vmap(draw)(keys), drawn)
    twice = torch.vmap(torch.vmap(draw))(keys.view(2, 2))
    assert torch.equal(twice.flatten(0, 1), drawn)

    def value(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(), draw(keys)

    differentiate: Callable[..., Any] = torch.func.grad(value, has_aux=True)
    _, within = differentiate(torch.ones(2))
    assert torch.equal(within, drawn)


def test_the_same_in_one_graph() -> None:
    """All of it traced at once, and under vmap within it."""
    assert_same_compiled([*DRAWS.values(), torch.vmap(DRAWS["dropout"])], backend="aot_eager")


def test_the_same_compiled() -> None:
    """So large that the compiler uses vectors."""
    assert_same_compiled([
        lambda keys: ps.random.split(ps.random.fold_in(keys, 4), 64),
        lambda keys: ps.random.bits(keys, (9, 64)),
        lambda keys: ps.random.uniform(keys, (9, 64)),
        lambda keys: ps.random.normal(keys, (3, 5)),
        lambda keys: ps.random.dropout(torch.ones(4, 2, 33, 33), 0.5, keys).sum(-1),
        DRAWS["tokens"],
    ])  # fmt: skip


def assert_same_compiled(draws: list[Callable[[Tensor], Any]], **how: Any) -> None:
    keys = ps.random.split(ps.random.key(1), 4)
    compiled = ps.compile(lambda keys: [draw(keys) for draw in draws], fullgraph=True, **how)
    for made, draw in zip(compiled(keys), draws, strict=True):
        assert torch.equal(made, draw(keys))


def test_the_same_on_a_device() -> None:
    """That is not the CPU, and the host waits for nothing."""
    keys = ps.random.split(ps.random.key(1), 4)
    there = keys.to(lazy())
    draws = [draw for name, draw in DRAWS.items() if name not in ("dropout", "tokens")]
    with Waits() as waits:
        drawn = [draw(there) for draw in draws]
        dropped = ps.random.dropout(torch.ones(4, 6, device=there.device), 0.3, there)
    assert waits.seen == []
    for made, draw in zip(drawn, draws, strict=True):
        assert torch.equal(made.cpu(), draw(keys))
    assert torch.equal(dropped.cpu(), ps.random.dropout(torch.ones(4, 6), 0.3, keys))


def test_dropout_differentiates_everywhere() -> None:
    """The gradient is the mask over 1 − p, by autograd and by every transform, and compiled."""
    keys, x = ps.random.split(ps.random.key(1), 3), torch.randn(3, 5, 7, requires_grad=True)

    def drop(x: Tensor, keys: Tensor = keys) -> Tensor:
        return ps.random.dropout(x, 0.25, keys)

    kept = ~ps.random.bernoulli(keys, 0.25, (5, 7))
    assert 0 < kept.sum() < kept.numel()
    assert torch.equal(drop(x), torch.where(kept, x * (1 / 0.75), 0))
    expected = torch.where(kept, 1 / 0.75, 0)
    (plain,) = torch.autograd.grad(drop(x).sum(), x)
    y = x.detach()
    of_sum = torch.func.grad(lambda y: drop(y).sum())
    per_row = torch.vmap(torch.func.grad(lambda y, key: drop(y, key).sum()))(y, keys)
    (compiled,) = torch.autograd.grad(ps.compile(lambda x: drop(x).sum(), fullgraph=True)(x), x)
    jvp: Callable[..., Any] = torch.func.jvp
    _, forward = jvp(drop, (y,), (torch.ones_like(y),))
    for grad in (plain, of_sum(y), per_row, compiled, forward):
        assert torch.equal(grad, expected)


def test_dropped_is_zero_whatever_it_was() -> None:
    key = ps.random.key(0)
    for p, share in ((0, 1), (1, 0)):
        x = torch.full((8,), float("nan"))
        assert ps.random.dropout(x, p, key).isnan().sum() == 8 * share
    x = torch.full((64,), float("inf"), requires_grad=True)
    made = ps.random.dropout(x, 0.5, key)
    assert set(made.tolist()) == {0.0, float("inf")}


def test_probabilities() -> None:
    """Within six deviations of what they are, of a million draws; 2⁻³² is told from 0."""
    key, count = ps.random.key(11), 1_000_000
    for p in (0.0, 0.1, 0.5, 0.9, 1.0):
        drawn = ps.random.bernoulli(key, p, (count,)).double().mean()
        assert abs(drawn - p) <= 6 * (p * (1 - p) / count) ** 0.5
    uniform = ps.random.uniform(key, (count,), torch.float64)
    assert abs(uniform.mean() - 0.5) <= 6 * (1 / 12 / count) ** 0.5
    assert abs(uniform.var() - 1 / 12) <= 6 * (1 / 180 / count) ** 0.5
    normal = ps.random.normal(key, (count,), torch.float64)
    assert abs(normal.mean()) <= 6 / count**0.5
    assert abs(normal.var() - 1) <= 6 * (2 / count) ** 0.5
    assert abs((normal**4).mean() - 3) <= 6 * (96 / count) ** 0.5
    # Neighbours in each dimension, and of neighbouring keys, are not correlated.
    grid = ps.random.uniform(torch.arange(100), (100, 100), torch.float64) * 12**0.5 - 3**0.5
    for dim in range(3):
        first, second = grid.narrow(dim, 0, 99), grid.narrow(dim, 1, 99)
        assert abs((first * second).mean()) <= 6 / first.numel() ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_is_below_one_in_every_dtype(dtype: torch.dtype) -> None:
    drawn = ps.random.uniform(ps.random.key(0), (200_000,), dtype)
    assert drawn.dtype == dtype
    assert drawn.min() >= 0
    assert drawn.max() < 1
    exact = ps.random.bits(ps.random.key(0), (200_000,)).double() / 2**32
    step = 2.0**-32 if dtype == torch.float64 else torch.finfo(dtype).eps / 2
    assert ((exact - drawn.double()) < step).all()
    assert (exact >= drawn.double()).all()


def test_normal_is_the_quantile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the middle of each word's interval, to float64's precision, also at both ends."""
    draw = random.Random(0)
    words = [*(draw.randrange(2**32) for _ in range(5000)), *range(50), *range(MASK - 50, MASK + 1)]
    monkeypatch.setattr(ps.random, "bits", lambda key, shape: torch.tensor(words))
    made = ps.random.normal(ps.random.key(0), (len(words),), torch.float64)
    exact = [NormalDist().inv_cdf((w + 0.5) / 2**32) for w in words]
    torch.testing.assert_close(made.tolist(), exact, rtol=1e-12, atol=1e-12)


def documents(lengths: list[int]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "tokens": torch.randint(100, (n,), generator=generator),
            "id": torch.tensor(40 + i),
            "x": torch.randn(n, 6, generator=generator),
        }
        for i, n in enumerate(lengths)
    ]


def test_padding_packing_and_neighbours_change_nothing() -> None:
    """An example's dropout is the same alone, padded, in any batch, and among others in one row."""
    lengths = [5, 3, 8, 1, 4]
    examples = ps.random.with_keys(documents(lengths), ps.random.key(5))
    pad = {"tokens": 0, "id": 0, "x": 0.0, "key": 0}
    scores = {n: torch.randn(2, n, n, generator=torch.Generator().manual_seed(n)) for n in lengths}

    def alone(example: Any) -> list[Tensor]:
        key, n = example["key"], len(example["tokens"])
        ones = torch.ones(n)
        return [ps.random.dropout(each, 0.5, key) for each in (example["x"], scores[n], ones)]

    expected = {int(e["id"]): alone(e) for e in examples}
    for microbatch in ps.pack(examples, max_tokens=12, multiple_of=3, pad=pad):
        rows, length = microbatch["tokens"].shape
        assert microbatch["key"].shape == (rows,)
        x = ps.random.dropout(microbatch["x"], 0.5, microbatch["key"])
        one = ps.random.dropout(torch.ones(rows, length), 0.5, microbatch["key"])
        pairs = ps.random.dropout(torch.ones(rows, 2, length, length), 0.5, microbatch["key"])
        for row, number in enumerate(microbatch["id"].tolist()):
            n = lengths[number - 40]
            for made, own in zip(
                (x[row, :n], pairs[row, :, :n, :n] * scores[n], one[row, :n]), expected[number], strict=True
            ):  # fmt: skip
                assert torch.equal(made, own)
    packed = ps.pack_documents(examples, row_tokens=9, pad=pad)
    assert packed["segments"].max() > 1
    keys = ps.random.token_keys(packed["key"], packed["segments"], packed["positions"])
    rows, length = packed["tokens"].shape
    x = ps.random.dropout(packed["x"], 0.5, keys)
    one = ps.random.dropout(torch.ones(rows, length), 0.5, keys)
    pairs = ps.random.dropout(torch.ones(rows, 2, length, length), 0.5, keys)
    seen = 0
    for row, segment in itertools.product(range(rows), range(1, int(packed["segments"].max()) + 1)):
        where = (packed["segments"][row] == segment).nonzero()[:, 0]
        if len(where) == 0:
            continue
        number = int(packed["id"][row, segment - 1])
        n, seen = len(where), seen + 1
        assert n == lengths[number - 40]
        for made, own in zip(
            (x[row, where], pairs[row][:, where][:, :, where] * scores[n], one[row, where]), expected[number], strict=True
        ):  # fmt: skip
            assert torch.equal(made, own)
    assert seen == len(lengths)


def test_token_keys_are_keys() -> None:
    """``fold_in`` reaches them; they are a tree of tensors."""
    keys = torch.tensor([[1, 2]])
    packed = ps.random.token_keys(keys, torch.tensor([[1, 2, 0]]), torch.tensor([[0, 0, 0]]))
    folded = ps.random.fold_in(packed, 9)
    assert torch.equal(folded.keys[:, :2], ps.random.fold_in(keys, 9))
    assert torch.equal(folded.positions, packed.positions)
    assert [leaf.shape for leaf in ps.tree.leaves_of(packed)] == [(1, 3), (1, 3)]


def test_with_keys() -> None:
    examples, key = documents([2, 1, 3]), ps.random.key(1)
    by_number = [each["key"] for each in ps.random.with_keys(examples, key, start=7)]
    assert by_number == [ps.random.fold_in(key, 7 + i) for i in range(3)]
    shuffled = ps.random.with_keys(examples[::-1], key, identity="id", name="noise")
    assert [each["noise"] for each in shuffled] == [
        ps.random.fold_in(key, 42 - i) for i in range(3)
    ]
    assert ps.random.with_keys([], key) == []
    assert "key" not in examples[0]
    with pytest.raises(ValueError, match=r"examples\[0\] has 'id' already"):
        ps.random.with_keys(examples, key, name="id")
    with pytest.raises(ValueError, match=r"examples\[0\] has no 'number', only \['tokens'"):
        ps.random.with_keys(examples, key, identity="number")
    with pytest.raises(ValueError, match="'x' must be one whole number"):
        ps.random.with_keys(examples[:1], key, identity="x")


def test_gradients_of_single_examples_draw_for_themselves() -> None:
    """Rows under ``torch.vmap`` have their own keys, and draw what they draw in a microbatch."""
    keys, x = ps.random.split(ps.random.key(0), 3), torch.randn(3, 4)

    def loss(w: Tensor, m: Any) -> Tensor:
        return ps.random.dropout(m["x"], 0.5, m["key"]) @ w

    def gradient(w: Tensor, group: list[Any]) -> Tensor:
        sums = ps.accumulate(loss, w, group, weight_fn=lambda m: torch.ones(len(m["x"])))
        return sums.grads

    w, microbatch = torch.zeros(4), {"x": x, "key": keys}
    each = torch.vmap(lambda m: gradient(w, [{name: leaf[None] for name, leaf in m.items()}]))
    torch.testing.assert_close(each(microbatch).sum(0), gradient(w, [microbatch]))


def test_public_names_are_what_it_shows() -> None:
    assert dir(ps.random) == sorted(ps.random.__all__)
    assert all(hasattr(ps.random, name) for name in ps.random.__all__)


def test_draws_from_nothing_else() -> None:
    before = torch.get_rng_state()
    for draw in DRAWS.values():
        draw(ps.random.key(1))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ps.random.key(2**64), "whole number of 64 bits"),
        (lambda: ps.random.key(0.5), "whole number of 64 bits"),  # type: ignore[arg-type]
        (lambda: ps.random.bits(torch.ones(2)), r"float32 of shape \(2,\) is no key"),
        (lambda: ps.random.bits(3), "is no key"),  # type: ignore[arg-type]
        (lambda: ps.random.fold_in(ps.random.key(0), torch.ones(1)), "must be whole numbers"),
        (lambda: ps.random.bernoulli(ps.random.key(0), 1.5), "p=1.5 must be a probability"),
        (lambda: ps.random.dropout(torch.ones(3, 2), -0.5, ps.random.key(0)), "p=-0.5 must be"),
        (
            lambda: ps.random.dropout(torch.ones(3, 2), 0.5, torch.arange(2)),
            r"keys of shape \(2,\) for torch.float32 of shape \(3, 2\)",
        ),
        (
            lambda: ps.random.dropout(
                torch.ones(3, 2), 0.5, TokenKeys(*torch.zeros(2, 3, 3).long())
            ),
            r"token keys of shape \(3, 3\) for a tensor of shape \(3, 2\)",
        ),
        (
            lambda: ps.random.token_keys(torch.arange(2), torch.ones(2, 3), torch.ones(2, 3)),
            "must be those of pack_documents",
        ),
    ],
)
def test_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()
