"""``ps.random``: the published words, the same everywhere, for each element by its coordinates.

T15 has dropout in padded, packed and cut data.
"""

import itertools
import random
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.devices import Waits, device
from proofs.strategies import assert_same
from purestep.random import PackedKeys, philox as words_of

MASK = 2**32 - 1

PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip
"""Counters, key and words of philox4x32-10 in Random123's kat_vectors."""


def philox(counters: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The words of the paper, in Python's whole numbers."""
    (a, b, c, d), (low, high) = counters, key
    for _ in range(10):
        one, two = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            (two >> 32) ^ b ^ low,
            two & MASK,
            (one >> 32) ^ d ^ high,
            one & MASK,
        )
        low, high = (low + 0x9E3779B9) & MASK, (high + 0xBB67AE85) & MASK
    return a, b, c, d


def halves(key: int) -> tuple[int, int]:
    return key & MASK, (key >> 32) & MASK


@pytest.mark.parametrize(("counters", "key", "words"), PUBLISHED)
def test_published_words(counters: Any, key: Any, words: Any) -> None:
    assert philox(counters, key) == words
    a, b, c, d = map(torch.tensor, counters)
    made = words_of(ps.random.key(key[0] | key[1] << 32), (a, b, c, d))
    assert tuple(map(int, made)) == words


@pytest.mark.parametrize("shape", [(), (9,), (3, 6), (2, 3, 5), (2, 1, 3, 7)])
def test_an_element_is_drawn_by_its_coordinates(shape: tuple[int, ...]) -> None:
    """The counters are the coordinates, the last one first and by fours, with which of four words."""
    keys = [0, 5, 2**63, 2**64 - 3]
    drawn = ps.random.bits(torch.stack([*map(ps.random.key, keys)]), shape)
    assert drawn.dtype == torch.int64
    assert drawn.shape == (4, *shape)
    places = itertools.product(*map(range, shape))
    for (row, key), place in itertools.product(enumerate(keys), places):
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
    made = ps.random.fold_in(key, 5 | 7 << 32)
    assert made.shape == ()
    assert halves(int(made)) == philox((5, 7, 0, MASK), (3, 0))[:2]
    assert torch.equal(ps.random.fold_in(key, torch.tensor(5 | 7 << 32)), made)
    assert torch.equal(
        ps.random.fold_in(key, -1), ps.random.fold_in(key, torch.tensor(-1))
    )
    assert (
        halves(int(ps.random.split(key, 3)[2])) == philox((2, 0, 1, MASK), (3, 0))[:2]
    )
    many = [
        ps.random.fold_in(key, torch.arange(1000)),
        ps.random.split(key, 1000),
        key[None],
    ]
    assert len(torch.cat(many).unique()) == 2001


def tokens(key: Tensor) -> PackedKeys:
    """The keys of four tokens of one example."""
    return PackedKeys(
        key[..., None].expand(*key.shape, 4), torch.arange(4).expand(*key.shape, 4)
    )


def ones(key: Tensor, *shape: int) -> Tensor:
    return torch.ones(*key.shape, *shape, device=key.device)


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "bits": lambda key: ps.random.bits(key, (3, 5)),
    "fold_in": lambda key: ps.random.fold_in(key, 4),
    "split": lambda key: ps.random.split(key, 3),
    "uniform": lambda key: ps.random.uniform(key, (3, 5)),
    "normal": lambda key: ps.random.normal(key, (3, 5)),
    "bernoulli": lambda key: ps.random.bernoulli(key, 0.3, (3, 5)),
    "dropout": lambda key: ps.random.dropout(ones(key, 3, 6), 0.3, key),
    "six dimensions": lambda key: ps.random.bits(key, (2, 1, 2, 1, 2, 3)),
    "tokens": lambda key: ps.random.dropout(ones(key, 2, 4, 4), 0.3, tokens(key)),
}
KEYS = ps.random.split(ps.random.key(1), 4)


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_everywhere(name: str) -> None:
    """One key, many, under vmap of either depth, and under grad; torch's generator is not used."""
    draw, before = DRAWS[name], torch.get_rng_state()
    drawn = draw(KEYS)
    assert torch.equal(torch.stack([draw(key) for key in KEYS]), drawn)
    assert torch.equal(torch.vmap(draw)(KEYS), drawn)
    twice = torch.vmap(torch.vmap(draw))(KEYS.view(2, 2))
    assert torch.equal(twice.flatten(0, 1), drawn)

    def sum_beside(x: Tensor) -> tuple[Tensor, Any]:
        return x.sum(), draw(KEYS)

    beside: Any = torch.func.grad(sum_beside, has_aux=True)(torch.ones(2))
    assert torch.equal(beside[1], drawn)
    assert torch.equal(torch.get_rng_state(), before)


