"""Tests ``ps.random``: the published words, on every device and under every transform.

Every element is drawn by its coordinates. T15 proves dropout in padded, packed and cut data.
"""

import itertools
import math
from collections.abc import Callable
from random import Random
from statistics import NormalDist
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp
from torch.fx.experimental.proxy_tensor import make_fx

import purestep as ps
from purestep import random
from purestep.random import PackedKeys, philox as words_of
from support.devices import Waits, get_device
from support.strategies import assert_same

MASK = 2**32 - 1

PUBLISHED = [
    {
        "counters": (0, 0, 0, 0),
        "key": (0, 0),
        "words": (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    },
    {
        "counters": (MASK, MASK, MASK, MASK),
        "key": (MASK, MASK),
        "words": (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    },
    {
        "counters": (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        "key": (0xA4093822, 0x299F31D0),
        "words": (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    },
]
"""Counters, key and words of philox4x32-10 in Random123's kat_vectors."""


def reference_philox(
    counters: tuple[int, ...], key: tuple[int, ...]
) -> tuple[int, ...]:
    """Computes the words as the paper does, with Python's integers."""
    a, b, c, d = counters
    low, high = key
    for _ in range(10):
        product_of_a = 0xD2511F53 * a
        product_of_c = 0xCD9E8D57 * c
        a = (product_of_c >> 32) ^ b ^ low
        b = product_of_c & MASK
        c = (product_of_a >> 32) ^ d ^ high
        d = product_of_a & MASK
        low = (low + 0x9E3779B9) & MASK
        high = (high + 0xBB67AE85) & MASK
    return a, b, c, d


def split_words(key: int) -> tuple[int, int]:
    """Splits a key into its low and its high 32 bits."""
    return key & MASK, (key >> 32) & MASK


@pytest.mark.parametrize("vector", PUBLISHED)
def test_published_words(vector: Any) -> None:
    low, high = vector["key"]
    key = random.key(low | high << 32)
    a, b, c, d = [torch.tensor(counter) for counter in vector["counters"]]

    words = words_of(key, (a, b, c, d))

    published = vector["words"]
    reference = reference_philox(vector["counters"], vector["key"])
    assert reference == published
    assert tuple(int(word) for word in words) == published


SHAPES: list[tuple[int, ...]] = [
    (),
    (9,),
    (3, 6),
    (2, 3, 5),
    (2, 1, 3, 7),
]


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_a_key_has_the_bits_of_its_seed(seed: int) -> None:
    assert random.key(seed).item() == seed
    assert random.key(seed % 2**64).item() == seed


@pytest.mark.parametrize("shape", SHAPES)
def test_an_element_is_drawn_by_its_coordinates(shape: tuple[int, ...]) -> None:
    """The counters are the coordinates, last one first.

    Four words come from one call, so the last coordinate is divided by four, and the rest
    picks the word.
    """
    seeds = [0, 5, 2**63, 2**64 - 3]
    keys = [random.key(seed) for seed in seeds]

    drawn = random.bits(torch.stack(keys), shape)

    assert drawn.dtype == torch.int64
    assert drawn.shape == (4, *shape)
    ranges = [range(size) for size in shape]
    for row, seed in enumerate(seeds):
        for coordinates in itertools.product(*ranges):
            padded = [*reversed(coordinates), 0, 0, 0, 0]
            last, *others = padded[:4]
            counters = (last // 4, *others)
            words = reference_philox(counters, split_words(seed))
            assert drawn[(row, *coordinates)] == words[last % 4]


def test_more_coordinates_than_counters_make_keys() -> None:
    """Each further coordinate derives a key.

    Its counters are those of neither a draw nor a child of the key.
    """
    seed = 7
    shape = (2, 3, 1, 2, 2, 5)
    key = random.key(seed)

    def derive_seed(seed: int, coordinate: int) -> int:
        counters = (coordinate, 0, 2, MASK)
        low, high, _, _ = reference_philox(counters, split_words(seed))
        return low | high << 32

    drawn = random.bits(key, shape)

    for i in range(2):
        seed_of_i = derive_seed(seed, i)
        for j in range(3):
            derived = random.key(derive_seed(seed_of_i, j))
            expected = random.bits(derived, shape[2:])
            assert_same(drawn[i, j], expected)
    split = random.split(key, 2)
    folded = random.fold_in(key, torch.arange(2))
    children = torch.cat([split, folded])
    of_children = random.bits(children, shape[1:])
    words = torch.cat([drawn, of_children])
    assert len(words.unique()) == 3 * drawn.numel()


def derive_words(counters: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Computes the words of a key that is derived from the key of a small seed."""
    words = reference_philox((*counters, MASK), (seed, 0))
    return words[:2]


@pytest.mark.parametrize("dtype", [numpy.int8, numpy.int32, numpy.uint64])
def test_keys_of_numbers_of_numpy(dtype: Any) -> None:
    key = random.key(3)
    by_int = random.fold_in(key, 5)
    by_numpy = random.fold_in(key, dtype(5))
    assert_same(by_numpy, by_int)


def test_keys_of_a_size_that_varies() -> None:
    """A trace by ``make_fx`` makes no constant of it."""

    def fold_length(key: Tensor, x: Tensor) -> Tensor:
        return random.fold_in(key, x.shape[0])

    key = random.key(3)
    five = torch.ones(5)
    seven = torch.ones(7)
    trace = make_fx(fold_length, tracing_mode="symbolic")
    graph = trace(key, five)
    assert_same(graph(key, seven), random.fold_in(key, 7))


def test_keys_of_keys() -> None:
    seed = 3
    key = random.key(seed)
    number = 5 | 7 << 32

    folded = random.fold_in(key, number)
    split = random.split(key, 3)

    assert folded.shape == ()
    assert split_words(int(folded)) == derive_words((5, 7, 0), seed)
    assert split_words(int(split[2])) == derive_words((2, 0, 1), seed)
    for value in (number, -1):
        by_int = random.fold_in(key, value)
        by_tensor = random.fold_in(key, torch.tensor(value))
        assert_same(by_int, by_tensor)
    many = torch.cat(
        [
            random.fold_in(key, torch.arange(1000)),
            random.split(key, 1000),
            key[None],
        ]
    )
    assert len(many.unique()) == 2001


def four_tokens(key: Tensor) -> PackedKeys:
    """Makes the keys of four tokens of one example."""
    shape = (*key.shape, 4)
    keys = key.unsqueeze(-1).expand(shape)
    positions = torch.arange(4).expand(shape)
    return PackedKeys(keys, positions)


def ones(key: Tensor, *shape: int) -> Tensor:
    """Makes ones of this shape for each key."""
    return torch.ones(*key.shape, *shape, device=key.device)


def drop_elements(key: Tensor) -> Tensor:
    x = ones(key, 3, 6)
    return random.dropout(x, 0.3, key)


def drop_tokens(key: Tensor) -> Tensor:
    x = ones(key, 2, 4, 4)
    return random.dropout(x, 0.3, four_tokens(key))


SHAPE = (3, 5)
SIX_DIMENSIONS = (2, 1, 2, 1, 2, 3)
DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "bits": lambda key: random.bits(key, SHAPE),
    "fold_in": lambda key: random.fold_in(key, 4),
    "split": lambda key: random.split(key, 3),
    "uniform": lambda key: random.uniform(key, SHAPE),
    "normal": lambda key: random.normal(key, SHAPE),
    "bernoulli": lambda key: random.bernoulli(key, 0.3, SHAPE),
    "dropout": drop_elements,
    "six dimensions": lambda key: random.bits(key, SIX_DIMENSIONS),
    "tokens": drop_tokens,
}
KEYS = random.split(random.key(1), 4)


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_everywhere(name: str) -> None:
    """Draws with one key, with many, under vmap of either depth, and under grad.

    torch's generator is not used.
    """
    draw = DRAWS[name]
    rng_state = torch.get_rng_state()

    def sum_and_draw(x: Tensor) -> tuple[Tensor, Any]:
        return x.sum(), draw(KEYS)

    drawn = draw(KEYS)
    one_by_one = [draw(key) for key in KEYS]
    mapped_draw = torch.vmap(draw)
    mapped = mapped_draw(KEYS)
    mapped_twice = torch.vmap(mapped_draw)(KEYS.view(2, 2))
    grad_with_aux: Any = grad(sum_and_draw, has_aux=True)
    _, under_grad = grad_with_aux(torch.ones(2))

    assert_same(torch.stack(one_by_one), drawn)
    assert_same(mapped, drawn)
    assert_same(mapped_twice.flatten(0, 1), drawn)
    assert_same(under_grad, drawn)
    assert_same(torch.get_rng_state(), rng_state)


def run_all_draws(keys: Tensor) -> list[Tensor]:
    """Runs every draw, and one of them under vmap."""
    drawn = [draw(keys) for draw in DRAWS.values()]
    drawn.append(torch.vmap(DRAWS["dropout"])(keys))
    return drawn


def draw_many(keys: Tensor) -> list[Tensor]:
    """Draws so many numbers that the compiled code uses vectors."""
    return [random.uniform(keys, (9, 64))]


def test_the_same_compiled() -> None:
    """In one graph, with vmap in it."""
    compiled = ps.compile(run_all_draws, fullgraph=True, backend="aot_eager")

    assert_same(compiled(KEYS), run_all_draws(KEYS))


def test_the_same_by_torchs_compiler() -> None:
    compiled = ps.compile(draw_many, fullgraph=True)

    assert_same(compiled(KEYS), draw_many(KEYS))


def test_the_same_on_a_device() -> None:
    """Also on a device that is not the CPU, where the host waits for nothing."""
    keys = KEYS.to(get_device())
    draws = DRAWS.copy()
    # Its positions are on the CPU.
    del draws["tokens"]

    with Waits() as waits:
        drawn = [draw(keys) for draw in draws.values()]

    assert waits.seen == []
    expected = [draw(KEYS) for draw in draws.values()]
    assert_same([value.cpu() for value in drawn], expected)


def test_dropout_differentiates_everywhere() -> None:
    """The gradient is the mask over 1 - p: by autograd, every transform, and compiled."""
    keys = KEYS[:3]
    x = torch.randn(3, 5, 7, requires_grad=True)
    y = x.detach()

    def drop(x: Tensor, keys: Tensor = keys) -> Tensor:
        return random.dropout(x, 0.25, keys)

    def total(x: Tensor, keys: Tensor = keys) -> Tensor:
        return drop(x, keys).sum()

    dropped = random.bernoulli(keys, 0.25, (5, 7))
    assert 0 < dropped.sum() < dropped.numel()
    scale = 1 / 0.75
    assert_same(drop(x), torch.where(dropped, 0, x * scale))
    compiled = ps.compile(lambda x: total(x), fullgraph=True, backend="aot_eager")
    (by_autograd,) = torch.autograd.grad(total(x), x)
    (by_compiler,) = torch.autograd.grad(compiled(x), x)
    total_grad = grad(total)
    _, by_jvp, *_ = jvp(drop, (y,), (torch.ones_like(y),))
    grads = [
        by_autograd,
        by_compiler,
        by_jvp,
        total_grad(y),
        torch.vmap(total_grad)(y, keys),
    ]
    expected = torch.where(dropped, 0, scale)
    for actual in grads:
        assert_same(actual, expected)


def test_dropped_is_zero_whatever_it_was() -> None:
    key = random.key(0)
    nan = torch.full((8,), math.nan)
    infinite = torch.full((64,), math.inf)

    nothing_dropped = random.dropout(nan, 0, key)
    all_dropped = random.dropout(nan, 1, key)
    half_dropped = random.dropout(infinite, 0.5, key)

    assert nothing_dropped.isnan().sum() == 8
    assert all_dropped.isnan().sum() == 0
    assert set(half_dropped.tolist()) == {0.0, math.inf}


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_probabilities(p: float) -> None:
    """The mean of many draws is within six standard deviations of p."""
    count = 250_000
    deviation = (p * (1 - p) / count) ** 0.5

    drawn = random.bernoulli(random.key(11), p, (count,))

    mean = drawn.double().mean()
    assert abs(mean - p) <= 6 * deviation


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_uniform_is_below_one_in_every_dtype(dtype: torch.dtype) -> None:
    key = random.key(0)
    shape = (200_000,)

    drawn = random.uniform(key, shape, dtype)

    assert drawn.dtype == dtype
    assert 0 <= drawn.min() <= drawn.max() < 1
    words = random.bits(key, shape)
    exact = words.double() / 2**32
    rounding = exact - drawn.double()
    spacing = torch.finfo(dtype).eps / 2
    if dtype == torch.float64:
        spacing = 2.0**-32
    assert (rounding < spacing).all()
    assert (rounding >= 0).all()


def test_normal_is_the_quantile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the middle of each word's interval, to float64's precision, also at both ends."""
    generator = Random(0)
    words = [generator.randrange(2**32) for _ in range(5000)]
    words += range(50)
    words += range(MASK - 50, MASK + 1)
    monkeypatch.setattr(random, "bits", lambda key, shape: torch.tensor(words))

    shape = (len(words),)
    drawn = random.normal(random.key(0), shape, torch.float64)

    normal = NormalDist()
    exact = []
    for word in words:
        middle = (word + 0.5) / 2**32
        exact.append(normal.inv_cdf(middle))
    torch.testing.assert_close(drawn.tolist(), exact, rtol=1e-12, atol=1e-12)


def test_token_keys_are_keys() -> None:
    """``fold_in`` reaches them; they are a tree of tensors."""
    keys = torch.tensor([[1, 2]])
    segments = torch.tensor([[1, 2, 0]])
    positions = torch.tensor([[0, 0, 0]])

    packed = random.token_keys(keys, segments, positions)
    folded = random.fold_in(packed, 9)

    folded_keys = folded.keys[:, :2]
    assert_same(folded_keys, random.fold_in(keys, 9))
    assert_same(folded.positions, packed.positions)
    leaves = ps.tree.leaves(packed)
    shapes = [leaf.shape for leaf in leaves]
    assert shapes == [(1, 3), (1, 3)]


EXAMPLES = [
    {"id": torch.tensor(40), "x": torch.ones(2)},
    {"id": torch.tensor(41), "x": torch.ones(2)},
    {"id": torch.tensor(42), "x": torch.ones(2)},
]
KEY = random.key(1)


def test_with_keys_by_number_or_by_identity() -> None:
    numbered = random.with_keys(EXAMPLES, KEY, start=7)
    reverse = EXAMPLES[::-1]
    identified = random.with_keys(reverse, KEY, identity="id", name="noise")

    for example, number in zip(numbered, [7, 8, 9], strict=True):
        assert example["key"] == random.fold_in(KEY, number)
    for example, identity in zip(identified, [42, 41, 40], strict=True):
        assert example["noise"] == random.fold_in(KEY, identity)
    assert random.with_keys([], KEY) == []
    assert "key" not in EXAMPLES[0]


SQUARE = torch.ones(3, 2)
TWO = torch.arange(2)
FLOATS = torch.ones(2)
MANY_FLOATS = torch.ones(2, 3)
TOKEN_KEYS = PackedKeys(torch.zeros(3, 3).long(), torch.zeros(3, 3).long())
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: random.key(2**64), "whole number of 64 bits"),
    (lambda: random.key(-(2**63) - 1), "whole number of 64 bits"),
    (lambda: random.key(0.5), "whole number of 64 bits"),  # type: ignore[arg-type]
    (lambda: random.bits(FLOATS), r"float32 of shape \(2,\) is no key"),
    (lambda: random.bits(3), "is no key"),  # type: ignore[arg-type]
    (lambda: random.split(FLOATS), r"float32 of shape \(2,\) is no key"),
    (lambda: random.split(3), "is no key"),  # type: ignore[arg-type]
    (
        lambda: random.token_keys(MANY_FLOATS, MANY_FLOATS, MANY_FLOATS),
        r"float32 of shape \(2, 3\) is no key",
    ),
    (
        lambda: random.dropout(SQUARE, 0.5, PackedKeys(SQUARE, SQUARE)),
        r"float32 of shape \(3, 2\) is no key",
    ),
    (
        lambda: random.dropout(SQUARE, 0.5, 3),  # type: ignore[arg-type]
        "is no key: keys are tensors",
    ),
    (lambda: random.fold_in(KEY, FLOATS[:1]), "must be whole numbers"),
    (lambda: random.split(KEY, -1), "number=-1 of new keys must be whole"),
    (
        lambda: random.split(KEY, 2.5),  # type: ignore[arg-type]
        "number=2.5 of new keys must be whole",
    ),
    (
        lambda: random.normal(KEY, 3),  # type: ignore[arg-type]
        r"shape=3 must be a sequence of sizes, such as \(3,\)",
    ),
    (lambda: random.bernoulli(KEY, 1.5), "p=1.5 must be a probability"),
    (lambda: random.dropout(SQUARE, -0.5, KEY), "p=-0.5 must be"),
    (
        lambda: random.dropout(SQUARE, 0.5, TWO),
        r"keys of shape \(2,\) for torch.float32 of shape \(3, 2\)",
    ),
    (
        lambda: random.dropout(SQUARE, 0.5, TOKEN_KEYS),
        r"token keys of shape \(3, 3\) for a tensor of shape \(3, 2\)",
    ),
    (
        lambda: random.token_keys(TWO, MANY_FLOATS, MANY_FLOATS),
        "must be those of pack_documents",
    ),
    (
        lambda: random.with_keys(EXAMPLES, KEY, name="id"),
        r"examples\[0\] has 'id' already",
    ),
    (
        lambda: random.with_keys(EXAMPLES, KEY, identity="number"),
        r"examples\[0\] has no 'number', only \['id'",
    ),
    (
        lambda: random.with_keys(EXAMPLES, KEY, identity="x"),
        "'x' must be one whole number",
    ),
    (
        lambda: random.with_keys([{"id": 1}, {"id": [1, 2]}], KEY, identity="id"),
        "'id' must be one whole number",
    ),
    (
        lambda: random.with_keys([{"id": None}], KEY, identity="id"),
        "is None, no whole number",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_random_refuses(call: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()