def all_of_them(keys: Tensor) -> list[Tensor]:
    return [draw(keys) for draw in DRAWS.values()] + [
        torch.vmap(DRAWS["dropout"])(keys)
    ]


def large(keys: Tensor) -> list[Tensor]:
    """So much that the compiler's code uses vectors."""
    return [ps.random.uniform(keys, (9, 64))]


@pytest.mark.parametrize("draws", [all_of_them, large])
def test_the_same_compiled(draws: Any) -> None:
    """In one graph, with vmap in it, and with torch's compiler."""
    how = {"backend": "aot_eager"} if draws is all_of_them else {}
    assert_same(ps.compile(draws, fullgraph=True, **how)(KEYS), draws(KEYS))


def test_the_same_on_a_device() -> None:
    """That is not the CPU, and the host waits for nothing."""
    there, drawn = (
        KEYS.to(device()),
        [draw for name, draw in DRAWS.items() if name != "tokens"],
    )
    with Waits() as waits:
        found = [draw(there) for draw in drawn]
    assert waits.seen == []
    assert_same([each.cpu() for each in found], [draw(KEYS) for draw in drawn])


def test_dropout_differentiates_everywhere() -> None:
    """The gradient is the mask over 1 - p, by autograd, by every transform, and compiled."""
    keys, x = KEYS[:3], torch.randn(3, 5, 7, requires_grad=True)

    def drop(x: Tensor, keys: Tensor = keys) -> Tensor:
        return ps.random.dropout(x, 0.25, keys)

    kept = ~ps.random.bernoulli(keys, 0.25, (5, 7))
    assert 0 < kept.sum() < kept.numel()
    assert torch.equal(drop(x), torch.where(kept, x * (1 / 0.75), 0))
    y, jvp = x.detach(), torch.func.jvp
    compiled = ps.compile(lambda x: drop(x).sum(), fullgraph=True, backend="aot_eager")
    for grad in (
        *torch.autograd.grad(drop(x).sum(), x),
        torch.func.grad(lambda y: drop(y).sum())(y),
        torch.vmap(torch.func.grad(lambda y, key: drop(y, key).sum()))(y, keys),
        *torch.autograd.grad(compiled(x), x),
        jvp(drop, (y,), (torch.ones_like(y),))[1],
    ):
        assert torch.equal(grad, torch.where(kept, 1 / 0.75, 0))


def test_dropped_is_zero_whatever_it_was() -> None:
    key, nan = ps.random.key(0), torch.full((8,), float("nan"))
    for p, share in ((0, 1), (1, 0)):
        assert ps.random.dropout(nan, p, key).isnan().sum() == 8 * share
    made = ps.random.dropout(torch.full((64,), float("inf")), 0.5, key)
    assert set(made.tolist()) == {0.0, float("inf")}


def test_probabilities() -> None:
    """Within six deviations of what they are, of so many draws."""
    key, count = ps.random.key(11), 250_000
    for p in (0.0, 0.1, 0.5, 0.9, 1.0):
        drawn = ps.random.bernoulli(key, p, (count,)).double().mean()
        assert abs(drawn - p) <= 6 * (p * (1 - p) / count) ** 0.5


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_uniform_is_below_one_in_every_dtype(dtype: torch.dtype) -> None:
    drawn = ps.random.uniform(ps.random.key(0), (200_000,), dtype)
    assert drawn.dtype == dtype
    assert 0 <= drawn.min() <= drawn.max() < 1
    exact = ps.random.bits(ps.random.key(0), (200_000,)).double() / 2**32
    step = 2.0**-32 if dtype == torch.float64 else torch.finfo(dtype).eps / 2
    assert ((exact - drawn.double()) < step).all()
    assert (exact >= drawn.double()).all()


def test_normal_is_the_quantile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the middle of each word's interval, to float64's precision, also at both ends."""
    draw = random.Random(0)
    words = [
        *(draw.randrange(2**32) for _ in range(5000)),
        *range(50),
        *range(MASK - 50, MASK + 1),
    ]
    monkeypatch.setattr(ps.random, "bits", lambda key, shape: torch.tensor(words))
    made = ps.random.normal(ps.random.key(0), (len(words),), torch.float64)
    exact = [NormalDist().inv_cdf((w + 0.5) / 2**32) for w in words]
    torch.testing.assert_close(made.tolist(), exact, rtol=1e-12, atol=1e-12)


def test_token_keys_are_keys() -> None:
    """``fold_in`` reaches them; they are a tree of tensors."""
    keys = torch.tensor([[1, 2]])
    packed = ps.random.token_keys(
        keys, torch.tensor([[1, 2, 0]]), torch.tensor([[0, 0, 0]])
    )
    folded = ps.random.fold_in(packed, 9)
    assert torch.equal(folded.keys[:, :2], ps.random.fold_in(keys, 9))
    assert torch.equal(folded.positions, packed.positions)
    assert [leaf.shape for leaf in ps.tree.leaves(packed)] == [(1, 3), (1, 3)]


EXAMPLES = [{"id": torch.tensor(40 + i), "x": torch.ones(2)} for i in range(3)]
KEY = ps.random.key(1)


def test_with_keys_by_number_or_by_identity() -> None:
    by_number = [each["key"] for each in ps.random.with_keys(EXAMPLES, KEY, start=7)]
    assert by_number == [ps.random.fold_in(KEY, 7 + i) for i in range(3)]
    shuffled = ps.random.with_keys(EXAMPLES[::-1], KEY, identity="id", name="noise")
    expected = [ps.random.fold_in(KEY, 42 - i) for i in range(3)]
    assert [each["noise"] for each in shuffled] == expected
    assert ps.random.with_keys([], KEY) == []
    assert "key" not in EXAMPLES[0]


SQUARE, TWO = torch.ones(3, 2), torch.arange(2)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: ps.random.key(2**64), "whole number of 64 bits"),
    (lambda: ps.random.key(-(2**63) - 1), "whole number of 64 bits"),
    (lambda: ps.random.key(0.5), "whole number of 64 bits"),  # type: ignore[arg-type]
    (lambda: ps.random.bits(torch.ones(2)), r"float32 of shape \(2,\) is no key"),
    (lambda: ps.random.bits(3), "is no key"),  # type: ignore[arg-type]
    (lambda: ps.random.split(torch.ones(2)), r"float32 of shape \(2,\) is no key"),
    (lambda: ps.random.split(3), "is no key"),  # type: ignore[arg-type]
    (lambda: ps.random.token_keys(torch.ones(2, 3), *torch.ones(2, 2, 3)), r"float32 of shape \(2, 3\) is no key"),
    (lambda: ps.random.dropout(SQUARE, 0.5, PackedKeys(SQUARE, SQUARE)), r"float32 of shape \(3, 2\) is no key"),
    (lambda: ps.random.dropout(SQUARE, 0.5, 3), "is no key: keys are tensors"),  # type: ignore[arg-type]
    (lambda: ps.random.fold_in(KEY, torch.ones(1)), "must be whole numbers"),
    (lambda: ps.random.bernoulli(KEY, 1.5), "p=1.5 must be a probability"),
    (lambda: ps.random.dropout(SQUARE, -0.5, KEY), "p=-0.5 must be"),
    (lambda: ps.random.dropout(SQUARE, 0.5, TWO), r"keys of shape \(2,\) for torch.float32 of shape \(3, 2\)"),
    (lambda: ps.random.dropout(SQUARE, 0.5, PackedKeys(*torch.zeros(2, 3, 3).long())), r"token keys of shape \(3, 3\) for a tensor of shape \(3, 2\)"),
    (lambda: ps.random.token_keys(TWO, torch.ones(2, 3), torch.ones(2, 3)), "must be those of pack_documents"),
    (lambda: ps.random.with_keys(EXAMPLES, KEY, name="id"), r"examples\[0\] has 'id' already"),
    (lambda: ps.random.with_keys(EXAMPLES, KEY, identity="number"), r"examples\[0\] has no 'number', only \['id'"),
    (lambda: ps.random.with_keys(EXAMPLES, KEY, identity="x"), "'x' must be one whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()
